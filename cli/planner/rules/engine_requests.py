"""P420 to P423, P426, P427, P430 to P433: the router, the experts of each token, and engines whose results do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.engines import rules
from palestra.cli.planner.case import Case
from palestra.cli.planner.memory import record_bytes_per_token
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.engine_words import engine_count, hits, routed, sizes
from palestra.envs.findings import Hit
from palestra.server import enginerules

RULES = Rules()
SCATTERING = ("round_robin", "random", "power_of_two")
"""Policies that look at neither prompt nor key."""


def deterministic(case: Case) -> bool:
    """Whether SGLang engines are to have batch-invariant kernels."""
    return case.deterministic_engine and case.input.rollout.engine == "sglang"


@RULES.rule(
    "P420",
    ERROR,
    "rollout.routing_key",
    title="a router that hashes, and requests without a key",
    why="Without a routing key sglang-router 0.3.2 hashes the Authorization header, which all requests share: 30 of 30 went to one of the "
    "workers when it was tried.",
    recipe="qwen3-4b",
    fails={"rollout.routing_key": False},
)
def no_key(case: Case) -> Iterator[Hit]:
    """consistent_hashing over several engines without a key."""
    rollout = case.input.rollout
    if routed(case) and rollout.router_policy == "consistent_hashing" and not rollout.routing_key:
        yield Hit(
            f"consistent_hashing over {engine_count(case)} engines, and requests have no key: all would go to one",
            "send X-SMG-Routing-Key with the group's id, or take another policy",
            {"rollout.routing_key": True},
        )


@RULES.rule(
    "P421",
    WARNING,
    "rollout.router_policy",
    title="rollouts of one prompt, or turns of one conversation, land on different engines",
    why="An engine finds only beginnings that it computed itself: of n engines about one in n has them (F14).",
    recipe="qwen3-4b",
    fails={"rollout.router_policy": "round_robin"},
)
def scattered(case: Case) -> Iterator[Hit]:
    """A policy that looks at nothing, with groups or turns."""
    rollout, algo = case.input.rollout, case.input.algo
    if not routed(case) or rollout.router_policy not in SCATTERING or not rollout.prefix_cache:
        return
    if algo.group_size > 1 or algo.max_turns > 1:
        count = engine_count(case)
        yield Hit(
            f"{rollout.router_policy} spreads groups of {algo.group_size} over {count} engines: about {1 / count:.0%} of what they share "
            "is found",
            "take consistent_hashing",
            {"rollout.router_policy": "consistent_hashing", "rollout.routing_key": True},
        )


@RULES.rule(
    "P422",
    ERROR,
    "rollout.router",
    title="the experts of each token are asked for through a router that drops the question",
    why="sglang-router 0.3.2 writes /generate anew from the fields that it knows, and return_routed_experts is none of them: it was gone "
    "when it was tried. smg keeps unknown fields.",
    recipe="qwen3-30b",
    fails={"train.router_replay": "rollout", "rollout.gpus_per_engine": 4},
    passes={"train.router_replay": "rollout"},
)
def experts_dropped(case: Case) -> Iterator[Hit]:
    """Replay of the engine's routing behind sglang-router."""
    if case.input.train.router_replay == "rollout":
        yield from hits(enginerules.experts_dropped(case.input.rollout.router, routed(case)))


@RULES.rule(
    "P423",
    NOTE,
    "train.router_replay",
    title="the experts of each token are on record",
    why="Replay needs the choice of every layer with experts, a 32-bit number each, as slime keeps them (F17).",
    recipe="qwen3-30b",
    fails={"train.router_replay": "rollout"},
)
def routing_bytes(case: Case) -> Iterator[Hit]:
    """How much that is."""
    model = case.model
    if case.input.train.router_replay == "rollout" and model.moe_layers:
        extra = record_bytes_per_token(model, True) - record_bytes_per_token(model)
        batch = case.rollouts * case.work.row_tokens * extra
        yield Hit(
            f"{extra:,} bytes per token of routing ({model.moe_layers} layers x {model.topk} experts x 4), {batch / 1e9:.3g} GB a batch"
        )


@RULES.rule(
    "P426",
    ERROR,
    "rollout.attention_backend",
    title="deterministic engines with attention whose results depend on the batch",
    why="SGLang 0.5.23 refuses to start: its deterministic mode knows fa3, fa4, flashinfer, triton, ascend and intel_xpu, and flashinfer "
    "not with latent attention (read in its wheel).",
    recipe="qwen3-4b",
    fails={"rollout.deterministic": True, "rollout.attention_backend": "flashmla"},
    passes={"rollout.deterministic": True, "rollout.attention_backend": "fa3"},
)
def backend(case: Case) -> Iterator[Hit]:
    """Another attention backend, or flashinfer with MLA."""
    asked = case.input.rollout.attention_backend
    for hit in hits(rules.deterministic_backend(deterministic(case), asked, case.model.mla)):
        yield Hit(hit.message, hit.fix, {"rollout.attention_backend": "fa3"})


@RULES.rule(
    "P427",
    WARNING,
    "rollout.deterministic",
    title="deterministic engines with something that nobody verified there",
    why="SGLang's table of what is deterministic with what covers neither drafts nor its hierarchical cache.",
    recipe="qwen3-4b",
    fails={"rollout.deterministic": True, "rollout.hicache": True},
    passes={"rollout.deterministic": True},
)
def unverified(case: Case) -> Iterator[Hit]:
    """Drafts or a second cache."""
    rollout = case.input.rollout
    if not deterministic(case):
        return
    for path, asked, off in (
        ("rollout.draft_tokens", rollout.draft_tokens > 0, 0),
        ("rollout.hicache", rollout.hicache, False),
    ):
        if asked:
            yield Hit(
                f"{path} with deterministic engines was never verified",
                "switch it off, or compare two runs before relying on it",
                {path: off},
                path,
            )


@RULES.rule(
    "P430",
    WARNING,
    "rollout.attention_backend",
    title="deterministic engines whose prefix cache is off",
    why="With flashinfer SGLang 0.5.23 switches its prefix cache off in deterministic mode (read in its wheel): every turn computes its "
    "whole conversation.",
    recipe="qwen3-4b",
    fails={"rollout.deterministic": True, "rollout.attention_backend": "flashinfer"},
    passes={"rollout.deterministic": True, "rollout.attention_backend": "triton"},
    after=("P426",),
)
def cache_switched_off(case: Case) -> Iterator[Hit]:
    """Deterministic with flashinfer."""
    rollout = case.input.rollout
    if deterministic(case) and rollout.prefix_cache and rollout.attention_backend == "flashinfer":
        yield Hit(
            "flashinfer in deterministic mode has no prefix cache: nothing that prompts share is found",
            "take fa3 or triton",
            {"rollout.attention_backend": "fa3"},
        )


@RULES.rule(
    "P431",
    NOTE,
    "rollout.deterministic",
    title="deterministic engines over several GPUs set NCCL's algorithm for themselves",
    why="SGLang sets NCCL_ALGO=allreduce:tree and pins channels in its own process, a deterministic trainer wants Ring: one environment "
    "for both would break one of them.",
    recipe="qwen3-4b",
    fails={"rollout.deterministic": True},
    passes={"rollout.deterministic": True, "rollout.gpus_per_engine": 1},
)
def own_nccl(case: Case) -> Iterator[Hit]:
    """Deterministic with more than one GPU per engine."""
    size = max((each for _, each in sizes(case)), default=1)
    if deterministic(case) and size > 1:
        yield Hit(
            f"each engine of {size} GPUs sets NCCL_ALGO for itself",
            "never export NCCL_ALGO for engines and trainer together",
        )


@RULES.rule(
    "P432",
    ERROR,
    "rollout.stock_router",
    title="the router's own command line does not know the policy",
    why="sglang_router.launch_router 0.3.2 takes --policy random, round_robin, cache_aware, power_of_two or manual (read in its wheel, and "
    "tried): consistent_hashing exists only in its arguments, which our start of it fills.",
    recipe="qwen3-4b",
    fails={"rollout.stock_router": True},
    passes={"rollout.stock_router": True, "rollout.router_policy": "manual"},
)
def stock_command(case: Case) -> Iterator[Hit]:
    """consistent_hashing by `python -m sglang_router.launch_router`."""
    rollout = case.input.rollout
    stock = rollout.stock_router and rollout.router == "sglang-router"
    if routed(case) and stock and rollout.router_policy == "consistent_hashing":
        yield Hit(
            "consistent_hashing is no choice of launch_router's --policy",
            "let palestra start the router, or take manual, which keeps a key's requests together too",
            {"rollout.stock_router": False},
        )


@RULES.rule(
    "P433",
    ERROR,
    "rollout.router",
    title="several engines and no router",
    why="The service sends requests to one address: something has to spread them.",
    recipe="qwen3-4b",
    fails={"rollout.router": "none"},
)
def no_router(case: Case) -> Iterator[Hit]:
    """router none with more than one engine."""
    rollout = case.input.rollout
    if rollout.engine == "sglang":
        for hit in hits(enginerules.no_router(rollout.router, engine_count(case), rollout.pd is not None)):
            yield Hit(f"{hit.message}, there are {engine_count(case)}", hit.fix, {"rollout.router": "sglang-router"})
