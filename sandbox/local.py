"""What all backends that start boxes on this machine share: the keeper, the agent's setup, what a group counted, and clearing up.

In: a subclass that knows how a box's first program is called (`plan`) and what it holds (`levels`). Out: boxes. Waits for the keeper and
for agents.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import socket
from dataclasses import dataclass
from typing import Any, Literal

from palestra.sandbox import bundle, cgroups
from palestra.sandbox.box import AgentBox
from palestra.sandbox.channel import StreamChannel
from palestra.sandbox.keeper.client import KeeperClient, KeeperLostError
from palestra.sandbox.launching import setup_request, spawn_request
from palestra.sandbox.leftovers import clear, reap
from palestra.sandbox.meter import Witness
from palestra.sandbox.types import (
    BackendName,
    BoxFileError,
    BoxLostError,
    BoxSpec,
    Enforced,
    Level,
    SandboxError,
    SandboxUnavailableError,
)

logger = logging.getLogger(__name__)

CONTROL_FD = 3
"""The agent's socket in every box: `bundle.command(python, CONTROL_FD, CONTROL_FD)`."""
FILES_FD = 4
"""The first of `LaunchPlan.files`."""
SETUP_S = 60.0
"""Most time for a box to come up, its preloaded modules included."""
OPEN_FILES = 16384
"""Descriptors that this process lets itself have: four per box."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box will be."""

    number: int
    """Unique in this backend."""
    folder: str
    """A folder of its own on the host; it is made, for the box's user alone, if the plan says so."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a box is started. Its program has an empty environment, works in /, and its standard error is kept for error texts."""

    argv: tuple[str, ...]
    """Absolute path of the program, and its arguments."""
    agent: bytes
    """The agent's modules, of `bundle`."""
    mode: Literal["namespace", "domain", "tree"]
    """How the agent finds all others; see `inside.kernel`."""
    home: str = "/workspace"
    """In the box."""
    packages: str | None = None
    """Where the box finds `BoxSpec.packages`."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables beside those of `bundle.environment`."""
    setup: tuple[tuple[str, Any], ...] = ()
    """More of the agent's first request."""
    files: tuple[bytes, ...] = ()
    """Contents that the program reads on descriptors `FILES_FD` and up."""
    confine: dict[str, Any] | None = None
    """What `keeper.confine.confine` is called with in the child, last before its program starts."""
    own_user: bool = True
    """A user of its own, where we are root."""
    cgroup: bool = True
    """A group that holds its limits, where one can be had; else rlimits and the keeper's watchdog."""
    bounded: bool = True
    """Whether memory and processes are limited at all."""
    folder: bool = False
    """Whether `Place.folder` is made, and removed at the end."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What the keeper found on this machine."""

    root: bool
    """Boxes have users of their own."""
    cgroup: Literal["v1", "v2", ""]
    controllers: frozenset[str]
    """Of memory, pids and cpu, those that hold limits here."""
    why: str
    """Why there is no group, or not every controller."""


class LocalBackend:
    """`types.Backend` on this machine; a subclass says how."""

    name: BackendName

    def __init__(self, *, python: str = "/usr/bin/python3") -> None:
        """`python` is the interpreter in the box, 3.9 or newer."""
        self.python = python
        self.ground = Ground(False, "", frozenset(), "not started")
        self._where: cgroups.Hierarchy | None = None
        self._keeper: KeeperClient | None = None
        self._starting = asyncio.Lock()
        self._burying = asyncio.Lock()
        self._buried: set[str] = set()
        self._numbers = itertools.count(1)
        self._boxes: dict[int, AgentBox] = {}
        self._closed = False

    async def prepare(self) -> None:
        """Looks whether this can work here, before the keeper is started.

        Raises:
            SandboxUnavailableError: something is missing.
        """

    async def plan(self, spec: BoxSpec, place: Place) -> LaunchPlan:
        """How a box of this spec is started.

        Raises:
            SandboxUnavailableError: this spec cannot be had.
        """
        raise NotImplementedError

    def levels(self) -> Enforced:
        """What is held on `self.ground`."""
        raise NotImplementedError

    def explain(self, said: str) -> str:
        """What to do about a box that ended at its start with these words; "" if there is nothing to say."""
        return ""

    async def reach(self, path: str) -> str:
        """A path of the host as a box's user can reach it: another one, where folders above it are closed to others and we are root.

        Raises:
            SandboxUnavailableError: there is no such path, or no way to it.
        """
        if not _closed_off(path) or not self.ground.root:
            return path
        try:
            reply = await (await self._kept()).ask({"op": "stage", "source": path})
        except KeeperLostError:
            raise
        except SandboxError as error:
            raise SandboxUnavailableError(
                f"{path}: the users of boxes cannot reach it, and it cannot be mounted elsewhere: {error}"
            ) from error
        return str(reply["path"])

    async def start(self) -> None:
        await self.prepare()
        _allow_files()
        await self._kept()
        box = await self.create(BoxSpec())
        try:
            result = await box.exec(["/bin/true"], timeout=SETUP_S)
        finally:
            await box.close()
        if result.status != "ok":
            why = result.text.strip() or result.message or result.status
            raise SandboxUnavailableError(f"{self.name}: a box came up, but nothing runs in it: {why}")

    def enforced(self) -> Enforced:
        return self.levels()

    async def create(self, spec: BoxSpec) -> AgentBox:
        keeper = await self._kept()
        number = next(self._numbers)
        place = Place(number, os.path.join(keeper.hello["folders"], keeper.hello["owner"], str(number)))
        plan = await self.plan(spec, place)
        return await self._launch(keeper, spec, place, plan)

    async def _launch(self, keeper: KeeperClient, spec: BoxSpec, place: Place, plan: LaunchPlan) -> AgentBox:
        number = place.number
        witness = Witness(keeper, self._where if plan.cgroup and plan.bounded else None, number)
        ours, theirs = socket.socketpair()
        started = keeper.ask(spawn_request(spec, place, plan, self.ground), theirs)
        channel = await StreamChannel.over(ours, witness)

        async def destroy() -> None:
            witness.close()
            try:
                await keeper.ask({"op": "kill", "box": number})
            except KeeperLostError:
                await self._bury(keeper)
            keeper.forget(number)
            self._boxes.pop(number, None)

        box = AgentBox(f"{self.name}-{keeper.process.pid}-{number}", spec, channel, self, destroy)
        self._boxes[number] = box
        try:
            await self._set_up(box, channel, plan, started, keeper, number)
            witness.open()
        except BaseException:
            started.cancel()
            await box.close()
            raise
        return box

    async def _set_up(
        self,
        box: AgentBox,
        channel: StreamChannel,
        plan: LaunchPlan,
        started: asyncio.Future[dict[str, Any]],
        keeper: KeeperClient,
        number: int,
    ) -> None:
        channel.write(plan.agent)
        try:
            await box.introduce(setup_request(box.spec, plan, self.ground), SETUP_S)
        except (BoxLostError, BoxFileError) as error:
            await started  # raises, where the keeper could not even fork
            said = await self._last_words(keeper, number)
            hint = self.explain(said)
            raise SandboxUnavailableError(
                f"{self.name}: a box did not come up: {said or error}{f'. {hint}' if hint else ''}"
            ) from error

    async def _last_words(self, keeper: KeeperClient, number: int) -> str:
        reply = await keeper.ask({"op": "kill", "box": number})
        return str(reply["said"]) or keeper.said.get(number, "")

    async def _kept(self) -> KeeperClient:
        """The keeper; a new one if the former was killed."""
        if self._keeper is not None and not self._keeper.lost.done():
            return self._keeper
        async with self._starting:
            if self._closed:
                raise SandboxError(f"{self.name} was closed")
            if self._keeper is None or self._keeper.lost.done():
                if self._keeper is not None:
                    logger.error("the sandbox's keeper is gone, and its boxes with it; another one is started")
                    await self._bury(self._keeper)
                self._keeper = await KeeperClient.start()
                self._keeper.lost.add_done_callback(lambda _: self._abandon())
                self._settle(self._keeper.hello)
            return self._keeper

    def _settle(self, hello: dict[str, Any]) -> None:
        version = hello["version"]
        self._where = (
            cgroups.Hierarchy(version, tuple((name, base) for name, base in hello["bases"])) if version else None
        )
        controllers = self._where.controllers if self._where else frozenset()
        kind: Literal["v1", "v2", ""] = "v1" if version == 1 else "v2" if version == 2 else ""
        self.ground = Ground(bool(hello["root"]), kind, controllers, hello["why"])

    def _abandon(self) -> None:
        """The keeper is gone: nothing holds its boxes any more, so their agents are told to end."""
        for box in list(self._boxes.values()):
            if box.alive:
                task = asyncio.ensure_future(box.close())
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _bury(self, keeper: KeeperClient) -> None:
        """Removes what a keeper left that was killed."""
        await keeper.close()
        async with self._burying:
            if keeper.hello.get("owner", "") in self._buried:
                return
            self._buried.add(keeper.hello.get("owner", ""))
            await asyncio.to_thread(clear, self._where, keeper.hello.get("folders"), [keeper.hello.get("owner", "")])

    async def reap(self) -> int:
        return await asyncio.to_thread(reap)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        if self._keeper is not None:
            lost = self._keeper.lost.done()
            await self._keeper.close()
            if lost:
                await self._bury(self._keeper)


def cgroup_levels(ground: Ground) -> tuple[dict[str, Level], list[str]]:
    """How memory, pids and cpu are held for boxes that are planned with a group, and notes on what is weaker."""
    found: dict[str, Level] = dict.fromkeys(("memory", "pids", "cpu"), "kernel")
    notes = []
    why = f" ({ground.why})" if ground.why else ""
    if "memory" not in ground.controllers:
        found["memory"] = "watched"
        notes.append(
            f"Memory is watched, not limited: no cgroup can be had{why}. Run as root, or have a cgroup delegated to this user."
        )
    if "pids" not in ground.controllers:
        notes.append("Processes are limited by rlimits: a run that is refused one ends as nonzero, not as pids.")
    if "cpu" not in ground.controllers:
        found["cpu"] = "none"
        notes.append(f"CPU time is shared with all: no cpu cgroup can be had{why}.")
    return found, notes


def _closed_off(path: str) -> bool:
    """Whether others than its owner cannot get there.

    Raises:
        SandboxUnavailableError: there is no such path.
    """
    if not os.path.isabs(path) or not os.path.exists(path):
        raise SandboxUnavailableError(f"{path}: no such file or folder on this machine; give an absolute path")
    return not bundle.readable(path)


def _allow_files() -> None:
    """Lets this process have as many descriptors as a few hundred boxes need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
