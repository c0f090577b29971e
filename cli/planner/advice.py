"""Where to put rollout and training, and why. Pure."""

from __future__ import annotations

from palestra.cli.planner.case import Case


def advise(case: Case) -> tuple[str, ...]:
    """Sentences, the most important first; empty where there is nothing to choose."""
    return ()
