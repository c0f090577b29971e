"""Words of a check: what each law came to, and the report of all of them. Nothing heavy is imported; nothing is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a law came to."""

    PASSED = "passed"
    FAILED = "failed"
    UNTESTED = "not testable"


class Broken(Exception):
    """Raised by a law that does not hold: says where, and what was seen."""


class Untestable(Exception):
    """Raised by a law that cannot be tried on this environment: says what is missing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One law's."""

    law: str
    """Its short name, such as `oracle`."""
    says: str
    """What the law asks, in a line."""
    verdict: Verdict
    detail: str = ""
    """What was seen; for people."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of one environment came to."""

    env_id: str
    args: Mapping[str, Any]
    size: int
    """Tasks that the environment has."""
    tasks: tuple[str, ...]
    """Ids of the tasks that were tried."""
    outcomes: tuple[Outcome, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    """Mean reward over those tasks of `null` (an empty answer), `echo` (the prompt played back) and `oracle`, where they could be had."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time of the check."""

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Laws that do not hold."""
        return self.having(Verdict.FAILED)

    @property
    def untested(self) -> tuple[Outcome, ...]:
        """Laws that could not be tried."""
        return self.having(Verdict.UNTESTED)

    @property
    def passed(self) -> bool:
        """Whether every law that could be tried holds."""
        return not self.failed

    def having(self, verdict: Verdict) -> tuple[Outcome, ...]:
        """Laws that came to `verdict`."""
        return tuple(outcome for outcome in self.outcomes if outcome.verdict is verdict)

    def text(self) -> str:
        """One line a law, and the scores: for a console, and as the message of an `assert`."""
        width = max((len(outcome.law) for outcome in self.outcomes), default=0)
        lines = [f"{self.env_id}: {len(self.tasks)} of {self.size} tasks, {self.seconds:.1f} s"]
        for outcome in self.outcomes:
            lines.append(f"{outcome.verdict:12}  {outcome.law:{width}}  {outcome.says}")
            if outcome.detail:
                lines += [f"{'':14}{'':{width}}    {line}" for line in outcome.detail.splitlines()]
        if self.scores:
            lines.append("mean reward: " + ", ".join(f"{name} {value:.3f}" for name, value in self.scores.items()))
        counts = [f"{len(self.having(verdict))} {verdict}" for verdict in Verdict]
        return "\n".join([*lines, ", ".join(counts)])

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "env": self.env_id,
            "args": dict(self.args),
            "passed": self.passed,
            "size": self.size,
            "tasks": list(self.tasks),
            "scores": dict(self.scores),
            "seconds": round(self.seconds, 3),
            "laws": [
                {"law": one.law, "says": one.says, "verdict": str(one.verdict), "detail": one.detail}
                for one in self.outcomes
            ],
        }
