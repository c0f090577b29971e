"""Rollout-side figures of a train step: summed as groups complete, read and cleared when a step ends. Pure."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from palestra.server.store.types import SessionOutcome
from palestra.server.types import Turn


class RolloutMetrics:
    """Sums since the last `take`."""

    def __init__(self) -> None:
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
        self._since = time.monotonic()

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

    def take(self) -> dict[str, float]:
        """Means and counts under `area/name/stat`, then starts again. Every complete group counts, dropped ones included: the mean reward
        is that of the policy, not of what was kept."""
        now = time.monotonic()
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
        self._clear()
        return out
