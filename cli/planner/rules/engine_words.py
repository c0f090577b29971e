"""What rules about engines ask again and again: sizes, how many there are, and what a change would come to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from palestra.cli.engines import rules
from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import weight_dtype
from palestra.cli.planner.fitting import Trial, tried
from palestra.envs.findings import Finding, Hit

GIB = 2**30


def hits(findings: Iterable[Finding]) -> Iterator[Hit]:
    """What a check beside a section found, as a rule says it."""
    for each in findings:
        yield Hit(each.message, each.fix, each.suggest, each.path)


def sizes(case: Case) -> tuple[tuple[str, int], ...]:
    """(field, GPUs of one engine) of each kind that SGLang has here, also where the machine's GPUs are not described; none where engines
    run elsewhere or are embedded."""
    rollout = case.input.rollout
    if rollout.engine != "sglang" or case.mode == "external" or case.external_urls:
        return ()
    if rollout.pd is not None:
        return (
            ("rollout.pd.prefill_gpus_per_engine", rollout.pd.prefill_gpus_per_engine),
            ("rollout.pd.decode_gpus_per_engine", rollout.pd.decode_gpus_per_engine),
        )
    return (("rollout.gpus_per_engine", rollout.gpus_per_engine),)


def engine_count(case: Case) -> int:
    """Engines that requests are spread over."""
    rollout = case.input.rollout
    if rollout.engine != "sglang":
        return 1
    if case.external_urls:
        return len(case.external_urls)
    return sum(engine.count for engine in case.engines) or 1


def routed(case: Case) -> bool:
    """Whether a router stands in front of the engines."""
    return case.input.rollout.engine == "sglang" and case.input.rollout.router != "none" and engine_count(case) > 1


def attention_ranks(case: Case, size: int) -> int:
    """Ranks that one copy of attention is spread over; at least 1."""
    rollout = case.input.rollout
    return max(1, size // rollout.dp) if rollout.dp_attention else size


def widths(case: Case, size: int) -> dict[str, tuple[int, int]]:
    """Inner widths of the model's layers, and over how many ranks of an engine each is spread."""
    model, ep = case.model, case.input.rollout.ep
    dense = model.ffn if model.moe_layers < model.layers else 0
    routed_over = max(1, size // ep)
    return {
        "moe_ffn": (model.moe_ffn if model.experts else 0, routed_over),
        "shared_ffn": (model.shared_ffn if model.experts else 0, size),
        "ffn": (dense, size),
    }


def size_faults(case: Case) -> Iterator[Finding]:
    """Everything that arithmetic has against the engines' sizes."""
    rollout = case.input.rollout
    yield from rules.copies(rollout.dp, rollout.dp_attention)
    yield from rules.experts_spread(case.model.experts, rollout.ep)
    for _, size in sizes(case):
        yield from rules.whole_nodes(size, case.input.hardware.gpus_per_node)
        yield from rules.expert_ranks(size, rollout.ep)
        yield from rules.data_ranks(size, rollout.dp)
        yield from rules.heads_spread(case.model.heads, attention_ranks(case, size))
        if weight_dtype(case) == "fp8":
            yield from rules.blocks(widths(case, size))


def said(case: Case, *names: str) -> bool:
    """Whether all of these fields of `[workload]` were given: rules that rest on them say nothing of a default."""
    return set(names) <= case.input.workload.model_fields_set


def sound(case: Case) -> bool:
    """Whether the engines' sizes are right, their GPUs are a whole number of engines, and the longest rollout fits into each."""
    if any(True for _ in size_faults(case)):
        return False
    if case.input.rollout.pd is None and not case.on_cpu and case.rollout_gpus % case.input.rollout.gpus_per_engine:
        return False
    return all(each.pool is None or each.pool.kv_tokens >= case.longest_row for each in case.engines)


def workable(case: Case, path: str, values: Iterable[int]) -> list[int]:
    """Those values of a field of `[rollout]` with which the engines are sound; none for a field below it, nor within another search."""
    if path.count(".") > 1 or isinstance(case, Trial):
        return []
    return [value for value in values if sound(tried(case, {path: value}))]
