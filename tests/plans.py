"""What tests of programmable rollouts share: a service on a fake engine whose first weights are published, and a small environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from palestra.agents.config import GroupsConfig
from palestra.agents.plans.function import FunctionRunner, arguments
from palestra.agents.plans.loading import Generate
from palestra.agents.transcript import text_of
from palestra.cli.roles.plays.service import WorkerService
from palestra.envs.config import EnvConfig
from palestra.envs.core import MessageEnv
from palestra.envs.types import Task
from palestra.server.client import ServiceClient
from palestra.server.ledger import Ledger, read_ledger
from palestra.server.types import TrajectoryGroup
from tests.fakes.engine import FakeEngine, service_on_fake
from tests.live import TOKEN, LiveService

TASKS = [Task(f"Say something of {number}.", number, f"t{number}") for number in range(6)]


class Talk(MessageEnv):
    """One reply, scored by its length: the fake engine's replies differ."""

    system = "You talk."
    tasks = TASKS

    def score(self, task: Task, transcript: Any) -> float:
        return len(text_of(transcript[-1])) / 100 if transcript else 0.0


@dataclass
class Scene:
    """A service that has work, and a worker's client."""

    live: LiveService
    engine: FakeEngine
    client: ServiceClient
    service: WorkerService
    stopping: threading.Event

    def publish(self, step: int) -> None:
        """The engines have the weights after `step`."""
        self.live.run(_call(lambda: self.live.service.plan.published(step)))

    def claim(self, n: int, deadline_s: float = 20.0) -> list[TrajectoryGroup]:
        """Groups, as a trainer gets them."""
        return self.client.claim(n, "trainer", 60.0, deadline_s)

    def train(self, step: int, n: int) -> list[TrajectoryGroup]:
        """A whole step of a trainer."""
        groups = self.claim(n)
        self.client.commit(step, f"step_{step}", [group.group_id for group in groups], "trainer")
        self.publish(step)
        return groups

    def ledger(self) -> Ledger:
        """Where all tokens went."""
        return read_ledger(self.live.service.settings.store)

    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason."""
        counts = self.live.service.buffer.counts()
        return {name: count for name, count in counts.items() if name.startswith("dropped(")}

    def args(self, **algo: Any) -> SimpleNamespace:
        """A function's arguments."""
        config = GroupsConfig(**{"groups_per_step": 2, "group_size": 2, "max_response": 96, **algo})
        return arguments(config, EnvConfig(id="talk"), f"{self.live.url}/v1")

    def runner(self, function: Generate, **algo: Any) -> FunctionRunner:
        """A runner of a function."""
        return FunctionRunner(function, self.args(**algo), Talk, TASKS, deadline_s=10.0)


async def _call(work: Any) -> None:
    work()


@contextmanager
def scene(folder: Path, **changes: Any) -> Iterator[Scene]:
    """`changes` go to the service's settings."""
    # The fake engine's version stays 0, whatever is published: nothing is to be dropped for its age.
    given = {"drop_zero_variance": False, "staleness": 100, "ahead": 0, **changes}
    with service_on_fake(folder, **given) as stage:
        client = ServiceClient(stage.live.url, TOKEN)
        stopping = threading.Event()
        made = Scene(stage.live, stage.engine, client, WorkerService(client, "strict", stopping.wait), stopping)
        made.publish(0)
        try:
            yield made
        finally:
            stopping.set()
            client.close()


@contextmanager
def running(work: Any, stopping: threading.Event, *, fails: bool = False) -> Iterator[list[BaseException]]:
    """Does `work` in a thread until the block ends; what it raised is in the list, and a fault of the test unless it `fails`."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            faults.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        stopping.set()
        thread.join(10)
        assert not thread.is_alive(), "it did not stop"
        for fault in () if fails else faults:
            raise AssertionError("the worker ended by a fault") from fault
