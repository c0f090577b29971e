"""What engines cannot be: arithmetic of their sizes, and options of SGLang 0.5.23 that exclude each other. Pure.

In: plain numbers and words. Out: findings, under the codes of `palestra plan`. Whoever starts engines (`topology.py`) refuses by the first
of them; the planner shows all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from palestra.envs.findings import Finding, Severity
from palestra.trainer.layout import numbers

DETERMINISTIC = ("fa3", "fa4", "flashinfer", "triton", "ascend", "intel_xpu")
"""Attention backends of SGLang 0.5.23 whose results do not depend on the batch."""
BLOCK = 128
"""Side of the blocks of quantised weights: a scale for each."""
MOST = 4096
"""Sizes that are looked at: no engine has more GPUs, and a plan answers at once whatever number is written."""


def divisors(number: int) -> list[int]:
    """From 1 to MOST; empty for 0."""
    return [each for each in range(1, min(number, MOST) + 1) if number % each == 0]


def nearest(wanted: int, candidates: Collection[int]) -> int | None:
    """The candidate that is next to what was wanted, the larger of two; None: there is none."""
    return next(iter(numbers.nearest(tuple(candidates), wanted)), None)


def whole_nodes(size: int, gpus_per_node: int) -> Iterator[Finding]:
    """P312: an engine that is larger than a node takes whole nodes."""
    if size > gpus_per_node and size % gpus_per_node:
        yield _error(
            "P312",
            "rollout.gpus_per_engine",
            f"an engine of {size} GPUs needs whole nodes, and a node has {gpus_per_node}",
            "take a multiple of that",
        )


def copies(dp: int, dp_attention: bool) -> Iterator[Finding]:
    """P407: data parallel ranks of one engine that do not share its experts."""
    if dp > 1 and not dp_attention:
        yield _error(
            "P407",
            "rollout.dp",
            "rollout.dp without rollout.dp_attention would be copies of the engine: that is rollout.engines",
        )


def data_ranks(size: int, ways: object) -> Iterator[Finding]:
    """P407: ranks of attention that do not share an engine's GPUs evenly."""
    if not _divides(ways, size):
        yield _error(
            "P407",
            "rollout.dp",
            f"data parallel attention size {ways} does not divide an engine's {size} GPUs",
        )


def expert_ranks(size: int, ways: object) -> Iterator[Finding]:
    """P405: ranks of experts that do not share an engine's GPUs evenly."""
    if not _divides(ways, size):
        yield _error("P405", "rollout.ep", f"expert parallel size {ways} does not divide an engine's {size} GPUs")


def experts_spread(experts: int, ways: int) -> Iterator[Finding]:
    """P405: experts that do not spread evenly, or of which there are none."""
    if ways > 1 and not experts:
        yield _error("P405", "rollout.ep", f"rollout.ep is {ways}, and the model has no experts")
    elif experts % ways:
        yield _error("P405", "rollout.ep", f"{experts} experts cannot be spread over rollout.ep = {ways} ranks")


def heads_spread(heads: int, ways: int) -> Iterator[Finding]:
    """P402: query heads that do not spread evenly over the ranks of attention."""
    if heads % ways:
        yield _error(
            "P402", "rollout.gpus_per_engine", f"{heads} query heads cannot be spread over {ways} ranks of attention"
        )


def blocks(widths: dict[str, tuple[int, int]]) -> Iterator[Finding]:
    """P406: inner widths whose share of one rank is no whole number of quantised blocks.

    `widths`: field of `[model]` -> its width (0: the model has no such layer) and over how many ranks it is spread.
    """
    for name, (width, ways) in widths.items():
        if width and (width % ways or width // ways % BLOCK):
            yield _error(
                "P406",
                "rollout.weight_dtype",
                f"model.{name} / {ways} = {width / ways:g} is no multiple of {BLOCK}, the block of float8 weights: "
                "the engine refuses to load",
            )


def second_cache(hicache: bool, prefix_cache: bool) -> Iterator[Finding]:
    """P434: a second cache without a first."""
    if hicache and not prefix_cache:
        yield _error(
            "P434",
            "rollout.hicache",
            "rollout.hicache is a second prefix cache: it needs rollout.prefix_cache = true",
        )


def sized_twice(ratio: bool, pinned: bool) -> Iterator[Finding]:
    """P435: two fields that both size the pool of states."""
    if ratio and pinned:
        yield _error(
            "P435",
            "rollout.state_slots_pin",
            "rollout.state_ratio and rollout.state_slots_pin both size the states",
            "give one",
        )


def mixed(kinds: Collection[str]) -> Iterator[Finding]:
    """P409: kinds of engines that cannot stand behind one router."""
    if set(kinds) - {"regular"} and set(kinds) != {"prefill", "decode"}:
        have = " and ".join(sorted(kinds))
        yield _error(
            "P409", "rollout.pd", f"prefill and decode engines need each other and stand alone, there are {have}"
        )


def beside_split(engines: int, size: int, sizes: Collection[int]) -> Iterator[Finding]:
    """P409: fields of whole engines beside `[rollout.pd]`, which has engines of `sizes` GPUs; a size that says the same is none."""
    if engines > 1 or (size > 1 and set(sizes) != {size}):
        yield _error(
            "P409",
            "rollout.pd",
            "rollout.pd says how many engines there are",
            "leave rollout.engines and gpus_per_engine out",
        )


def decode_cache(hicache: bool) -> Iterator[Finding]:
    """P415: a second cache of engines that compute no prompts."""
    if hicache:
        yield _error(
            "P415",
            "rollout.hicache_on",
            "a hierarchical cache belongs to prefill engines",
            "decode engines keep no prefixes",
        )


def deterministic_backend(deterministic: bool, backend: object, latent: bool = False) -> Iterator[Finding]:
    """P426: attention whose results depend on the batch. `latent`: the model has latent attention."""
    if not deterministic or backend in (None, "auto"):
        return
    if backend not in DETERMINISTIC:
        yield _error(
            "P426",
            "rollout.attention_backend",
            f"{backend} is not deterministic",
            f"attention_backend may be {', '.join(DETERMINISTIC)}",
        )
    elif latent and backend == "flashinfer":
        yield _error(
            "P426",
            "rollout.attention_backend",
            "flashinfer is not deterministic with latent attention",
            "attention_backend may be fa3 or triton",
        )


def agents_there(urls: Sequence[str], agents: Collection[str], started: bool = False) -> Iterator[Finding]:
    """P616: deltas for engines whose hosts have nobody who puts them together.

    `urls`: engines that run elsewhere; `agents`: those of them that have an agent. `started`: engines that are started here get agents.
    """
    lacking = [url for url in urls if url not in agents]
    if lacking:
        yield _error(
            "P616",
            "weights.mode",
            f'weights.mode = "delta" needs an agent on every engine\'s host: rollout.agents has none for {lacking[0]}',
            "run `palestra engine agent` on each host, or send whole weights",
        )
    elif not urls and not started:
        yield _error(
            "P616",
            "weights.mode",
            'weights.mode = "delta" is for engines on other hosts: rollout.urls and rollout.agents must name them',
            "or send whole weights",
        )


def _divides(ways: object, size: int) -> bool:
    return isinstance(ways, int) and not isinstance(ways, bool) and ways >= 1 and size % ways == 0


def _error(code: str, path: str, message: str, fix: str = "") -> Finding:
    return Finding(code, Severity.ERROR, path, message, fix)
