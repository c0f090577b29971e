"""The figures of an evaluation: one table, whoever shows it.

A header and the rows that count go in, a `Summary` comes out. Pure: the same rows give the same figures, in whatever order they ended.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from palestra.agents.evaluation.stats import Estimate, Interval, clustered, estimate, grouped, pass_at_k, pass_hat_k
from palestra.agents.evaluation.types import Header, Key, Row

ERROR_KIND = re.compile(r"[A-Za-z_][\w.]{0,80}(?=:)")


@dataclass(frozen=True, slots=True)
class PassPoint:
    """pass@k and pass^k at one k."""

    k: int
    at_least_one: float | None
    """pass@k; None where no task has k scored episodes."""
    at_least_one_se: float | None
    all_right: float | None
    """pass^k."""
    tasks: int
    """Tasks with at least k scored episodes: the ones that count."""


@dataclass(frozen=True, slots=True)
class StopShare:
    """One stop reason."""

    reason: str
    episodes: int
    share: float
    mean_reward: float | None
    """Of those with a reward."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What it took."""

    turns_mean: float | None
    tool_calls: int
    tool_errors: int
    calls: int
    calls_without_usage: int
    """Calls whose reply told no tokens: the sums lack them."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    retries: int
    price: float | None
    """In the unit of the given prices; None without any."""
    seconds_p50: float | None
    """Of an episode."""
    seconds_p95: float | None
    call_p50: float | None
    """Seconds of a model call."""
    call_p95: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures."""

    planned: int
    finished: int
    scored: int
    errors: int
    """Finished without a reward."""
    owed: int
    """Planned and not finished."""
    foreign: int
    """Rows of episodes that are not planned (left by `--allow-changed`); counted nowhere else."""
    reward: Estimate
    right: int
    """Scored episodes with at least the reward that counts as right."""
    right_share: Estimate
    right_bounds: Interval | None
    """Its share of the finished episodes if all errors counted as wrong, and as right; None without any finished."""
    passes: tuple[PassPoint, ...]
    components: Mapping[str, Estimate]
    stops: tuple[StopShare, ...]
    truncated: int
    error_kinds: Mapping[str, int]
    cost: Cost


def summarise(header: Header, rows: Mapping[Key, Row]) -> Summary:
    """The figures of `rows`, which hold one row for each finished episode."""
    planned = header.keys
    mine = [rows[key] for key in planned if key in rows]
    scored = [row for row in mine if row.scored]
    values: list[tuple[Hashable, float]] = [(row.task, _value(row)) for row in scored]
    rights: list[tuple[Hashable, float]] = [(row.task, float(is_right(header, row))) for row in scored]
    right, errors = int(sum(value for _, value in rights)), len(mine) - len(scored)
    bounds = Interval(right / len(mine), (right + errors) / len(mine)) if mine else None
    return Summary(
        planned=len(planned),
        finished=len(mine),
        scored=len(scored),
        errors=errors,
        owed=len(planned) - len(mine),
        foreign=len(rows) - len(mine),
        reward=estimate(values),
        right=right,
        right_share=estimate(rights),
        right_bounds=bounds,
        passes=pass_points(rights, header.spec.k),
        components=_components(scored),
        stops=_stops(mine),
        truncated=sum(row.truncated for row in mine),
        error_kinds=dict(Counter(error_kind(row) for row in mine if not row.scored).most_common()),
        cost=_cost(header, mine),
    )


def is_right(header: Header, row: Row) -> bool:
    """Whether a scored episode counts as right."""
    return row.scored and _value(row) >= header.spec.pass_reward - 1e-9


def _value(row: Row) -> float:
    assert row.reward.value is not None, "only of scored rows"
    return row.reward.value


def ks_of(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest one."""
    powers = [1 << at for at in range(largest.bit_length()) if 1 << at <= largest]
    return powers if powers[-1] == largest else [*powers, largest]


def pass_points(rights: Sequence[tuple[Hashable, float]], k: int) -> tuple[PassPoint, ...]:
    """pass@k for 1, 2, 4 ... k: per task without bias, then the mean over tasks."""
    counts = [(len(values), int(sum(values))) for values in grouped(rights).values()]
    points = []
    for size in ks_of(k):
        one = [value for n, c in counts if (value := pass_at_k(n, c, size)) is not None]
        every = [value for n, c in counts if (value := pass_hat_k(n, c, size)) is not None]
        mean, se = clustered(list(enumerate(one)))
        points.append(PassPoint(size, mean, se, statistics.fmean(every) if every else None, len(one)))
    return tuple(points)


def _components(scored: Sequence[Row]) -> dict[str, Estimate]:
    """By name, in the order in which they are met first. A component that an episode does not have is not counted there."""
    values: dict[str, list[tuple[Hashable, float]]] = defaultdict(list)
    for row in scored:
        for name, value in row.reward.components.items():
            values[name].append((row.task, value))
    return {name: estimate(pairs) for name, pairs in values.items()}


def _stops(rows: Sequence[Row]) -> tuple[StopShare, ...]:
    shares = []
    for reason, count in sorted(Counter(row.stop_reason for row in rows).items(), key=lambda pair: (-pair[1], pair[0])):
        values = [_value(row) for row in rows if row.stop_reason == reason and row.scored]
        mean = math.fsum(values) / len(values) if values else None
        shares.append(StopShare(str(reason), count, count / len(rows), mean))
    return tuple(shares)


def error_kind(row: Row) -> str:
    """What kind of fault left the episode without a reward: the exception's or the grader's name, where its text begins with one."""
    text = fault_text(row)
    found = ERROR_KIND.match(text)
    return found[0] if found else (text[:60] or "no reason given")


def fault_text(row: Row) -> str:
    """What left an episode without a reward: the fault that ended it, or what its graders said; empty for a scored one."""
    if row.scored:
        return ""
    graders = "; ".join(f"{name}: {text}" for name, text in row.reward.errors.items())
    return row.error or graders or row.reward.note


def _cost(header: Header, rows: Sequence[Row]) -> Cost:
    usage = [row.usage for row in rows]
    prompt, completion = sum(one.prompt_tokens for one in usage), sum(one.completion_tokens for one in usage)
    spec = header.spec
    price = None
    if spec.price_in is not None or spec.price_out is not None:
        price = (prompt * (spec.price_in or 0.0) + completion * (spec.price_out or 0.0)) / 1e6
    calls = [seconds for one in usage for seconds in one.call_seconds]
    whole = [row.seconds for row in rows]
    return Cost(
        turns_mean=statistics.fmean(row.turns for row in rows) if rows else None,
        tool_calls=sum(row.tool_calls for row in rows),
        tool_errors=sum(row.tool_errors for row in rows),
        calls=sum(one.calls for one in usage),
        calls_without_usage=sum(one.calls - one.told for one in usage),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=sum(one.cached_tokens for one in usage),
        retries=sum(one.retries for one in usage),
        price=price,
        seconds_p50=quantile(whole, 0.5),
        seconds_p95=quantile(whole, 0.95),
        call_p50=quantile(calls, 0.5),
        call_p95=quantile(calls, 0.95),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them lie (nearest rank); None without any."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def worst(rows: Mapping[Key, Row], count: int) -> list[Row]:
    """The episodes to look at first: those without a reward, then those with the lowest."""
    order = sorted(rows.values(), key=lambda row: (row.scored, row.reward.value or 0.0, row.task, row.k))
    return order[:count]
