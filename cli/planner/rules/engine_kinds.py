"""Rules of one family."""

from __future__ import annotations

from palestra.cli.planner.rules.collect import Rules

RULES = Rules()
