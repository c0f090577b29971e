"""P408 to P415, P428, P434: kinds of engines: prefill and decode apart, with a second cache, embedded."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.engines import rules
from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.engine_words import GIB, hits, said, sizes
from palestra.envs.findings import Hit, Severity
from palestra.server import enginerules
from palestra.server.config import EngineSection

RULES = Rules()
HOST_RESERVE = 10 * GIB
"""Memory of a host that SGLang leaves to others before it makes a second cache."""
SHORT_PROMPT = 1024
DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in EngineSection.model_fields.items()}
"""Of a run's `[rollout]`."""


@RULES.rule(
    "P408",
    ERROR,
    "rollout.pd",
    title="prefill and decode engines that do not fill the rollout's GPUs",
    why="Each kind is a whole number of engines, and both together are the rollout's pool: the rest would idle, or be missing.",
    recipe="two-nodes",
    fails={"rollout.pd.decode_gpus": 4},
)
def split_sizes(case: Case) -> Iterator[Hit]:
    """prefill_gpus + decode_gpus != N_R, or one of them no multiple of its engines' size."""
    pd = case.input.rollout.pd
    if pd is None or not sizes(case):
        return
    prefill, decode = pd.prefill_gpus_per_engine, pd.decode_gpus_per_engine
    yield from hits(enginerules.split_sizes(prefill=(pd.prefill_gpus, prefill), decode=(pd.decode_gpus, decode)))
    taken, rest = pd.prefill_gpus + pd.decode_gpus, case.rollout_gpus - pd.prefill_gpus
    if not case.on_cpu and taken != case.rollout_gpus:
        fits = rest > 0 and rest % decode == 0
        yield Hit(
            f"{pd.prefill_gpus} prefill and {pd.decode_gpus} decode GPUs are {taken}, and the rollout has {case.rollout_gpus}",
            f"take {rest} decode GPUs" if fits else "make both together as many",
            {"rollout.pd.decode_gpus": rest} if fits else {},
            "rollout.pd.decode_gpus",
        )


@RULES.rule(
    "P409",
    ERROR,
    "rollout.pd",
    title="two fields that both say which engines there are",
    why="A router has whole engines or prefill and decode engines behind it, not both (slime's sglang-config refuses the mix as well), and "
    "engines that run elsewhere are what they are.",
    recipe="two-nodes",
    fails={"rollout.engines": 2},
    after=("P304",),
)
def two_sources(case: Case) -> Iterator[Hit]:
    """`[rollout.pd]` beside whole engines or URLs."""
    rollout = case.input.rollout
    split = rollout.pd is not None
    yield from hits(enginerules.two_sources({}, topology=False, split=split, external=bool(rollout.urls)))
    if rollout.pd is not None:
        each = (rollout.pd.prefill_gpus_per_engine, rollout.pd.decode_gpus_per_engine)
        for hit in hits(rules.beside_split(rollout.engines or 1, rollout.gpus_per_engine, each)):
            fields = {"rollout.engines": None, "rollout.gpus_per_engine": None}
            yield Hit(hit.message, hit.fix, fields)


@RULES.rule(
    "P410",
    ERROR,
    "rollout.pd.transfer",
    title="caches do not travel between engines, or without RDMA",
    why="SGLang 0.5.23 knows mooncake, nixl, mori and ascend; its `fake` moves nothing, so decode engines would read empty caches. Without "
    "RDMA a transfer goes through both hosts' TCP at a part of the card's speed, and only mooncake_tcp is made for it: that is a warning.",
    recipe="two-nodes",
    fails={"rollout.pd.transfer": "fake"},
    passes={"hardware.rdma": False, "rollout.pd.transfer": "mooncake_tcp"},
)
def transfer(case: Case) -> Iterator[Hit]:
    """No RDMA and another transfer than mooncake_tcp, or the fake one."""
    pd = case.input.rollout.pd
    if pd is None:
        return
    if pd.transfer == "fake":
        yield Hit("transfer fake moves no caches", "take mooncake", {"rollout.pd.transfer": "mooncake"})
    elif not case.on_cpu and not case.input.hardware.rdma and pd.transfer != "mooncake_tcp":
        yield Hit(
            f"transfer {pd.transfer} without RDMA (hardware.rdma = false)",
            "take mooncake_tcp, or set hardware.rdma where there is RDMA",
            {"rollout.pd.transfer": "mooncake_tcp"},
            severity=WARNING,
        )


@RULES.rule(
    "P411",
    WARNING,
    "rollout.pd",
    title="prefill and decode engines are out of balance, or the link between them is the limit",
    why="Requests flow through prefill engines, the link and decode engines one after the other: the slowest says how many (F12). Rates "
    "are guesses until workload.measured has them.",
    recipe="two-nodes",
    fails={"rollout.pd.prefill_gpus": 6, "rollout.pd.decode_gpus": 2},
    after=("P408", "P409"),
)
def flow(case: Case) -> Iterator[Hit]:
    """Less than 70% of the best split's rate, or the transfer lets the fewest through."""
    found, pd = case.pd_flow, case.input.rollout.pd
    if found is None or pd is None or not said(case, "prompt_tokens", "response_tokens"):
        return
    now = f"{found.prefill} prefill and {found.decode} decode engines"
    if found.best_prefill is not None and found.rate < 0.7 * found.best_rate and found.best_prefill != found.prefill:
        best, size = found.best_prefill, pd.prefill_gpus_per_engine
        rest = found.prefill + found.decode - best
        yield Hit(
            f"{now} let {found.rate:.3g} rollouts a second through, {best} and {rest} let {found.best_rate:.3g}",
            f"take {best} and {rest}",
            {"rollout.pd.prefill_gpus": best * size, "rollout.pd.decode_gpus": rest * size},
        )
    if found.limit == "transfer":
        yield Hit(
            f"the link lets {found.rate:.3g} rollouts a second through ({found.kv_bandwidth / 1e9:.3g} GB/s for "
            f"{found.kv_bytes / 1e6:.3g} MB of cache each), {now} would let more",
            "take regular engines, or a faster link",
            {},
            "rollout.pd.transfer",
        )


@RULES.rule(
    "P412",
    NOTE,
    "rollout.pd",
    title="prefill and decode are apart, and prompts are short",
    why="Long prompts do not hold up others' completions then; short ones hardly do. The bound of 1,024 tokens is our own.",
    recipe="two-nodes",
    fails={"workload.prompt_tokens": 300},
)
def short_prompts(case: Case) -> Iterator[Hit]:
    """One turn, and a mean prompt below 1,024 tokens."""
    if case.input.rollout.pd is None or not said(case, "prompt_tokens"):
        return
    if case.work.turns <= 1 and case.work.prompt < SHORT_PROMPT:
        yield Hit(f"prompts of {case.work.prompt} tokens and one turn", "regular engines are simpler, and as fast")


@RULES.rule(
    "P413",
    WARNING,
    "rollout.hicache",
    title="a second cache that saves nothing, or that the host has no memory for",
    why="Fetching from the host costs more than computing where little is found there (F13). SGLang takes a given hicache_ratio as it is; "
    "left out it shrinks its default of 2 to what 0.8 of the free host memory holds.",
    recipe="qwen3-4b",
    fails={"rollout.hicache": True},
)
def second_cache(case: Case) -> Iterator[Hit]:
    """F13 is not above zero, or ratio * pool of a node is more than its memory less 10 GiB."""
    rollout, found = case.input.rollout, case.second_cache
    if found is None:
        return
    known = case.input.workload.measured.prefix_hit is not None or said(case, "prompt_tokens", "response_tokens")
    if found.saved_s <= 0 and known:
        yield Hit(
            f"{found.hit:.0%} of a prompt is found and saves {found.hit * found.prefill_s:.3g} s of computing, fetching it takes "
            f"{found.io_s:.3g} s: {-found.saved_s:.3g} s are lost",
            "switch it off",
            {"rollout.hicache": False, "rollout.hicache_ratio": None},
        )
    engine, host = case.engines[0], case.input.hardware.host_mem_bytes
    if rollout.hicache_ratio is None or engine.pool is None:
        return
    pool = max(0.0, engine.pool.rest) * case.input.hardware.gpus_per_node
    wanted = rollout.hicache_ratio * pool
    text = f"{rollout.hicache_ratio:g} times the caches of a node's GPUs are {wanted / GIB:.0f} GiB"
    if not host:
        yield Hit(
            f"{text}, and the host's memory is not known",
            "give hardware.host_mem_bytes",
            {},
            "rollout.hicache_ratio",
            Severity.NOTE,
        )
    elif wanted > host - HOST_RESERVE:
        yield Hit(
            f"{text}, and a node has {host / GIB:.0f}, of which 10 stay free",
            "leave rollout.hicache_ratio out: the engine then takes what fits",
            {"rollout.hicache_ratio": None},
            "rollout.hicache_ratio",
        )


@RULES.rule(
    "P414",
    WARNING,
    "rollout.hicache",
    title="weights change before a second cache is asked again",
    why="Keys and values of old weights are flushed or salted away with every publish, so what comes back after the next publish finds "
    "nothing. Both times are guesses (F7, F11).",
    recipe="many-nodes",
    fails={"rollout.hicache": True, "workload.tool_s": 900.0},
    passes={"rollout.hicache": True},
)
def publishes_too_often(case: Case) -> Iterator[Hit]:
    """An overlapped schedule publishes more often than a rollout takes its next turn."""
    times, schedule = case.times, case.input.schedule
    if not case.input.rollout.hicache or schedule.kind == "sync" or times is None or times.decode_tok_s <= 0:
        return
    if case.work.turns <= 1 or not said(case, "tool_s", "turns", "response_tokens"):
        return
    turn = case.work.response * times.running / times.decode_tok_s + case.input.workload.tool_s
    # Rollouts under way hide each other's waits, so a step does not last as long as one of them.
    waits = case.work.turns * case.input.workload.tool_s + case.input.workload.judge_s
    step = max(times.rollout_s - waits, times.train_s) + times.publish_s
    period = step * -(-case.publish_every // case.input.algo.updates_per_batch)
    if period < turn:
        yield Hit(
            f"weights change every {period:.0f} s, and a rollout comes back for its next turn after {turn:.0f} s",
            "publish less often (schedule.publish_every), or switch it off",
            {"rollout.hicache": False},
        )


@RULES.rule(
    "P415",
    ERROR,
    "rollout.hicache_on",
    title="a second cache of decode engines",
    why="Decode engines get finished caches and keep no prefixes: SGLang has a hierarchical cache on the prefill side only.",
    recipe="two-nodes",
    fails={"rollout.hicache": True, "rollout.hicache_on": "all"},
    passes={"rollout.hicache": True},
)
def cache_of_decoders(case: Case) -> Iterator[Hit]:
    """hicache_on is not prefill where prompts and completions are apart."""
    rollout = case.input.rollout
    asked = rollout.hicache and rollout.pd is not None and rollout.hicache_on != "prefill"
    for hit in hits(rules.decode_cache(asked)):
        yield Hit(hit.message, hit.fix, {"rollout.hicache_on": "prefill"})


@RULES.rule(
    "P428",
    ERROR,
    "rollout.engine",
    title="something that this engine does not have",
    why="The embedded engine is one process on transformers: no layout over GPUs, no float8, no prefill and decode apart, no second cache, "
    "no linear attention; and SGLang has none of its test's switches. A field without effect would look honoured.",
    recipe="laptop",
    fails={"rollout.gpus_per_engine": 2},
)
def not_of_this_engine(case: Case) -> Iterator[Hit]:
    """Fields that the engine has no use for, or a model that the embedded one cannot run."""
    rollout = case.input.rollout
    given = {name: getattr(rollout, name) for name in rollout.model_fields_set}
    yield from hits(enginerules.idle_fields(rollout.engine, given, DEFAULTS))
    if rollout.engine == "embedded" and case.model.linear_layers:
        yield Hit(
            f"{case.model.linear_layers} layers have linear attention, which the embedded engine has not",
            "use rollout.engine = sglang",
        )


@RULES.rule(
    "P434",
    ERROR,
    "rollout.hicache",
    title="a second cache without a first",
    why="SGLang's hierarchical cache holds what its prefix cache evicts.",
    recipe="qwen3-4b",
    fails={"rollout.hicache": True, "rollout.prefix_cache": False},
    passes={"rollout.hicache": True},
)
def cache_of_nothing(case: Case) -> Iterator[Hit]:
    """hicache without prefix_cache."""
    rollout = case.input.rollout
    for hit in hits(rules.second_cache(rollout.hicache, rollout.prefix_cache)):
        yield Hit(hit.message, "switch both on", {"rollout.prefix_cache": True})
