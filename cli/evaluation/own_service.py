"""A rollout service of an evaluation's own, on engines that are no part of the training.

In: a run, a version and the folder of its weights. Out: a service that has put exactly that version in force, while `work` runs. The
engine is an embedded one that is started for it, or those of `eval.urls`, which load the folder from disk. Everything that is started ends
with it, and with this process. It waits for the processes to start and for the engines to load, each with a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from palestra.agents.evaluation.config import EvalConfig
from palestra.cli.config import RunConfig, ServeConfig, check_as
from palestra.cli.launch.local import LocalLauncher
from palestra.cli.progress import Progress
from palestra.cli.runfolder import prepare_service
from palestra.cli.status import role_url
from palestra.cli.supervisor import Crew, how_it_ended
from palestra.server.eval_client import EvalClient
from palestra.server.evaluating.types import Due, EvaluatingError


class OwnService(Crew):
    """An engine and a service, from `run` until `work` returns."""

    order = ("engine", "service")

    def __init__(
        self,
        folder: Path,
        config: ServeConfig,
        due: Due,
        weights: Path,
        stopping: threading.Event,
        work: Callable[[OwnService, EvalClient], None],
    ) -> None:
        """`work` gets this and a client; it is not called where `stopping` came first."""
        super().__init__(folder, config, LocalLauncher(), Progress(folder, 0, Console(soft_wrap=True)))
        self._due, self._weights, self._stopping, self._work = due, weights, stopping, work

    def watch(self) -> int:
        """See `Crew.watch`: puts the version in force, then `work`.

        Raises:
            EvaluatingError: an engine was left out, so not all of what is played would be of this version.
            ServiceError: no engine took the weights.
        """
        url, due = role_url(self.folder, "service"), self._due
        assert url is not None, "a service that answers has announced itself"
        client = EvalClient(url, (self.folder / "roles" / "admin.token").read_text().strip())
        try:
            client.publish_begin(due.version, due.step, "disk")
            report = client.publish_end(due.version, str(self._weights))
            if report.left_out:
                told = "; ".join(f"{engine}: {why}" for engine, why in report.left_out.items())
                raise EvaluatingError(f"version {due.version} was not loaded by all engines of the evaluation: {told}")
            self._work(self, client)
        finally:
            client.close()
        return 0

    def fault(self) -> str | None:
        """Which of its processes has ended; None while all run."""
        for name, role in self.roles.items():
            if (status := role.poll()) is not None:
                return f"the evaluation's {name} {how_it_ended(status)}; its log: {self.folder / 'log'}"
        return None

    def advice(self, name: str) -> str:
        """See `Crew.advice`."""
        return "Only an evaluation is lost; the training goes on."

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        super()._on_signal(number, frame)


def own_service(
    config: RunConfig,
    section: EvalConfig,
    due: Due,
    folder: Path,
    weights: Path,
    stopping: threading.Event,
    work: Callable[[OwnService, EvalClient], None],
) -> None:
    """Serves version `due.version` from the folder `weights` below `folder` while `work` runs. From the main thread only.

    Raises:
        ConfigError, LaunchError, EvaluatingError, ServiceError: it could not be served; `work` was not called.
    """
    # A former process may have left one; its version is on record there and can be published no second time.
    taken = len(list(folder.glob("service-*"))) if folder.is_dir() else 0
    served = served_config(config, section, folder, f"service-{taken}", weights)
    home = prepare_service(served, weights)
    OwnService(home, served, due, weights, stopping, work).run()


def served_config(config: RunConfig, section: EvalConfig, folder: Path, name: str, weights: Path) -> ServeConfig:
    """What is served for one evaluation."""
    rollout: dict[str, Any] = {"context_len": config.rollout.context_len}
    if section.on == "engines":
        rollout |= {"engine": "sglang", "urls": section.urls, "environment": config.rollout.environment}
    else:
        rollout |= {"threads": section.threads, "max_running": section.concurrency}
    reply = section.max_response or config.algo.max_response
    tables = {
        "model": {"path": str(weights), "family": config.model.family},
        "run": {"save_dir": str(folder), "name": name, "start_deadline_s": config.run.start_deadline_s},
        "rollout": rollout,
        "schedule": {"deadline_s": config.schedule.deadline_s},
        "serve": {"sampling": "free", "max_response": reply},
    }
    return check_as(ServeConfig, tables, f"the service of an evaluation ({folder})")
