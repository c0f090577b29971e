"""Which episodes an evaluation consists of, and whether a resumed one is still the same.

A source of tasks and a spec go in; planned tasks with the hash of their content come out. Tasks are drawn so that a larger n holds the
tasks of a smaller one. Nothing waits but the source.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from palestra.agents.evaluation.types import EvalError, EvalSpec, Header, PlannedTask
from palestra.envs.tasks import TaskSource, task_to_json
from palestra.envs.types import Task, TaskError

HASH_DIGITS = 16
MAY_CHANGE = frozenset({"price_in", "price_out", "request_timeout_s", "pass_reward"})
"""Fields of a spec that a resumed evaluation may have otherwise: they change no episode."""


def plan_tasks(source: TaskSource, spec: EvalSpec) -> tuple[PlannedTask, ...]:
    """The tasks that are played, in order.

    Raises:
        EvalError: there are fewer than n, or two of them are equal.
        TaskError: one is no plain JSON.
    """
    size = len(source)
    n = size if spec.n is None else spec.n
    if not 1 <= n <= size:
        raise EvalError(f"-n {n}: the environment has {size} tasks; give 1 to {size}")
    indices = range(n) if spec.order == "sequential" else draw(size, n, spec.seed)
    seen: dict[str, int] = {}
    planned = []
    for index in indices:
        task = source[index]
        digest = task_hash(task)
        if (other := seen.setdefault(digest, index)) != index:
            raise EvalError(f"tasks {other} and {index} are equal in everything: give each an id of its own")
        planned.append(PlannedTask(digest, task.id or f"#{index}", index))
    return tuple(planned)


def draw(size: int, n: int, seed: int) -> list[int]:
    """The first n of a seeded shuffle of `size` indices, without making the rest of it."""
    rng, moved, drawn = random.Random(f"palestra-eval/{seed}"), dict[int, int](), list[int]()
    for at in range(n):
        other = rng.randrange(at, size)
        drawn.append(moved.get(other, other))
        moved[other] = moved.get(at, at)
    return drawn


def task_hash(task: Task) -> str:
    """A hash of the task's whole content.

    Raises:
        TaskError: it holds something that JSON does not.
    """
    try:
        text = json.dumps(task_to_json(task), sort_keys=True, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {task.id!r} is no plain JSON, so it has no hash: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def task_set_hash(tasks: Sequence[PlannedTask]) -> str:
    """A hash of a set of tasks, whatever their order."""
    return hashlib.sha256("\n".join(sorted(task.hash for task in tasks)).encode()).hexdigest()[:HASH_DIGITS]


def env_seed(seed: int, task: str) -> int:
    """What an environment is reset with: equal for all episodes of a task."""
    return _number(f"{seed}/{task}")


def model_seed(seed: int, task: str, k: int) -> int:
    """What the calls of one episode name: another one for each."""
    return _number(f"{seed}/{task}/{k}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def differences(old: Header, new: Header) -> list[str]:
    """What the resumed evaluation would do otherwise than the one in the folder, a line each."""
    before, after = dict(_flat(asdict(old.spec))), dict(_flat(asdict(new.spec)))
    found = [
        f"{name} (was {_shown(before, name)}, is {_shown(after, name)})"
        for name in sorted(before.keys() | after.keys())
        if name.split(".")[0] not in MAY_CHANGE and _shown(before, name) != _shown(after, name)
    ]
    if old.task_set != new.task_set:
        found.append(f"the tasks themselves (hash was {old.task_set}, is {new.task_set})")
    versions = [header.provenance.get("env", {}).get("version") for header in (old, new)]
    if versions[0] != versions[1]:
        found.append(f"the environment's version (was {versions[0]}, is {versions[1]})")
    return found


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name], ensure_ascii=False, sort_keys=True, default=str) if name in fields else "not given"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        elif not isinstance(item, Mapping):
            yield f"{prefix}{key}", item
