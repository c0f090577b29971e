"""What a check found: the words in which every package says that a configuration cannot be, or should not be.

Rules live beside the sections that they are about; `palestra plan` collects them. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """It would crash, hang, or train wrong in silence."""
    WARNING = "warning"
    """It runs, but is wasteful, unstable or was never verified."""
    NOTE = "note"
    """Worth knowing."""

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return tuple(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule says where it holds; `Rule` adds its code and, where the hit has none of its own, severity and path."""

    message: str
    """What is wrong, with the numbers of this case."""
    fix: str = ""
    """What to do."""
    suggest: Mapping[str, Any] = field(default_factory=dict)
    """Field path -> value that removes this finding and adds no error; empty where none is known."""
    path: str | None = None
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that holds."""

    code: str
    """P101 and so on: stable, found in docs/plan-rules.md."""
    severity: Severity
    path: str
    """The field to change, as a file names it: `train.tp`."""
    message: str
    fix: str = ""
    suggest: Mapping[str, Any] = field(default_factory=dict)
    """Field path -> value that removes it."""

    @property
    def order(self) -> tuple[int, str, str]:
        """Findings are listed by severity, code and path."""
        return self.severity.rank, self.code, self.path


class RefusedError(ValueError):
    """What a validator of a section raises where a rule of the planner says the same: `palestra plan` shows the finding, a run its text."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(f"{finding.message}; {finding.fix}" if finding.fix else finding.message)
