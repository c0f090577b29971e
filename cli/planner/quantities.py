"""The numbers of a plan, each with its formula, its terms and how far it can be relied on. Pure."""

from __future__ import annotations

from palestra.cli.planner.case import Case
from palestra.cli.planner.types import Quantity


def quantities(case: Case) -> tuple[Quantity, ...]:
    """All of them, in the order in which they are shown."""
    return ()
