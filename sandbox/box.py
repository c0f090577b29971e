"""A box on whatever channel: requests of the interface to the agent's, replies to results.

In: a channel with an agent behind it, and how to destroy what it stands in. Out: `Box`. One run at a time; a run's deadline starts when it
runs. Waits for the agent, a little longer than for the code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from palestra.sandbox.channel import RUNS, Channel, Counts, StreamChannel
from palestra.sandbox.session import AgentSession
from palestra.sandbox.tree import pack_tree, unpack_tree
from palestra.sandbox.types import (
    MAX_OUTPUT_BYTES,
    MIB,
    Backend,
    Box,
    BoxFileError,
    BoxLostError,
    BoxProtocolError,
    BoxSpec,
    Entry,
    ExecResult,
    SandboxUnavailableError,
    SessionKind,
    Snapshot,
    Status,
    Usage,
)

GRACE_S = 10.0
"""How much longer than a run's own deadline its answer is waited for: ending processes and collecting them takes time on a busy host."""
FILE_S = 30.0
"""Most seconds for one piece of a file."""
PIECE = 1 << 20
"""Bytes of a file in one frame."""


class AgentBox:
    """`types.Box` over a channel."""

    def __init__(
        self, name: str, spec: BoxSpec, channel: Channel, backend: Backend, destroy: Callable[[], Awaitable[None]]
    ) -> None:
        """`destroy` ends the box's processes and returns when they are gone; it is called once."""
        self.id, self.spec = name, spec
        self._channel, self._backend, self._destroy = channel, backend, destroy
        self._turn = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._closing is None and self._channel.alive

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 30.0,
        max_output: int | None = None,
    ) -> ExecResult:
        argv = command if isinstance(command, str) else [str(part) for part in command]
        if not argv:
            raise ValueError("an empty command")
        request = {"op": "exec", "argv": argv, "stdin": stdin, "env": dict(env or {}), "cwd": cwd}
        return await self.run(request, timeout, max_output)

    async def run_python(
        self,
        code: str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        timeout: float = 30.0,
        max_output: int | None = None,
    ) -> ExecResult:
        return await self.run({"op": "python", "code": code, "stdin": stdin, "cwd": cwd}, timeout, max_output)

    async def run(
        self,
        request: dict[str, Any],
        timeout: float,
        max_output: int | None,
        heard: Callable[[dict[str, Any]], None] | None = None,
    ) -> ExecResult:
        """Sends a run, waits for its turn and its end; never raises for what happens to the box. `heard` gets the agent's own answer."""
        keep = self.spec.limits.output_bytes if max_output is None else max_output
        if not 0 <= keep <= MAX_OUTPUT_BYTES:
            raise ValueError(f"max_output is {keep}; it must be between 0 and {MAX_OUTPUT_BYTES}")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be positive")
        bounds = {"timeout": float(timeout), "keep": keep, "most": max(keep, self.spec.limits.total_output_bytes)}
        async with self._turn:
            try:
                reply = await self._channel.call({**request, **bounds}, timeout + GRACE_S)
                if heard is not None:
                    heard(reply)
                return read_result(reply)
            except asyncio.CancelledError:
                # Nobody waits any more for what runs in there, and the next run must not meet it.
                self._closing = self._closing or asyncio.create_task(self._close())
                raise
            except TimeoutError:
                # Code that keeps even the agent from its turn: the box cannot be used any more, and the time is up.
                await self.close()
                return ExecResult("timeout", message="the box did not answer after the deadline and was destroyed")
            except BoxProtocolError as error:
                await self.close()
                return ExecResult("session_lost", message=str(error))
            except BoxLostError as error:
                return self._lost(error)
            except ValueError as error:
                return ExecResult("nonzero", message=f"not run: {error}")

    async def forward(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """A request of somebody elsewhere, as it stands, to the agent: its own answer. Runs wait for their turn; `timeout` begins then.

        Raises:
            TimeoutError: no answer in time; nobody can tell what the box does.
            BoxLostError: the box is gone.
            BoxProtocolError: its agent talks nonsense.
        """
        if request.get("op") not in RUNS:
            return await self._channel.call(request, timeout)
        async with self._turn:
            return await self._channel.call(request, timeout)

    def counts(self) -> Counts:
        """What the box's cgroup counted since its last run began; for one that was never answered."""
        return self._channel.last_counts() if isinstance(self._channel, StreamChannel) else Counts()

    def _lost(self, error: BoxLostError) -> ExecResult:
        counts = self.counts()
        if counts.oom_kills:
            usage = Usage(oom_kills=counts.oom_kills, peak_bytes=counts.peak_bytes)
            return ExecResult("oom", message="the box ran out of memory, its agent too", usage=usage)
        return ExecResult("infra_error", message=str(error))

    async def open_session(self, kind: SessionKind) -> AgentSession:
        if kind not in ("python", "bash"):
            raise ValueError(f"a session of kind {kind!r}; known: python, bash")
        reply = await self.ask({"op": "open", "kind": kind}, GRACE_S)
        with understood():
            return AgentSession(self, kind, int(reply["session"]))

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        for offset in range(0, max(len(data), 1), PIECE):
            piece = bytes(data[offset : offset + PIECE])
            await self.ask({"op": "write", "path": path, "offset": offset, "data": piece, "mode": mode}, FILE_S)

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        found = bytearray()
        while True:
            reply = await self.ask({"op": "read", "path": path, "offset": len(found), "size": PIECE}, FILE_S)
            with understood():
                size, data = int(reply["size"]), _bytes(reply["data"])
            if size > max_bytes:
                raise BoxFileError(f"{path}: {size} bytes; at most {max_bytes} were asked for")
            found += data
            if not data or len(found) >= size:
                return bytes(found[:max_bytes])

    async def list(self, path: str = ".") -> list[Entry]:
        reply = await self.ask({"op": "list", "path": path}, FILE_S)
        with understood():
            rows = zip(reply["names"], reply["kinds"], reply["sizes"], reply["modes"], reply["targets"], strict=True)
            return [_entry(*row) for row in rows]

    async def export(self, path: str = ".", *, max_bytes: int = 64 * MIB) -> bytes:
        return await pack_tree(self, [path], max_bytes)

    async def snapshot(self) -> Snapshot:
        return Snapshot(await pack_tree(self, ["/workspace", "/tmp"], 2 * self.spec.limits.disk_bytes))

    async def restore(self, snapshot: Snapshot) -> None:
        await unpack_tree(self, snapshot.archive)

    async def fork(self) -> Box:
        snapshot = await self.snapshot()
        other = await self._backend.create(self.spec)
        try:
            await other.restore(snapshot)
        except BaseException:
            await other.close()
            raise
        return other

    async def kill_processes(self) -> None:
        await self.ask({"op": "clean"}, GRACE_S)

    async def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """A request that runs no code.

        Raises:
            BoxFileError: the agent could not do it; its text says why.
            BoxLostError: the box is gone, or its agent does not answer.
        """
        try:
            reply = await self._channel.call(request, timeout)
        except TimeoutError:
            await self.close()
            raise BoxLostError(f"the box did not answer within {timeout:g} s and was destroyed") from None
        if error := reply.get("error"):
            raise BoxFileError(f"{request.get('path') or request['op']}: {str(error)[:500]}")
        return reply

    async def introduce(self, request: dict[str, Any], timeout: float) -> None:
        """The agent's first request: what the box is like.

        Raises:
            SandboxUnavailableError: modules that were to be preloaded are not there.
            BoxLostError, BoxFileError: as of `ask`.
        """
        reply = await self.ask(request, timeout)
        if reply["missing"]:
            raise SandboxUnavailableError(f"cannot preload: {'; '.join(map(str, reply['missing']))}")

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._channel.close()
        await self._destroy()


def read_result(reply: dict[str, Any]) -> ExecResult:
    """The result in an agent's answer.

    Raises:
        ValueError: the agent refused the run, with its text.
        BoxProtocolError: no answer of ours.
    """
    if "error" in reply:
        raise ValueError(str(reply["error"])[:500])
    with understood():
        code, why = int(reply["exit"]), str(reply["why"])
        usage = Usage(
            float(reply["wall_s"]),
            float(reply["cpu_s"]),
            _number(reply.get("peak")),
            int(reply.get("oom") or 0),
            int(reply.get("pids") or 0),
        )
        status = _status(code, why, usage)
        return ExecResult(
            status,
            exit_code=code if code >= 0 and why in ("", "lost") else None,
            signal=-code if code < 0 else None,
            stdout=_bytes(reply["stdout"]),
            stderr=_bytes(reply["stderr"]),
            truncated=bool(reply["truncated"]),
            bytes_total=int(reply["total"]),
            usage=usage,
            message=str(reply.get("message", ""))[:500] or MESSAGES.get(status, ""),
        )


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """What an agent says may be anything: a part that is missing or of another kind is a fault of the box's.

    Raises:
        BoxProtocolError: it was not what an agent of ours would say.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise BoxProtocolError(f"the box's agent sent half an answer: {error!r}") from None


def _entry(name: str, kind: Any, size: int, mode: int, target: str) -> Entry:
    # A name that leads elsewhere would do so again where an archive of it is unpacked.
    if "/" in name or name in ("", ".", "..") or kind not in ("file", "folder", "link", "other"):
        raise ValueError(f"an entry called {name[:80]!r} of kind {kind!r}")
    return Entry(name, kind, int(size), int(mode), str(target))


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _bytes(value: Any) -> bytes:
    # Not bytes(value): of a number it would make as many zeros.
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} instead of bytes")
    return value


MESSAGES: dict[Status, str] = {
    "timeout": "stopped at its deadline",
    "oom": "killed by the kernel for memory",
    "pids": "ended after more processes than are allowed were refused to it",
    "output_limit": "killed for writing too much",
    "session_lost": "the session ended; open another",
}


def _status(code: int, why: str, usage: Usage) -> Status:
    """What counts: why it was stopped, else what the kernel did to it, else how it ended."""
    stopped: dict[str, Status] = {"timeout": "timeout", "output": "output_limit", "lost": "session_lost"}
    if why in stopped:
        return stopped[why]
    if usage.oom_kills and code in (-9, 137):
        return "oom"
    if code and usage.refused_pids:
        return "pids"
    return "nonzero" if code else "ok"
