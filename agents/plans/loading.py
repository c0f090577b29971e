"""Finds a program of the user's by its name: "package.module:Name", or "folder/file.py:Name" from the current folder.

A name goes in, a `RolloutPlan` or a function comes out, or an error that says which field names it and what is wrong. It waits for the
import.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from palestra.agents.plans.history import History
from palestra.agents.plans.plan import RolloutPlan
from palestra.agents.plans.types import PlanError
from palestra.agents.python import load_entry
from palestra.agents.types import AgentError

Generate: TypeAlias = Callable[..., Awaitable[Any]]
"""`async def generate_rollout(args, rollout_id, data_buffer, evaluation=False)`."""
FORM = "async def generate_rollout(args, rollout_id, data_buffer, evaluation=False)"


def load_plan(entry: str | None, history: Path | None = None) -> RolloutPlan:
    """The plan that `rollout.plan` names, with its history; None: one that overrides nothing.

    Raises:
        PlanError: there is no such name, it is no `RolloutPlan`, or it cannot be made without arguments.
    """
    made: Any = RolloutPlan if entry is None else _load(entry, "rollout.plan")
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise PlanError(
                f"rollout.plan {entry!r}: the class could not be made without arguments: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(made, RolloutPlan):
        raise PlanError(f"rollout.plan {entry!r} is {type(made).__name__}, no palestra.agents.plans.plan.RolloutPlan")
    made.history = History(history)
    return made


def load_function(entry: str) -> Generate:
    """The function that `rollout.function` names.

    Raises:
        PlanError: there is no such name, or it cannot be called as it will be.
    """
    made: Generate = _load(entry, "rollout.function")
    if not inspect.iscoroutinefunction(made):
        raise PlanError(f"rollout.function {entry!r} is {type(made).__name__}, no coroutine function: write {FORM}")
    try:
        inspect.signature(made).bind(None, 0, None, evaluation=False)
    except TypeError as error:
        raise PlanError(f"rollout.function {entry!r}: {error}: write {FORM}") from None
    return made


def _load(entry: str, what: str) -> Any:
    try:
        return load_entry(entry, what)
    except AgentError as error:
        raise PlanError(str(error)) from error.__cause__
