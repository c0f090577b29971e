"""Boxes as containers of a docker engine, each with the agent as its first process.

In: specs, an engine's address. Out: boxes. A box's requests go over its attached stream on this loop; the SDK's blocking calls (a box's
making and removal) go through a few threads. Waits for the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from palestra.sandbox import bundle, container_config
from palestra.sandbox.box import AgentBox
from palestra.sandbox.container_attach import AttachedChannel
from palestra.sandbox.container_counts import ContainerCounts
from palestra.sandbox.container_engine import Engine
from palestra.sandbox.container_labels import EXPIRES, OWNER, owner
from palestra.sandbox.seccomp import docker_profile
from palestra.sandbox.types import BackendName, BoxLostError, BoxSpec, Enforced, SandboxError, SandboxUnavailableError

logger = logging.getLogger(__name__)

DEFAULT_IMAGE = "palestra-sandbox:1"
START_S = 60.0
"""Most seconds for an agent to answer for the first time, with its modules preloaded."""

P = ParamSpec("P")
T = TypeVar("T")


class Docker:
    """`types.Backend` on a docker engine, local or remote."""

    name: BackendName = "docker"

    def __init__(
        self,
        base_url: str | None = None,
        *,
        image: str = DEFAULT_IMAGE,
        pull: bool = False,
        python: str = "python3",
        runtime: str | None = None,
        creates: int = 6,
        lifetime_s: float = 86400.0,
        timeout_s: float = 60.0,
    ) -> None:
        """`base_url`: unix:///path or tcp://host:port; None: DOCKER_HOST and its TLS variables, else the local socket. `pull`: missing
        images are pulled. `python`: the interpreter in images. `runtime`: the engine's OCI runtime, such as runsc. `creates`: boxes that
        are made at a time; more do not make an engine faster. `lifetime_s`: seconds after which a box is ended; another machine's reaper
        knows by them that nobody will come back for it. `timeout_s`: most seconds for one answer of the engine."""
        self._base_url, self._image, self._pull, self._python = base_url, image, pull, python
        self._runtime, self._creates, self._lifetime_s, self._timeout_s = runtime, creates, lifetime_s, timeout_s
        self._threads = ThreadPoolExecutor(2 * creates, thread_name_prefix="palestra-docker")
        self._turn = asyncio.Semaphore(creates)
        self._engine: Engine | None = None
        self._enforced: Enforced | None = None
        self._images: set[str] = set()
        self._boxes: set[AgentBox] = set()
        self._making: set[asyncio.Task[AgentBox]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._prefix = f"palestra-{os.getpid()}-{secrets.token_hex(4)}"
        self._closed = False

    async def start(self) -> None:
        connections = 2 * self._creates

        def connect() -> Engine:
            return Engine.connect(self._base_url, connections=connections, timeout_s=self._timeout_s)

        self._engine = await self._call(connect)
        box = await self.create(BoxSpec())
        try:
            seen = await box.exec(["cat", "/proc/self/status"])
        finally:
            await box.close()
        if seen.status != "ok":
            raise SandboxUnavailableError(
                f"a box of image {self._image} cannot run `cat`: {seen.status} {seen.message} {seen.text[:200]}"
            )
        self._enforced = container_config.enforced(self._engine.info, filtered=b"Seccomp:\t2" in seen.stdout)

    def enforced(self) -> Enforced:
        if self._enforced is None:
            raise SandboxError("the docker backend was not started")
        return self._enforced

    async def create(self, spec: BoxSpec) -> AgentBox:
        if self._closed or self._engine is None:
            raise SandboxError(f"the docker backend {'is closed' if self._closed else 'was not started'}")
        # The engine finishes what it began: a caller that goes away leaves a box that is then destroyed.
        task = asyncio.create_task(self._make(self._engine, spec))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._made)
            raise

    async def _make(self, engine: Engine, spec: BoxSpec) -> AgentBox:
        image = spec.image or self._image
        name = f"{self._prefix}-{next(self._numbers)}"
        async with self._turn:
            await self._ensure(engine, image)
            body = container_config.body(
                spec,
                image=image,
                python=self._python,
                labels={OWNER: owner(), EXPIRES: str(int(time.time() + self._lifetime_s))},
                seccomp=docker_profile() if engine.filters else None,
                runtime=self._runtime,
            )
            container = await self._call(engine.create, name, body)
            channel: AttachedChannel | None = None
            try:
                channel = await engine.endpoint.connect(lambda: AttachedChannel(container, engine.version))
                await channel.opened(self._timeout_s)
                pid = await self._call(engine.start, container)
                return await self._introduce(engine, spec, name, container, channel, pid)
            except BaseException:
                if channel is not None:
                    await channel.close()
                await asyncio.shield(self._call(engine.remove, container))
                raise

    async def _ensure(self, engine: Engine, image: str) -> None:
        if image not in self._images:
            await self._call(lambda: engine.check_image(image, pull=self._pull))
            self._images.add(image)

    async def _introduce(
        self, engine: Engine, spec: BoxSpec, name: str, container: str, channel: AttachedChannel, pid: int
    ) -> AgentBox:
        """Sends the agent its modules and tells it what the box is like."""
        counts = ContainerCounts.of(container, pid)
        if counts is not None:
            channel.witness(counts)

        async def destroy() -> None:
            self._boxes.discard(box)
            expiry.cancel()
            if counts is not None:
                counts.close()
            await self._call(engine.remove, container)

        box = AgentBox(name, spec, channel, self, destroy)
        expiry = asyncio.get_running_loop().call_later(self._lifetime_s, self._end, box)
        self._boxes.add(box)
        channel.write(bundle.sources())
        try:
            await box.introduce(container_config.setup(spec, counts_itself=counts is None), START_S)
        except BaseException as error:
            await asyncio.shield(box.close())
            if not isinstance(error, BoxLostError):
                raise
            said = f": {channel.stderr[-1000:]}" if channel.stderr else ""
            raise SandboxUnavailableError(
                f"the agent did not start in image {spec.image or self._image} ({error}{said}); it needs Python 3.9 or newer there"
            ) from error
        return box

    async def reap(self) -> int:
        """Removes boxes whose owner, a process of this machine, is dead; and those of owners that cannot be seen from here (another
        machine, another process namespace) when `lifetime_s` of them is over: by then their owner has ended them if it lives."""
        if self._engine is None:
            raise SandboxError("the docker backend was not started")
        return await self._call(self._engine.reap)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._making, return_exceptions=True)
        closed = await asyncio.gather(
            *(box.close() for box in list(self._boxes)), *self._ending, return_exceptions=True
        )
        engine, self._engine = self._engine, None
        if engine is not None:
            await self._call(engine.close)
        self._threads.shutdown(wait=False)
        for error in closed:
            if isinstance(error, BaseException):
                raise error

    def _made(self, task: asyncio.Task[AgentBox]) -> None:
        """Of a task that nobody waits for any more."""
        if not task.cancelled() and task.exception() is None:
            self._end(task.result())

    def _end(self, box: AgentBox) -> None:
        """Destroys a box in the background."""
        task = asyncio.ensure_future(box.close())
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a box was not removed (`palestra sandbox reap` will, when this process is gone): %s", error)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
