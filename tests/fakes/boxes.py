"""A backend whose boxes are made of memory: for what is about boxes, not about what runs in them.

Files are real (a dict); what runs is answered by `Boxes.answer`. Making and ending boxes takes turns of the event loop, or waits until a
test lets it, and can be made to fail.
"""

from __future__ import annotations

import asyncio
import itertools
import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence

from palestra.sandbox.types import (
    MIB,
    PROMISES,
    BackendName,
    Box,
    BoxFileError,
    BoxLostError,
    BoxSpec,
    Enforced,
    Entry,
    ExecResult,
    Session,
    SessionKind,
    Snapshot,
)

Answer = Callable[["MemoryBox", object, bytes], Awaitable[ExecResult]]


class MemoryBox:
    """`types.Box` without processes."""

    def __init__(self, backend: Boxes, number: int, spec: BoxSpec) -> None:
        self.id, self.spec = f"memory-{number}", spec
        self.files: dict[str, bytes] = {}
        self.odd: dict[str, str] = {}
        """Kinds of what is no file, by path: link, other."""
        self.log: list[str] = []
        self._backend, self._lost, self._closed = backend, False, False

    @property
    def alive(self) -> bool:
        return not (self._lost or self._closed)

    def lose(self) -> None:
        """The box is gone, by no doing of its user."""
        self._lost = True

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 30.0,  # noqa: ASYNC109 - the interface
        max_output: int | None = None,
    ) -> ExecResult:
        return await self._run(command, stdin)

    async def run_python(
        self,
        code: str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        timeout: float = 30.0,  # noqa: ASYNC109 - the interface
        max_output: int | None = None,
    ) -> ExecResult:
        return await self._run(code, stdin)

    async def _run(self, what: object, stdin: bytes) -> ExecResult:
        self.log.append("run")
        await asyncio.sleep(0)
        if not self.alive:
            return ExecResult("infra_error", message="the box went away")
        return await self._backend.answer(self, what, stdin)

    async def open_session(self, kind: SessionKind) -> Session:
        raise BoxFileError("no sessions in memory")

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._check()
        self.log.append(f"put {path}")
        self.files[posixpath.normpath(path)] = data

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        self._check()
        self.log.append(f"get {path}")
        if path not in self.files:
            raise BoxFileError(f"{path}: no such file")
        return self.files[path]

    async def list(self, path: str = ".") -> list[Entry]:
        self._check()
        folder = "" if path == "." else path + "/"
        found: dict[str, Entry] = {}
        for name, kind in (*((each, "file") for each in self.files), *self.odd.items()):
            if name.startswith(folder):
                head, _, rest = name[len(folder) :].partition("/")
                if rest:
                    found.setdefault(head, Entry(head, "folder", 0))
                elif kind == "file":
                    found[head] = Entry(head, "file", len(self.files[name]))
                else:
                    found[head] = Entry(head, "link" if kind == "link" else "other", 0)
        return [found[name] for name in sorted(found)]

    async def export(self, path: str = ".", *, max_bytes: int = 64 * MIB) -> bytes:
        raise BoxFileError("no archives of memory")

    async def snapshot(self) -> Snapshot:
        raise BoxFileError("no archives of memory")

    async def restore(self, snapshot: Snapshot) -> None:
        raise BoxFileError("no archives of memory")

    async def fork(self) -> Box:
        other = await self._backend.create(self.spec)
        other.files.update(self.files)
        return other

    async def kill_processes(self) -> None:
        self._check()
        self.log.append("kill")

    def _check(self) -> None:
        if not self.alive:
            raise BoxLostError("the box went away")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._backend.ending(self)
        self._backend.living.discard(self)


class Boxes:
    """`types.Backend` of memory boxes."""

    name: BackendName = "unsafe_subprocess"

    def __init__(self) -> None:
        self.living: set[MemoryBox] = set()
        self.made: list[MemoryBox] = []
        self.most = 0
        """Most boxes that lived at a time."""
        self.most_bytes = 0
        """Most memory that living boxes were promised at a time."""
        self.refusals: list[Exception] = []
        """What the next calls of `create` raise, first first."""
        self.stuck: list[Exception] = []
        """What the next calls of `close` raise."""
        self.gate: asyncio.Event | None = None
        """`create` waits for it."""
        self.turns = 1
        """Turns of the event loop that making and ending take."""
        self._numbers = itertools.count(1)

    async def answer(self, box: MemoryBox, what: object, stdin: bytes) -> ExecResult:
        """What comes of a run; tests put their own in its place."""
        return ExecResult("ok", exit_code=0)

    async def start(self) -> None:
        return

    def enforced(self) -> Enforced:
        return Enforced(**dict.fromkeys(PROMISES, "none"))  # type: ignore[arg-type]

    async def create(self, spec: BoxSpec) -> MemoryBox:
        if self.gate is not None:
            await self.gate.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        box = MemoryBox(self, next(self._numbers), spec)
        self.living.add(box)
        self.made.append(box)
        self.most = max(self.most, len(self.living))
        self.most_bytes = max(self.most_bytes, sum(each.spec.limits.memory_bytes for each in self.living))
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return box

    async def ending(self, box: MemoryBox) -> None:
        """The time it takes to end a box, or what goes wrong at it."""
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.stuck:
            raise self.stuck.pop(0)

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        for box in list(self.living):
            await box.close()
