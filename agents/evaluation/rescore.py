"""Scores stored conversations again with the environment as it is, into another folder: no model is asked.

A folder goes in, another one with the same episodes under new rewards comes out. It waits for the environment's graders.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from palestra.agents.evaluation.folder import open_folder
from palestra.agents.evaluation.plan import task_hash
from palestra.agents.evaluation.provenance import provenance
from palestra.agents.evaluation.records import latest, read_header, read_rows, with_reward
from palestra.agents.evaluation.run import now
from palestra.agents.evaluation.types import EvalError, Header, Row
from palestra.agents.play import describe, message_env
from palestra.agents.transcript import after_prompt
from palestra.envs import boxes
from palestra.envs.registry import make_env, open_tasks
from palestra.envs.sandboxes import SandboxConfig
from palestra.envs.tasks import TaskSource
from palestra.envs.types import Reward, StopReason, Task


def rescore(
    folder: Path, out: Path, *, concurrency: int = 4, on_row: Callable[[int], None] = lambda count: None
) -> Header:
    """Rescores `folder` into `out`; `on_row` is told how many are done. Episodes that ended by a fault stay without a reward: their
    conversations are no whole ones.

    Raises:
        EvalError: the tasks are no longer those that were played, or a folder cannot be used.
        EnvError, TaskError: the environment cannot be made.
    """
    old = read_header(folder)
    if out.resolve() == folder.resolve():
        raise EvalError(f"{out}: a rescored evaluation needs a folder of its own")
    boxes.configure(SandboxConfig.model_validate(dict(old.spec.sandbox)))
    rows = list(latest(read_rows(folder)).values())
    source = open_tasks(old.spec.env, old.spec.args, old.spec.tasks)
    tasks = _tasks(old, source)
    header = replace(
        old, created=now(), provenance=provenance(old.spec.env), rescored_from=str(folder.resolve()), changes=()
    )
    with open_folder(out, header).log as log, concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        jobs = [pool.submit(_again, header, row, tasks.get(row.task)) for row in rows]
        for count, job in enumerate(jobs, 1):
            log.append(job.result())
            on_row(count)
    return header


def _tasks(header: Header, source: TaskSource) -> dict[str, Task]:
    """The planned tasks by hash, each proven to be the one that was played."""
    found = {}
    for planned in header.tasks:
        task = source[planned.index] if planned.index < len(source) else None
        if task is None or task_hash(task) != planned.hash:
            raise EvalError(
                f"task {planned.index} ({planned.id}) is not the one that was played: the environment's tasks have changed, not only its "
                "rubric, so old conversations cannot be scored by it"
            )
        found[planned.hash] = task
    return found


def _again(header: Header, row: Row, task: Task | None) -> Row:
    """The row under the reward that the environment gives it now."""
    if task is None or row.stop_reason is StopReason.INFRA or row.error is not None:
        return row
    try:
        return with_reward(row, _grade(header, row, task))
    except Exception as fault:  # noqa: BLE001 - a grader's fault is data: unknown, never 0
        return with_reward(row, Reward(None, note=describe(fault)))


def _grade(header: Header, row: Row, task: Task) -> Reward:
    env = make_env(header.spec.env, header.spec.args)
    try:
        inner = message_env(env)
        prompt, _ = env.reset(seed=row.seed, options={"task": task})
        transcript = after_prompt(row.messages, prompt)
        reward = inner.grade(transcript, None, row.stop_reason).reward or Reward(None, note="never scored")
    finally:
        env.close()
    # A rubric that judges turns has judged them again; what an environment gave for its steps is on record alone.
    given = () if inner.rubric is not None and inner.rubric.per_turn else row.step_rewards
    parts = [*given, reward.value]
    total = None if None in parts else math.fsum(part for part in parts if part is not None)
    return replace(reward, value=total)
