"""Rollout-side figures of a train step: summed as groups complete, read and cleared when a step ends. Pure."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from palestra.server.store.types import SessionOutcome
from palestra.server.types import TrajectoryGroup, Turn


class RolloutMetrics:
    """Sums since the last `take`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lengths: dict[str, list[int]] = {}
        """Row lengths of the groups that lie in the buffer, as far as this process put them there."""
        self._clear()

    def _clear(self) -> None:
        self._rewards: list[float] = []
        self._parts: defaultdict[str, list[float]] = defaultdict(list)
        self._stops: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._groups = 0
        self._tokens = 0
        self._turns = 0
        self._stale: Counter[str] = Counter()
        self._masked: Counter[str] = Counter()
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._since = self._clock()

    def add_turn(self, turn: Turn) -> None:
        """One recorded model call. Forks are counted by their reason."""
        self._tokens += len(turn.completion_ids)
        self._turns += 1
        self._events["ill_formed"] += turn.ill_formed is not None
        self._events["undelivered"] += not turn.delivered
        if turn.fork_reason is not None:
            self._events[f"fork_{turn.fork_reason}"] += 1

    def add_group(self, outcomes: Sequence[SessionOutcome], dropped: str | None) -> None:
        """One complete group; `dropped` says why it does not reach the trainer, if so."""
        self._groups += 1
        if dropped is not None:
            self._drops[dropped] += 1
        for outcome in outcomes:
            self._stops[outcome.stop_reason or "unknown"] += 1
            if outcome.reward is None:
                continue
            self._rewards.append(outcome.reward)
            for name, value in outcome.components.items():
                self._parts[name].append(value)

    def keep_lengths(self, group: TrajectoryGroup) -> None:
        """A group went into the buffer."""
        self._lengths[group.group_id] = [len(row.token_ids) for row in group.samples]

    def forget_lengths(self, group_ids: Iterable[str]) -> None:
        """Groups left it."""
        for group_id in group_ids:
            self._lengths.pop(group_id, None)

    def add_stale(self, group_ids: Sequence[str]) -> None:
        """Groups were dropped for their age; rows are counted by their length, since long ones are dropped more often."""
        self._drops["stale"] += len(group_ids)
        for group_id in group_ids:
            for length in self._lengths.pop(group_id, ()):
                self._stale[bucket_of(length)] += 1

    def add_masked(self, lengths: Sequence[tuple[int, int]]) -> None:
        """(length of a row, tokens of it that were masked for their age) per row."""
        for length, tokens in lengths:
            self._masked[bucket_of(length)] += tokens

    def add_wait(self, who: str, seconds: float) -> None:
        """Somebody waited: `trainer_for_groups`, `workers_for_room`, `workers_for_weights`."""
        self._waits[who] += seconds

    def take(self) -> dict[str, float]:
        """Means and counts under `area/name/stat`, then starts again. Every complete group counts, dropped ones included: the mean reward
        is that of the policy, not of what was kept."""
        now = self._clock()
        out: dict[str, float] = {
            "rollout/groups/count": float(self._groups),
            "rollout/turns/count": float(self._turns),
            "rollout/tokens/sum": float(self._tokens),
            "rollout/tokens_per_s/mean": self._tokens / max(now - self._since, 1e-9),
            "rollout/scored/count": float(len(self._rewards)),
        }
        if self._rewards:
            out["reward/total/mean"] = sum(self._rewards) / len(self._rewards)
        for name, values in self._parts.items():
            out[f"env/{name}/mean"] = sum(values) / len(values)
        total = sum(self._stops.values())
        for name, count in self._stops.items():
            out[f"rollout/stop_{name}/share"] = count / total
        for name, count in self._drops.items():
            out[f"rollout/dropped_{name}/count"] = float(count)
        for name, count in self._events.items():
            out[f"gateway/{name}/count"] = float(count)
        for name, count in self._stale.items():
            out[f"staleness/dropped_rows_{name}/count"] = float(count)
        for name, count in self._masked.items():
            out[f"staleness/masked_tokens_{name}/count"] = float(count)
        for name, seconds in self._waits.items():
            out[f"wait/{name}/s"] = seconds
        self._clear()
        return out


LENGTHS = (512, 2048, 8192, 32768)
"""Upper bounds of the buckets in which rows are counted, tokens."""


def bucket_of(length: int) -> str:
    """The name of the bucket that a row of so many tokens falls into."""
    return next((f"to_{bound}" for bound in LENGTHS if length <= bound), f"over_{LENGTHS[-1]}")
