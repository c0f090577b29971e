"""Rows and headers for the tests of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.agents.evaluation.plan import task_set_hash
from palestra.agents.evaluation.types import EvalSpec, Header, PlannedTask, Row, Usage
from palestra.envs.types import Message, Reward, StopReason

CALCULATOR = "palestra/Calculator-v0"


def header_of(n: int = 3, k: int = 2, **spec: Any) -> Header:
    """An evaluation of `n` tasks called t0, t1 ..."""
    tasks = tuple(PlannedTask(f"t{index}", f"task {index}", index) for index in range(n))
    made = EvalSpec(CALCULATOR, "m", "http://127.0.0.1:9/v1", n=n, k=k, **spec)
    return Header(made, tasks, task_set_hash(tasks), {"env": {"version": "1"}}, "2026-01-01T00:00:00Z")


def row_of(
    task: str,
    k: int,
    value: float | None,
    *,
    components: Mapping[str, float] | None = None,
    messages: tuple[Message, ...] = (),
    **more: Any,
) -> Row:
    """An episode with that reward; a fault where it is None."""
    fields: dict[str, Any] = {
        "reward": Reward(value, components or {}),
        "stop_reason": StopReason.INFRA if value is None else StopReason.ANSWER,
        "error": "AgentError: the model is away" if value is None else None,
        "usage": Usage(2, 2, 100, 10, 40, (0.1, 0.3)),
        "terminated": value is not None,
        "truncated": False,
        **more,
    }
    return Row(task=task, k=k, task_id=f"id {task}", seed=1, messages=messages, step_rewards=(), turns=2, **fields)
