"""The evaluator role: plays the evaluations of a run that trains. User code runs here: environments and agents.

It looks into the run's `evals` folder for what is due and plays one at a time, in the order of train steps: on the training's own service,
or on a service that it starts for it. An evaluation that cannot be played is put down as failed, with its reason; only a disk that refuses
what came of it ends the role. It waits for the episodes and for the next evaluation, and ends at SIGTERM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from palestra.agents.chat import close_client
from palestra.agents.evaluation.config import EvalConfig
from palestra.agents.evaluation.run import Standing
from palestra.cli.config import ConfigError
from palestra.cli.evaluation.own_service import OwnService, own_service
from palestra.cli.evaluation.training import Course, Order, Played, plan_run, play_run
from palestra.cli.roles.context import RoleContext, on_stop
from palestra.cli.roles.worker import point_at
from palestra.envs import boxes
from palestra.server.client import ServiceError
from palestra.server.eval_client import EvalClient
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.snapshots import remove_folder
from palestra.server.evaluating.types import Done, Due, EvalState
from palestra.server.health import HealthListener

logger = logging.getLogger(__name__)
POLL_S = 0.5
"""How often it looks for something to do."""
LOOK_S = 1.0
"""How often it asks the training's service which version is in force."""


class InForce:
    """Whether the training's service still has the version that is evaluated: a `Course.fault`."""

    def __init__(self, client: EvalClient, version: int) -> None:
        self._client, self._version = client, version
        self._looked = -LOOK_S
        self._fault: str | None = None

    def __call__(self) -> str | None:
        """Why the evaluation cannot go on; None while the version is in force. Asks at most once in LOOK_S seconds."""
        if self._fault is None and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            try:
                newest = int(self._client.status()["policy_version"])
                if newest != self._version:
                    self._fault = f"version {newest} was published before the evaluation of {self._version} was done"
            except ServiceError as error:
                self._fault = f"the service is gone: {error}"
        return self._fault


class Evaluator:
    """Plays what is due until it is told to stop."""

    def __init__(self, context: RoleContext, section: EvalConfig) -> None:
        self.context, self.section, self.config = context, section, context.config
        self.desk = EvalDesk(context.folder)
        self.stopping = threading.Event()
        self.doing = "evaluator waits for the next evaluation"

    def status(self) -> dict[str, object]:
        """For /health."""
        return {"status": "ok", "doing": self.doing}

    def run(self) -> None:
        """One evaluation after another.

        Raises:
            EvaluatingError: what came of one could not be written.
        """
        for due in self.desk.asked():  # a former process may have been killed before it cleared up
            if self.desk.done(due.step) is not None:
                self._clear(due)
        while not self.stopping.is_set():
            waiting = self.desk.pending()
            if not waiting:
                self.doing = "evaluator waits for the next evaluation"
                self.stopping.wait(POLL_S)
                continue
            self._one(waiting[0])

    def _one(self, due: Due) -> None:
        self.doing = f"evaluates step {due.step} (version {due.version})"
        try:
            played = Played(EvalState.REFUSED, due.refused, {}) if due.refused else self._play(due)
        except Exception as error:
            # Whatever an environment, an engine or a service does wrong: the training goes on.
            logger.exception("the evaluation of step %d", due.step)
            played = Played(EvalState.FAILED, f"{type(error).__name__}: {error}", {})
        if self.stopping.is_set() and played.state is not EvalState.DONE:
            return  # the run ends: what is owed stays owed, and a resumed run says what becomes of it
        done = Done(due.step, due.version, due.on, played.state, time.time(), played.reason, played.metrics)
        self.desk.finish(done)
        self._clear(due)
        logger.info("evaluation of step %d: %s %s", due.step, done.state, done.reason)

    def _play(self, due: Due) -> Played:
        """Waits for its end.

        Raises:
            Exception: it could not be played.
        """
        if due.on == "hold":
            left_s = due.asked_at + self.section.deadline_s - time.time()
            client = EvalClient(self.context.peer("service"), self.context.token)
            try:
                return self._with(due, client, left_s, InForce(client, due.version))
            finally:
                client.close()
        made: list[Played] = []
        began = time.monotonic()

        def work(own: OwnService, client: EvalClient) -> None:
            left_s = self.section.deadline_s - (time.monotonic() - began)
            made.append(self._with(due, client, left_s, own.fault))

        folder, weights = self.desk.folder(due.step), self.desk.weights(due.step)
        own_service(self.config, self.section, due, folder, weights, self.stopping, work)
        return made[0] if made else Played(EvalState.FAILED, "the run ended before it began", {})

    def _with(self, due: Due, client: EvalClient, left_s: float, fault: Callable[[], str | None]) -> Played:
        folder = self.desk.folder(due.step)
        header, source = plan_run(self.config, self.section, due, self.context.folder, folder)
        point_at(client.url)

        def tick(standing: Standing) -> None:
            self.doing = (
                f"evaluates step {due.step} (version {due.version}): {standing.finished}/{standing.planned} episodes"
            )

        course = Course(time.monotonic() + left_s, self.stopping, fault)
        order = Order(self.config, self.section, due, folder, client, course, tick)
        return play_run(order, header, source)

    def _clear(self, due: Due) -> None:
        """The copy of the weights is of no use any more."""
        try:
            remove_folder(self.desk.weights(due.step))
        except OSError:
            logger.exception("the weights of the evaluation of step %d stay", due.step)


def main(context: RoleContext) -> int:
    """Evaluates until SIGTERM.

    Raises:
        ConfigError: the run has no `[eval]`.
    """
    section = context.config.eval
    if section is None:
        raise ConfigError(f"{context.folder} has no [eval]: there is nothing to evaluate")
    boxes.configure(context.config.sandbox)
    evaluator = Evaluator(context, section)
    on_stop(evaluator.stopping.set)
    with HealthListener(evaluator.status) as listener:
        context.announce(listener.url)
        evaluator.run()
    boxes.close_all()
    close_client()
    return 0
