"""P401 to P407, P424, P425: how many GPUs an engine has, how a model spreads over them, its memory and its window."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.engines import rules
from palestra.cli.engines.rules import divisors, nearest
from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import mem_fraction, weight_dtype
from palestra.cli.planner.fitting import tried
from palestra.cli.planner.rules.collect import ERROR, WARNING, Rules
from palestra.cli.planner.rules.engine_words import attention_ranks, sizes, sound, widths, workable
from palestra.cli.planner.rules.mending import mended
from palestra.envs.findings import Hit

RULES = Rules()
SIZE = "rollout.gpus_per_engine"


@RULES.rule(
    "P401",
    ERROR,
    SIZE,
    title="GPUs that are no whole number of engines",
    why="The rest of the GPUs could start no engine: launchers count engines as GPUs / GPUs of one.",
    recipe="qwen3-30b",
    fails={SIZE: 16},
)
def whole_engines(case: Case) -> Iterator[Hit]:
    """N_R is no multiple of g, or too few for the engines that are asked for."""
    rollout, gpus = case.input.rollout, case.rollout_gpus
    if case.on_cpu or rollout.pd is not None or not sizes(case):
        return
    size = rollout.gpus_per_engine
    if gpus % size:
        best = nearest(size, workable(case, SIZE, divisors(gpus)))
        yield Hit(
            f"{gpus} GPUs are no multiple of {size} GPUs per engine",
            f"take {best}" if best else "take a divisor",
            {SIZE: best} if best else {},
        )
    elif rollout.engines is not None and rollout.engines * size > gpus:
        yield Hit(
            f"{rollout.engines} engines of {size} GPUs take {rollout.engines * size}, and the rollout has {gpus}",
            f"{gpus // size} engines have room",
            {"rollout.engines": gpus // size} if gpus >= size else {},
            "rollout.engines",
        )


@RULES.rule(
    "P402",
    ERROR,
    SIZE,
    title="query heads that do not spread evenly over an engine",
    why="SGLang gives each rank of attention as many whole heads, and refuses another number.",
    recipe="qwen3-4b",
    fails={"hardware.gpus_per_node": 6, "placement.train_gpus": 6, SIZE: 3},
    passes={"hardware.gpus_per_node": 6, "placement.train_gpus": 6, SIZE: 2},
    after=("P407",),
)
def heads(case: Case) -> Iterator[Hit]:
    """heads % (ranks of one copy of attention) != 0."""
    for path, size in sizes(case):
        for finding in rules.heads_spread(case.model.heads, attention_ranks(case, size)):
            pool = case.rollout_gpus or case.input.hardware.gpus_per_node
            best = nearest(size, workable(case, path, divisors(pool)))
            fix = f"take {best} GPUs per engine" if best else "take a divisor of the heads"
            yield Hit(finding.message, fix, {path: best} if best else {}, path)


@RULES.rule(
    "P403",
    WARNING,
    SIZE,
    title="more ranks of attention than key heads",
    why="A rank has one key head at least: beyond their number the cache is copied, and holds as many tokens as before (SGLang's pool "
    "sizes; qwen3-next has two key heads, so eight ranks keep four copies).",
    recipe="qwen3-30b",
    fails={},
    passes={SIZE: 4},
    after=("P402", "P407"),
)
def copied_keys(case: Case) -> Iterator[Hit]:
    """Grouped queries over more ranks than groups."""
    groups = case.model.kv_heads
    for path, size in sizes(case):
        ranks = attention_ranks(case, size)
        if case.model.mla or not case.model.attn_layers or ranks <= groups:
            continue
        smaller = size * groups // ranks
        hit = Hit(
            f"{ranks} ranks of attention and {groups} key heads: the cache is kept {ranks / groups:g} times",
            f"engines of {smaller} GPUs, or rollout.dp_attention with rollout.dp = {ranks // groups}",
            path=path,
        )
        yield mended(case, copied_keys, hit, [{path: smaller}])


@RULES.rule(
    "P404",
    WARNING,
    "rollout.dp_attention",
    title="latent attention over several GPUs, each with the whole cache",
    why="A latent cache has no heads to divide: every tensor parallel rank keeps all of it (SGLang's pools). With data parallel attention "
    "each rank keeps the requests that are its own.",
    recipe="deepseek-v3",
    fails={"rollout.dp_attention": False, "rollout.dp": 1},
    after=("P407",),
)
def whole_latents(case: Case) -> Iterator[Hit]:
    """MLA, more than one GPU, no dp_attention."""
    size = max((each for _, each in sizes(case)), default=1)
    if not case.model.mla or size == 1 or case.input.rollout.dp_attention:
        return
    choices = [each for each in divisors(size) if 1 < each <= 8 and not case.model.heads % (size // each)]
    fields = {"rollout.dp_attention": True, "rollout.dp": max(choices, default=size)}
    yield Hit(
        f"each of {size} GPUs keeps the latent cache of all requests",
        f"rollout.dp_attention = true with rollout.dp = {fields['rollout.dp']}",
        fields if sound(tried(case, fields)) else {},
    )


@RULES.rule(
    "P405",
    ERROR,
    "rollout.ep",
    title="experts that do not spread evenly over an engine",
    why="SGLang gives each expert parallel rank as many whole experts, and each of those ranks as many GPUs.",
    recipe="qwen3-30b",
    fails={"rollout.ep": 3},
    passes={"rollout.ep": 4},
)
def expert_ranks(case: Case) -> Iterator[Hit]:
    """experts % ep != 0, g % ep != 0, or ep without experts."""
    ep = case.input.rollout.ep
    found = list(rules.experts_spread(case.model.experts, ep)) if sizes(case) else []
    for _, size in sizes(case):
        found = found or list(rules.expert_ranks(size, ep))
    for finding in found:
        smallest = min(size for _, size in sizes(case))
        best = nearest(ep, workable(case, "rollout.ep", divisors(smallest)))
        yield Hit(finding.message, f"take {best}" if best else "take 1", {"rollout.ep": best} if best else {})


@RULES.rule(
    "P406",
    ERROR,
    "rollout.weight_dtype",
    title="a layer's share of one rank is no whole number of float8 blocks",
    why="Block-quantised weights have a scale for each 128 x 128 block, and the engine refuses to load a rank that has a part of one "
    "(SGLang issue 10852, Qwen3 issue 1485: 768/8 = 96).",
    recipe="qwen3-30b",
    fails={"rollout.weight_dtype": "fp8"},
    passes={"rollout.weight_dtype": "fp8", "rollout.ep": 8},
    after=("P405",),
)
def whole_blocks(case: Case) -> Iterator[Hit]:
    """Inner widths of experts, shared experts and dense layers."""
    if weight_dtype(case) != "fp8":
        return
    for path, size in sizes(case):
        for finding in rules.blocks(widths(case, size)):
            suggest: dict[str, int] = {}
            if ep := workable(case, "rollout.ep", [size]):
                suggest = {"rollout.ep": ep[0]}
            elif smaller := workable(case, path, [each for each in divisors(size) if each < size]):
                suggest = {path: smaller[-1]}
            yield Hit(finding.message, "take rollout.ep = rollout.gpus_per_engine, or smaller engines", suggest)
            return


@RULES.rule(
    "P407",
    ERROR,
    "rollout.dp",
    title="data parallel attention that does not divide an engine, or data parallel ranks without it",
    why="Ranks without it would be copies of the engine, which a router spreads over by itself. SGLang 0.5.23 spells it --attn-dp-size N; "
    "--dp-size N --enable-dp-attention is deprecated there.",
    recipe="qwen3-235b",
    fails={"rollout.dp": 3},
)
def data_ranks(case: Case) -> Iterator[Hit]:
    """dp > 1 without dp_attention, or g % dp != 0."""
    rollout = case.input.rollout
    if not sizes(case):
        return
    for finding in rules.copies(rollout.dp, rollout.dp_attention):
        shared = tried(case, {"rollout.dp_attention": True})
        suggest = {"rollout.dp_attention": True} if sound(shared) else {"rollout.dp": 1}
        yield Hit(finding.message, "set rollout.dp_attention, or rollout.dp = 1", suggest)
    if rollout.dp_attention:
        smallest = min(size for _, size in sizes(case))
        for finding in rules.data_ranks(smallest, rollout.dp):
            best = nearest(rollout.dp, workable(case, "rollout.dp", divisors(smallest)))
            yield Hit(
                finding.message, f"take {best}" if best else "take a divisor", {"rollout.dp": best} if best else {}
            )


@RULES.rule(
    "P424",
    WARNING,
    "rollout.mem_fraction",
    title="a share of GPU memory that is too large for a shared GPU, or small for one of its own",
    why="What training leaves behind on a shared GPU (context, communication buffers: about 3 GiB) comes beside the engine's share; an "
    "engine alone that leaves a quarter unused samples with a smaller cache than it could. The bounds are our own.",
    recipe="qwen3-4b",
    fails={"rollout.mem_fraction": 0.85},
    passes={"rollout.mem_fraction": 0.7},
)
def memory_share(case: Case) -> Iterator[Hit]:
    """Above 0.8 colocated, below 0.75 apart."""
    if case.on_cpu or not sizes(case):
        return
    share = mem_fraction(case)
    if case.colocated and share > 0.8:
        yield Hit(f"{share:g} of a GPU that training comes back to", "take 0.7", {"rollout.mem_fraction": 0.7})
    elif case.mode == "separate" and share < 0.75:
        yield Hit(f"{share:g} of a GPU that an engine has alone", "take 0.85", {"rollout.mem_fraction": 0.85})


@RULES.rule(
    "P425",
    ERROR,
    "rollout.context_len",
    title="a window that is longer than the model knows positions for",
    why="SGLang refuses a window above the checkpoint's max_position_embeddings, and beyond it rotary positions were never trained. A "
    "window that is too short for the rollouts is P706.",
    recipe="qwen3-4b",
    fails={"rollout.context_len": 65_536},
)
def window(case: Case) -> Iterator[Hit]:
    """context_len > max_position, where that is known."""
    asked, known = case.input.rollout.context_len, case.model.max_position
    if known and asked > known:
        fits = (case.needed_context or 0) <= known
        yield Hit(
            f"rollout.context_len is {asked}, and the model has {known} positions",
            f"take {known}, or a checkpoint whose rotary positions were stretched",
            {"rollout.context_len": known} if fits else {},
        )
