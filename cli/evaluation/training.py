"""One evaluation of a run that trains: the same plan, players and records as `palestra eval`, on sessions of one policy version.

A run's configuration, a service and a version go in; the rows of `evals/step_N` and an outcome come out. It waits for the episodes, until
its deadline, a wish to stop, or a fault of the engines; what is under way then is discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from palestra.agents.evaluation.calls import Meter
from palestra.agents.evaluation.config import EvalConfig
from palestra.agents.evaluation.folder import Opened, header_of, open_folder
from palestra.agents.evaluation.pinned import PinnedPlayer, is_void
from palestra.agents.evaluation.players import eval_player
from palestra.agents.evaluation.records import has_header, owed, read_header, read_rows
from palestra.agents.evaluation.run import Evaluation, Pace, Standing
from palestra.agents.evaluation.summary import Summary, summarise
from palestra.agents.evaluation.types import EvalError, EvalSpec, Header, Key, Row
from palestra.agents.group import Players
from palestra.cli.config import RunConfig
from palestra.cli.evaluation.function import play_by_function
from palestra.cli.evaluation.served import ServedHost
from palestra.envs.registry import make_env, open_tasks
from palestra.envs.tasks import TaskSource
from palestra.server.eval_client import EvalClient
from palestra.server.evaluating.types import Due, EvalState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Course:
    """What ends an evaluation before its last episode."""

    deadline: float
    """time.monotonic()."""
    stopping: threading.Event
    """Set: the run ends. What is owed then stays owed."""
    fault: Callable[[], str | None]
    """Why its engines cannot go on; None while they can."""

    def over(self) -> EvalState | None:
        """How it has to end now; None: it may go on. A wish to stop is a failure for the moment: nobody writes it down."""
        if self.stopping.is_set() or self.fault() is not None:
            return EvalState.FAILED
        return EvalState.LATE if time.monotonic() > self.deadline else None


@dataclass(frozen=True, slots=True)
class Order:
    """One evaluation that is to be played."""

    config: RunConfig
    section: EvalConfig
    due: Due
    folder: Path
    """Its own, of the run's `evals`."""
    client: EvalClient
    """Of the service that has the version in force."""
    course: Course
    on_tick: Callable[[Standing], None]
    """Told how it stands, some times a second."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of playing."""

    state: EvalState
    reason: str
    metrics: Mapping[str, float | None]


def spec_of_run(config: RunConfig, section: EvalConfig, folder: Path, tasks: int) -> EvalSpec:
    """What is evaluated of a run whose evaluation has so many tasks. `folder`: the run's."""
    algo, agent = config.algo, config.agent
    return EvalSpec(
        env=section.env_id(config.env.id),
        model=config.model.path,
        service=str(folder),
        args=args_of(config, section),
        tasks=tasks_of(config, section),
        n=min(section.n or tasks, tasks),
        k=section.k,
        order=section.order,
        seed=section.seed,
        temperature=section.temperature,
        max_tokens=section.max_response or algo.max_response,
        params={} if section.top_p == 1.0 else {"top_p": section.top_p},
        max_turns=section.max_turns or algo.limits().max_turns,
        deadline_s=algo.limits().deadline_s,
        request_timeout_s=agent.request_timeout_s,
        agent=agent.model_dump(mode="json", exclude_defaults=True) | {"kind": agent.kind},
        sandbox=config.sandbox.model_dump(mode="json", exclude_unset=True),
        pass_reward=section.pass_reward,
    )


def args_of(config: RunConfig, section: EvalConfig) -> dict[str, object]:
    """Arguments of the evaluation's environment."""
    if section.args is not None:
        return dict(section.args)
    return dict(config.env.args) if section.env_id(config.env.id) == config.env.id else {}


def tasks_of(config: RunConfig, section: EvalConfig) -> str | None:
    """Its file of tasks; None: the environment's own."""
    if section.tasks is not None or section.env_id(config.env.id) != config.env.id:
        return section.tasks
    return config.env.tasks


def plan_run(config: RunConfig, section: EvalConfig, due: Due, run: Path, folder: Path) -> tuple[Header, TaskSource]:
    """The header of an evaluation, with the version that it is of, and its tasks.

    Raises:
        EvalError: the folder has episodes of another version.
        EnvError, TaskError: there is no such environment, or no such tasks.
    """
    source = open_tasks(section.env_id(config.env.id), args_of(config, section), tasks_of(config, section))
    header = header_of(spec_of_run(config, section, run, len(source)), source)
    about = {"train_step": due.step, "version": due.version, "on": due.on}
    if has_header(folder) and (before := read_header(folder).provenance.get("training")) != about:
        raise EvalError(f"{folder} has episodes of {before}, and {about} is to be played: they are never mixed")
    return replace(header, provenance={**header.provenance, "training": about}), source


def play_run(order: Order, header: Header, source: TaskSource) -> Played:
    """Plays what is owed, and what has no reward again, at most `retries` times.

    Raises:
        EvalError: the folder cannot be written, or holds an evaluation that differs.
    """
    began, opened = time.monotonic(), open_folder(order.folder, header, resume=True)
    rows: Mapping[Key, Row] = opened.rows
    state, reason = order.course.over(), ""
    with opened.log:
        for again in range(1 + order.section.retries):
            keys = owed(header, rows, retry_errors=again > 0)
            if state is not None:
                break
            if keys:
                opened = replace(opened, rows=dict(rows))
                evaluation = _one_pass(order, opened, source, keys)
                rows, state = evaluation.rows, order.course.over()
                if evaluation.fault is not None:
                    state, reason = EvalState.FAILED, evaluation.fault
    summary = summarise(header, rows)
    if not summary.owed and (state is EvalState.LATE or not summary.errors):
        state = None  # all have ended; at most repetitions were cut
    if state is EvalState.LATE:
        reason = f"{summary.owed} of {summary.planned} episodes had not ended when its time was over"
    elif state is EvalState.FAILED:
        reason = reason or order.course.fault() or "the run ends"
    metrics = metrics_of(order.section.label(header.spec.env), summary, order.folder, time.monotonic() - began)
    return Played(state or EvalState.DONE, reason if state else "", metrics)


def _one_pass(order: Order, opened: Opened, source: TaskSource, keys: list[Key]) -> Evaluation:
    """Plays these episodes once, or until the course is over; what is under way then is discarded."""
    section, due, client, spec, meter = order.section, order.due, order.client, opened.header.spec, Meter()
    host = ServedHost(client, spec, {"train_step": due.step, "version": due.version})
    evaluation = Evaluation(opened.header, source, host, opened.log, opened.rows, meter, Pace(section.concurrency))

    def tick(standing: Standing) -> None:
        if order.course.over() is not None:
            evaluation.draining.set()
            evaluation.leaving.set()
        order.on_tick(standing)

    try:
        if order.config.rollout.function is not None:
            play_by_function(order.config, evaluation, source, keys, client, due.version, tick)
        else:
            inner = eval_player(spec, meter, evaluation.key_of, evaluation.leaving, order.folder / "workspaces")
            player = PinnedPlayer(inner, due.version, client.versions_of)
            evaluation.run(keys, Players(lambda: make_env(spec.env, spec.args), player), tick)
    finally:
        if left := host.abandon():
            logger.warning("%d episodes of step %d were cut", left, due.step)
    return evaluation


def metrics_of(name: str, summary: Summary, folder: Path, seconds: float) -> dict[str, float | None]:
    """An evaluation's line, by the names of metrics."""
    rows, last = read_rows(folder), summary.passes[-1] if summary.passes else None
    return {
        f"eval/{name}/mean": summary.reward.mean,
        f"eval/{name}/stderr": summary.reward.se,
        f"eval/{name}/pass_at_k": None if last is None else last.at_least_one,
        f"eval/{name}/k": float(last.k) if last is not None else None,
        f"eval/{name}/scored": float(summary.scored),
        f"eval/{name}/errors": float(summary.errors),
        f"eval/{name}/owed": float(summary.owed),
        f"eval/{name}/void": float(summary.error_kinds.get("Void", 0)),
        f"eval/{name}/repeated": float(len(rows) - summary.finished - summary.foreign),
        f"eval/{name}/voided": float(sum(map(is_void, rows))),
        f"eval/{name}/tokens": float(summary.cost.completion_tokens),
        "time/eval_s": seconds,
    }
