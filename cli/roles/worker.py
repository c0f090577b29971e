"""The environment worker role: user code. It takes assignments from the service and plays them, a thread per episode.

It reaches the model by the gateway's URL only. It waits for work with bounded long polls, and ends when the service is gone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from palestra.agents.chat import close_client
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import player_of
from palestra.agents.types import GroupAssignment, SessionHandle
from palestra.cli.roles.context import RoleContext, on_stop
from palestra.envs import boxes
from palestra.envs.registry import make_env, open_tasks
from palestra.envs.types import Episode, Message
from palestra.server.client import ServiceClient, ServiceError
from palestra.server.health import HealthListener

logger = logging.getLogger(__name__)
PATIENCE_S = 20.0
"""How long the service may be unreachable before the worker gives up."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """The service as a `SessionHost`, with the run's rule about sampling."""

    client: ServiceClient
    sampling: str

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `ServiceClient.open_session`."""
        return self.client.open_session(assignment, index, task_id, sampling=self.sampling)

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """See `ServiceClient.close_session`."""
        self.client.close_session(handle, episode)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `ServiceClient.conversation`."""
        return self.client.conversation(handle)


class Worker:
    """Plays assignments until it is told to stop."""

    def __init__(self, context: RoleContext, client: ServiceClient) -> None:
        self.context, self.client = context, client
        self.config = context.config
        self.threads = EpisodeThreads(self.config.env.concurrency)
        self.sessions = Sessions(client, self.config.agent.sampling)
        point_at(client.url)
        env = self.config.env
        player = player_of(self.config.agent, self.config.algo.sampling(), context.folder / "workspaces")
        self.players = Players(lambda: make_env(env.id, env.args), player)
        self.stopping = threading.Event()
        self._groups: set[threading.Thread] = set()
        self._groups_at_once = max(1, -(-self.config.env.concurrency // self.config.algo.group_size))

    def register(self) -> None:
        """Tells the service how many tasks there are, unless the service read them from a file itself."""
        if self.config.env.tasks is None:
            self.client.register_worker(len(open_tasks(self.config.env.id, self.config.env.args)))

    def run(self) -> None:
        """Takes work while there is room for another group.

        Raises:
            ServiceError: the service was gone for longer than PATIENCE_S.
        """
        last_answer = time.monotonic()
        while not self.stopping.is_set():
            self._groups = {thread for thread in self._groups if thread.is_alive()}
            if len(self._groups) >= self._groups_at_once:
                next(iter(self._groups)).join(0.05)
                continue
            try:
                assignment = self.client.work(wait_s=2.0)
                last_answer = time.monotonic()
            except ServiceError as error:
                if error.status == 0 and time.monotonic() - last_answer < PATIENCE_S:
                    self.stopping.wait(0.5)
                    continue
                raise
            if assignment is not None:
                self._play(assignment)

    def status(self) -> dict[str, object]:
        """For /health."""
        return {"status": "ok", "groups": len(self._groups)}

    def _play(self, assignment: GroupAssignment) -> None:
        thread = threading.Thread(target=self._play_group, args=(assignment,), daemon=True, name=assignment.group_id)
        self._groups.add(thread)
        thread.start()

    def _play_group(self, assignment: GroupAssignment) -> None:
        run_group(assignment, self.players, self.sessions, self.config.algo.limits(), self.threads)


def point_at(url: str) -> None:
    """Lets agents of this process find the service where their clients look for any other, and reach it past a proxy: also those that make
    their client while they are imported."""
    os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_API_BASE"] = f"{url}/v1"
    direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(url).hostname]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(name for name in direct if name)


def main(context: RoleContext) -> int:
    """Plays until SIGTERM."""
    boxes.configure(context.config.sandbox)
    client = ServiceClient(context.peer("service"), context.token)
    worker = Worker(context, client)
    on_stop(worker.stopping.set)
    worker.register()
    with HealthListener(worker.status) as listener:
        context.announce(listener.url)
        worker.run()
    boxes.close_all()
    close_client()
    client.close()
    return 0
