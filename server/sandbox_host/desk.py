"""Lends boxes to clients elsewhere: who has which, what runs in them, what was answered.

In: specifications and agents' requests, with the numbers that make repeating them harmless. Out: leases and replies. A request that began
goes on though its client left; a client that is not heard of loses its boxes. Waits for the pool and for boxes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from palestra.sandbox.box import GRACE_S, AgentBox
from palestra.sandbox.channel import RUNS
from palestra.sandbox.inside.frames import FrameError, pack
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import (
    BoxLostError,
    BoxProtocolError,
    BoxSpec,
    SandboxBusyError,
    SandboxError,
    SandboxUnavailableError,
)
from palestra.server.sandbox_host.checks import check_spec, read_request
from palestra.server.sandbox_host.figures import HostFigures
from palestra.server.sandbox_host.types import HostRefusal, HostSettings, Lease, Reply

START_S = 30.0
"""Longest wait for the pool where there is room: it may have to make a box."""
CLOSE_S = 10.0
"""Longest wait at the end for requests whose boxes are gone."""
ORDER_S = 2.0
"""How long a request that was sent earlier may still be on its way."""
BOOKKEEPING = 512
"""What keeping an answer costs beside its bytes."""

log = logging.getLogger(__name__)


class BoxDesk:
    """The boxes of a host. Of one event loop."""

    def __init__(self, pool: Pool, settings: HostSettings) -> None:
        """The pool is started and closed by this desk; its backend is not."""
        self._pool, self.settings = pool, settings
        self.instance = secrets.token_hex(8)
        """Another one after each start: boxes of a former one are gone."""
        self.figures = HostFigures()
        self._leases: dict[str, Lease] = {}
        self._opening: dict[str, asyncio.Task[Lease]] = {}
        self._pending = 0
        self._answers: OrderedDict[tuple[str, int], tuple[Lease, int, float]] = OrderedDict()
        self._kept_bytes = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Has the pool make its first box.

        Raises:
            SandboxError: it cannot.
        """
        await self._pool.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="sandbox-leases")

    @property
    def room(self) -> int:
        """Boxes that could be given now; less than 0: so many requests wait."""
        return self.settings.boxes - len(self._leases) - self._pending

    async def open(self, key: str, spec: BoxSpec, wait_s: float) -> Lease:
        """A box for a client, within `wait_s` seconds where all are taken. A known key: the box that it got.

        Raises:
            HostRefusal: none now, or not one like this.
        """
        if (task := self._opening.get(key)) is None:
            spec = check_spec(spec, self._pool.spec, self.settings.share)
            self._admit(wait_s)
            patience = START_S if self.room > 0 else wait_s
            self._pending += 1
            task = self._opening[key] = asyncio.create_task(self._open(key, spec, patience))
        else:
            self.figures.events["repeated_total"] += 1
        return await asyncio.shield(task)

    def _admit(self, wait_s: float) -> None:
        if self._closing is not None:
            raise HostRefusal("this host is closing", 503, "closing", 5)
        if self.room <= 0 and wait_s <= 0:
            raise HostRefusal(f"all {self.settings.boxes} boxes are taken", 429, "full", 1)
        if -self.room >= self.settings.queue:
            self.figures.events["queue_full_total"] += 1
            said = f"all {self.settings.boxes} boxes are taken, and {-self.room} requests wait"
            raise HostRefusal(f"{said}; add a host, or raise sandbox.boxes or host.queue", 429, "queue_full", 5)

    async def _open(self, key: str, spec: BoxSpec, patience_s: float) -> Lease:
        given = False
        try:
            box = await self._pool.acquire(spec, timeout=patience_s)
            if not isinstance(box, AgentBox):
                await self._pool.release(box)
                raise HostRefusal("this backend's boxes cannot be lent", 500, "internal")
        except SandboxBusyError as error:
            self.figures.events["busy_total"] += 1
            raise HostRefusal(str(error), 503, "busy", 1) from error
        except SandboxUnavailableError as error:
            raise HostRefusal(str(error), 422, "spec") from error
        except SandboxError as error:
            self.figures.events["infra_errors_total"] += 1
            raise HostRefusal(f"no box could be made: {error}", 500, "internal") from error
        else:
            now = asyncio.get_running_loop().time()
            lease = Lease(secrets.token_hex(8), box, key, heard=now, since=now)
            self._leases[lease.id] = lease
            self.figures.events["boxes_given_total"] += 1
            given = True
            return lease
        finally:
            self._pending -= 1
            if not given:
                del self._opening[key]

    async def call(self, name: str, number: int | None, body: bytes, timeout_s: float) -> Reply | str:
        """What came of a request to a box's agent; `running` or `waiting` where it is not over after `poll_s` seconds. A known number: what
        came of the first request that had it.

        Raises:
            HostRefusal: there is no such box, the request is none, or its answer is kept no more.
        """
        lease = self._lease(name)
        task = None
        if number is not None:
            if (kept := lease.kept.get(number)) is not None:
                self.figures.events["repeated_total"] += 1
                return kept
            task = lease.running.get(number)
        if task is None:
            if number is not None and (number <= lease.forgotten or not body):
                raise HostRefusal(f"the answer to request {number} is kept no more", 409, "forgotten")
            request = read_request(body)
            if number is None:
                lease.unnumbered -= 1
                number = lease.unnumbered
            task = asyncio.create_task(self._work(lease, number, request, timeout_s))
            lease.running[number] = task
            if number > 0:
                lease.come(number)  # behind the task, so that it starts before those that wait for it
        done, _ = await asyncio.wait((task,), timeout=self.settings.poll_s)
        if done:
            return task.result()
        return "waiting" if number in lease.runs[1:] else "running"

    async def _work(self, lease: Lease, number: int, request: dict[str, Any], timeout_s: float) -> Reply:
        runs = request["op"] in RUNS
        if runs:
            lease.runs.append(number)
            timeout_s = request["timeout"] + GRACE_S
        began = asyncio.get_running_loop().time()
        answer: dict[str, Any] = {}
        try:
            if request["op"] == "interrupt":
                # A short request can overtake a long one on its way; Ctrl-C is for the cell that was sent before it.
                await lease.in_order(number, ORDER_S)
            answer = await lease.box.forward(request, timeout_s)
            answer.pop("id", None)
            reply = Reply(pack(answer))
        except (TimeoutError, BoxLostError, BoxProtocolError) as error:
            await self._pool.release(lease.box)
            answer, reply = self._of_lost(lease, runs, error)
        except FrameError as error:
            reply = Reply(str(error).encode(), "refused")
        finally:
            del lease.running[number]
            if runs:
                lease.runs.remove(number)
        if runs and answer:
            self.figures.ran(answer, asyncio.get_running_loop().time() - began)
        self._keep(lease, number, reply)
        return reply

    def _of_lost(self, lease: Lease, runs: bool, error: Exception) -> tuple[dict[str, Any], Reply]:
        """What a client is told of a box that did not survive a request: of a run, what the code did, if it was the code."""
        self.figures.events["lost_total"] += 1
        counts = lease.box.counts()
        late = "the box did not answer after the deadline and was destroyed"
        answer: dict[str, Any] = {}
        if runs and isinstance(error, TimeoutError):
            answer = _ended("timeout", late)
        elif runs and isinstance(error, BoxProtocolError):
            answer = _ended("lost", str(error))
        elif runs and counts.oom_kills:
            answer = _ended("", "the box ran out of memory, its agent too")
            answer.update(oom=counts.oom_kills, peak=counts.peak_bytes)
        if answer:
            return answer, Reply(pack(answer), lost=True)
        self.figures.events["infra_errors_total"] += 1
        code = "protocol" if isinstance(error, BoxProtocolError) else "box_lost"
        return answer, Reply((late if isinstance(error, TimeoutError) else str(error)).encode(), code, lost=True)

    def _keep(self, lease: Lease, number: int, reply: Reply) -> None:
        if number < 0 or lease.id not in self._leases:
            return
        now, size = asyncio.get_running_loop().time(), len(reply.body) + BOOKKEEPING
        lease.kept[number] = reply
        self._answers[lease.id, number] = (lease, size, now)
        self._kept_bytes += size
        while self._answers:
            key, (owner, size, at) = next(iter(self._answers.items()))
            if self._kept_bytes <= self.settings.keep_bytes and at > now - self.settings.keep_s:
                break
            self._forget(owner, key[1])
            owner.forgotten = max(owner.forgotten, key[1])

    def _forget(self, lease: Lease, number: int) -> None:
        self._kept_bytes -= self._answers.pop((lease.id, number))[1]
        del lease.kept[number]

    def _lease(self, name: str) -> Lease:
        if (lease := self._leases.get(name)) is None:
            raise HostRefusal(f"there is no box {name} here (any more)", 404, "no_box")
        lease.heard = asyncio.get_running_loop().time()
        return lease

    def alive(self, names: Iterable[str]) -> list[str]:
        """A client wants these boxes; which of them are not here."""
        now, gone = asyncio.get_running_loop().time(), []
        for name in names:
            if (lease := self._leases.get(name)) is None or not lease.box.alive:
                gone.append(name)
            else:
                lease.heard = now
        return gone

    def leases(self) -> list[dict[str, Any]]:
        """All leases, for people."""
        now = asyncio.get_running_loop().time()
        return [
            {
                "box": lease.id, "local": lease.box.id, "alive": lease.box.alive, "age_s": round(now - lease.since, 1),
                "silent_s": round(now - lease.heard, 1), "running": len(lease.running),
                "memory_bytes": lease.box.spec.limits.memory_bytes,
            }
            for lease in self._leases.values()
        ]  # fmt: skip

    def metrics(self) -> str:
        """For Prometheus."""
        gauges = {
            "capacity": self.settings.boxes, "leased": len(self._leases), "opening": self._pending,
            "waiting": max(-self.room, 0), "kept_bytes": self._kept_bytes,
        }  # fmt: skip
        return self.figures.text(gauges, self._pool.figures())

    async def end(self, name: str) -> None:
        """Destroys a box; returns when its processes are gone.

        Raises:
            HostRefusal: there is no such box.
        """
        lease = self._lease(name)
        del self._leases[name]
        self._opening.pop(lease.key, None)
        for number in list(lease.kept):
            self._forget(lease, number)
        await self._pool.release(lease.box)

    async def _sweep(self) -> None:
        """For ever: destroys the boxes of clients that are not heard of."""
        lease_s = self.settings.lease_s
        while True:
            await asyncio.sleep(lease_s / 4)
            before = asyncio.get_running_loop().time() - lease_s
            late = [lease for lease in self._leases.values() if lease.heard < before]
            for lease in late:
                log.warning("box %s: its client was not heard of for %.0f s; it is destroyed", lease.id, lease_s)
                self.figures.events["expired_total"] += 1
            ends = await asyncio.gather(*(self.end(lease.id) for lease in late), return_exceptions=True)
            for lease, error in zip(late, ends, strict=True):
                if error is not None:
                    log.error("box %s could not be destroyed: %s", lease.id, error)

    async def close(self) -> None:
        """Destroys all boxes. Requests that run are answered; further ones are refused. Safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._pool.close()
        if working := [task for lease in self._leases.values() for task in lease.running.values()]:
            await asyncio.wait(working, timeout=CLOSE_S)


def _ended(why: str, message: str) -> dict[str, Any]:
    """An agent's result, of a run that the agent could not tell of."""
    return {
        "why": why, "exit": -9, "stdout": b"", "stderr": b"", "total": 0, "truncated": False, "wall_s": 0.0, "cpu_s": 0.0,
        "message": message,
    }  # fmt: skip
