"""The environment worker role: user code. It plays what the service hands out: groups as the run's plan says, or all by the run's function.

It reaches the model by the gateway's URL only. It waits for work with bounded long polls, and ends when the service is gone.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from palestra.agents.chat import close_client
from palestra.agents.group import Players
from palestra.agents.plans.driver import PlanDriver
from palestra.agents.plans.function import FunctionRunner, arguments
from palestra.agents.plans.loading import load_function, load_plan
from palestra.agents.players import player_of
from palestra.cli.config import RunConfig
from palestra.cli.roles.context import RoleContext, on_stop
from palestra.cli.roles.plays.groups import GroupWorker
from palestra.cli.roles.plays.service import WorkerService
from palestra.envs import boxes
from palestra.envs.registry import make_env, open_tasks
from palestra.envs.tasks import TaskSource
from palestra.server.client import ServiceClient
from palestra.server.health import HealthListener

HISTORY = "history.jsonl"
"""In the run's folder: what came of each task, of a plan that remembers it."""


class Worker(Protocol):
    """Plays until it is told to stop."""

    def register(self) -> None:
        """Tells the service what it has."""

    def run(self) -> None:
        """Plays."""

    def status(self) -> dict[str, object]:
        """For /health."""


class FunctionWorker:
    """Has all rollouts made by `rollout.function`."""

    def __init__(self, config: RunConfig, service: WorkerService, stopping: threading.Event) -> None:
        self.service, self.stopping = service, stopping
        self.source = tasks_of(config)
        self.runner = function_runner(config, self.source, service.client.url)

    def register(self) -> None:
        """Tells the service how many tasks there are. What a function plays it never plays twice alike, whatever its environment does."""
        self.service.client.register_worker(len(self.source))

    def run(self) -> None:
        """Calls the function as often as there is something to be played.

        Raises:
            ServiceError: the service was gone for too long.
            Exception: whatever the function raised.
        """
        self.runner.train(self.service, self.service.ask, self.stopping)

    def status(self) -> dict[str, object]:
        """For /health."""
        return {"status": "ok", "calls": self.runner.calls}


def function_runner(config: RunConfig, source: TaskSource, url: str) -> FunctionRunner:
    """The runner of a run's `rollout.function`, for a service at `url`.

    Raises:
        PlanError: the function cannot be loaded.
    """
    assert config.rollout.function is not None, "asked for only where there is one"
    env = config.env
    return FunctionRunner(
        load_function(config.rollout.function),
        arguments(config.algo, env, f"{url}/v1"),
        lambda: make_env(env.id, env.args),
        source,
        request_timeout_s=config.agent.request_timeout_s,
        deadline_s=config.schedule.deadline_s,
    )


def tasks_of(config: RunConfig) -> TaskSource:
    """The tasks of the run's file, or the environment's own.

    Raises:
        TaskError: the file is broken.
        EnvError: the environment has none.
    """
    return open_tasks(config.env.id, config.env.args, config.env.tasks)


def group_worker(config: RunConfig, service: WorkerService, folder: Path, stopping: threading.Event) -> GroupWorker:
    """A worker that plays groups as the run's plan says.

    Raises:
        PlanError: the plan cannot be loaded, or gives no tasks.
        AgentError: the agent cannot be loaded.
    """
    env = config.env
    driver = PlanDriver(load_plan(config.rollout.plan, folder / HISTORY), lambda: tasks_of(config))
    player = player_of(config.agent, config.algo.sampling(), folder / "workspaces")
    made: Any = make_env(env.id, env.args)
    # An agent that plays by itself may do other things the second time, whatever its environment promises.
    deterministic = config.agent.kind == "chat" and bool(made.unwrapped.deterministic)
    made.close()
    return GroupWorker(
        service,
        driver,
        Players(lambda: make_env(env.id, env.args), player),
        config.algo.limits(),
        group_size=config.algo.group_size,
        concurrency=env.concurrency,
        deterministic=deterministic,
        stopping=stopping,
    )


def point_at(url: str) -> None:
    """Lets agents of this process find the service where their clients look for any other, and reach it past a proxy: also those that make
    their client while they are imported."""
    os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_API_BASE"] = f"{url}/v1"
    direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(url).hostname]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(name for name in direct if name)


def main(context: RoleContext) -> int:
    """Plays until SIGTERM."""
    config = context.config
    boxes.configure(config.sandbox)
    client = ServiceClient(context.peer("service"), context.token)
    point_at(client.url)
    stopping = threading.Event()
    service = WorkerService(client, config.agent.sampling, stopping.wait)
    worker: Worker
    if config.rollout.function is not None:
        worker = FunctionWorker(config, service, stopping)
    else:
        worker = group_worker(config, service, context.folder, stopping)
    on_stop(stopping.set)
    worker.register()
    with HealthListener(worker.status) as listener:
        context.announce(listener.url)
        worker.run()
    boxes.close_all()
    close_client()
    client.close()
    return 0
