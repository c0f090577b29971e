"""The trainer's side of evaluations: which publish is due, its weights kept, and the next publish held where the run says so.

In: publishes as they come through. Out: `evals/step_N/due.json` and, where the evaluation has engines of its own, a copy of the weights.
Only `hold` waits, for the evaluator, at most `eval.deadline_s`. Nothing here raises: an evaluation never ends a training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from palestra.agents.evaluation.config import EvalConfig
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.snapshots import link_folder
from palestra.server.evaluating.types import Due, EvaluatingError
from palestra.trainer.durable import folder_aside
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.disk import write_folder
from palestra.trainer.weights.types import Export

logger = logging.getLogger(__name__)
POLL_S = 0.1
"""How often a held publish looks whether it may go on."""


class Evaluations:
    """What of a run's publishes is evaluated."""

    def __init__(self, settings: TrainerSettings, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        """Without an `[eval]` section nothing is ever due."""
        self._settings, self._run_dir, self._clock = settings, run_dir, clock
        self._config = settings.eval
        self._desk = EvalDesk(run_dir)
        self._held: Due | None = None

    def published(self, export: Export, step: int, version: int) -> None:
        """The engines have the weights of `step` as `version`: asks for their evaluation where one is due."""
        config = self._config
        try:
            if config is None or not self._is_due(config, step):
                return
            due = Due(step, version, config.on, self._clock(), self._refusal(config, step))
            if not due.refused and config.on != "hold":
                self._keep_weights(export, config, step, version)
        except (EvaluatingError, TrainerError, OSError, SafetensorError) as error:
            logger.exception("step %d is not evaluated", step)
            assert config is not None, "else it had returned"
            due = Due(step, version, config.on, self._clock(), f"its weights could not be kept: {error}")
        try:
            self._desk.ask(due)
        except EvaluatingError:
            logger.exception("the evaluation of step %d could not be asked for", step)
            return
        if not due.refused and due.on == "hold":
            self._held = due

    def hold(self, stop: Callable[[], bool], say: Callable[[str], None]) -> float:
        """Called before a publish: waits until the evaluation of the weights in force is done, its deadline is over, or `stop`. Returns the
        seconds that it took."""
        config, held, began = self._config, self._held, time.monotonic()
        self._held = None
        if config is None or held is None:
            return 0.0
        # On the evaluator's clock: it ends the evaluation by itself at the same moment.
        deadline, idle = held.asked_at + config.deadline_s, threading.Event()
        say(f"waits for the evaluation of step {held.step} before it publishes (eval.on = hold)")
        while not stop() and not self._is_done(held.step):
            if self._clock() > deadline:
                logger.warning(
                    "the evaluation of step %d was not done within %.0f s (eval.deadline_s)",
                    held.step,
                    config.deadline_s,
                )
                break
            idle.wait(POLL_S)
        return time.monotonic() - began

    def _is_due(self, config: EvalConfig, step: int) -> bool:
        """Each publish is asked for once, also where a resumed run repeats it."""
        asked = [due.step for due in self._desk.asked()]
        if step in asked:
            return False
        if step == 0:
            return config.at_start
        before = max((other for other in asked if other < step), default=0)
        return step // config.every > before // config.every or (config.at_end and step >= self._settings.steps)

    def _refusal(self, config: EvalConfig, step: int) -> str:
        """Why it has to be left out; "" where it has not. The last one of a run, which nothing can follow, never is."""
        waiting = len(self._desk.pending())
        if waiting <= config.queue or step >= self._settings.steps:
            return ""
        return f"{waiting} evaluations go on or wait already (eval.queue = {config.queue})"

    def _is_done(self, step: int) -> bool:
        try:
            return self._desk.done(step) is not None
        except EvaluatingError:
            logger.exception("the evaluation of step %d", step)
            return True

    def _keep_weights(self, export: Export, config: EvalConfig, step: int, version: int) -> None:
        """The folder that was published, under another name; written anew where there is none that these engines read."""
        weights, target = self._settings.weights, self._desk.weights(step)
        published = (weights.shared_dir or self._run_dir / "weights") / f"v{version}"
        own_form = config.on == "engines" or weights.engine_model is None
        if weights.transport == "disk" and weights.mode == "full" and own_form and published.is_dir():
            link_folder(published, target)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_aside(target, flush=False) as aside:
            write_folder(export, aside, self._settings.model, weights.bucket_bytes)
