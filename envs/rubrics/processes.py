"""Graders that may hang, in processes that are killed at their deadline.

A thread that computes cannot be stopped; symbolic maths and regexes on a model's text can go on for ever. `killable(function)` runs such
a function in a worker process and waits for it, at most `timeout_s` seconds once a worker is free and has imported the function's module.
Workers are shared by all graders of this process, start when they are needed, and end with it, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from palestra.envs import background
from palestra.envs.rubrics.types import Score, Scoring
from palestra.envs.rubrics.worker import FrameError, receive_frame, send_frame

P = ParamSpec("P")
R = TypeVar("R")

MAX_CHARACTERS = 20_000
"""Of a text that a grader is given, unless told otherwise."""
MAX_WORKERS = max(1, min(4, os.cpu_count() or 1))
"""Processes at a time: calls beyond it wait for one."""
START_S = 60.0
"""Seconds that a worker has to start and to import a grader's module, and that a call waits for a free one."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a worker."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Of a worker, beside that of this process. One thread, since many workers share a machine; one order of sets, so that equal calls have
equal results in every worker."""
_PROGRAM = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """A worker could not be had, or was lost: a fault of ours. Says which."""


class Worker:
    """One process. Used by one caller at a time."""

    def __init__(self) -> None:
        """Starts it. The calling thread has to live as long as this process: the kernel ends the worker when it is gone."""
        self.ready: set[tuple[str, str]] = set()
        """The functions that it has imported."""
        self._sock, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(MEMORY_BYTES)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **ENVIRONMENT},
                process_group=0,  # Ctrl-C in a terminal goes to the group
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that is idle can be ended by somebody else, such as the kernel for want of memory."""
        return self._process.poll() is None

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        """Its answer.

        Raises:
            TimeoutError: none came in `timeout_s` seconds. WorkerError: it ended. ValueError: the call failed; its text.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, request)
            kind, value = receive_frame(self._sock, deadline)
        except (FrameError, ConnectionError, EOFError) as error:
            self.close()
            raise WorkerError(f"the grader's process ended by itself (exit code {self._process.returncode})") from error
        if kind == "lost":
            self.close()
            raise WorkerError(value)
        if kind == "error":
            raise ValueError(value)
        return value

    def close(self) -> None:
        """Kills it and waits for that."""
        self._sock.close()
        self._process.kill()
        self._process.wait(5.0)

    def disown(self) -> None:
        """Forgets it in a forked child, whose parent goes on using it."""
        self._sock.close()
        self._process.returncode = 0  # or its finalizer would warn of a process that is not ours


class Workers:
    """The workers of this process."""

    def __init__(self, limit: int = MAX_WORKERS) -> None:
        self._limit = limit
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._starting = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lent(self, function: tuple[str, str], warm: str = "") -> Iterator[Worker]:
        """A worker that has imported `function` and called `warm` of its module. One that is late, or whose user fails, is killed.

        Raises:
            WorkerError: none could be had.
        """
        worker = self._take(function)
        try:
            if function not in worker.ready:
                self._load(worker, function, warm)
            yield worker
        except ValueError:  # the call failed, the process goes on
            self._back(worker)
            raise
        except BaseException:
            self._drop(worker)
            raise
        self._back(worker)

    def pids(self) -> list[int]:
        """The processes there are."""
        with self._changed:
            return sorted(worker.pid for worker in self._all)

    def close(self) -> None:
        """Kills all of them."""
        with self._changed:
            gone = list(self._all)
            self._all.clear()
            self._idle.clear()
            self._changed.notify_all()
        for worker in gone:
            worker.close()

    def disown(self) -> None:
        """Forgets all of them, in a forked child; takes no lock, since its holder may not be there any more."""
        for worker in self._all:
            worker.disown()

    def _take(self, function: tuple[str, str]) -> Worker:
        with self._changed:
            for worker in [worker for worker in self._idle if not worker.alive]:
                self._idle.remove(worker)
                self._drop(worker)
            if not self._changed.wait_for(lambda: self._idle or self._room(), START_S):
                raise WorkerError(f"none of {self._limit} grader processes came free in {START_S:g} s")
            if self._idle:
                worker = next((one for one in self._idle if function in one.ready), self._idle[0])
                self._idle.remove(worker)
                return worker
            self._starting += 1
        started: Worker | None = None
        try:
            # On the loop's thread, which lives as long as this process: that of an episode ends, and the kernel would end its workers.
            started = background.call(_started(), START_S)
            started.ask(("path", [str(Path.cwd()) if entry == "" else entry for entry in sys.path]), START_S)
        except Exception as error:
            if started is not None:
                started.close()
            raise WorkerError(f"a grader process could not be started: {type(error).__name__}: {error}") from error
        finally:
            with self._changed:
                self._starting -= 1
                if started is not None:
                    self._all.add(started)
                self._changed.notify_all()
        return started

    def _load(self, worker: Worker, function: tuple[str, str], warm: str) -> None:
        try:
            worker.ask(("load", *function, warm), START_S)
        except TimeoutError as error:
            raise WorkerError(f"{function[0]} could not be imported in {START_S:g} s") from error
        worker.ready.add(function)

    def _room(self) -> bool:
        return len(self._all) + self._starting < self._limit

    def _back(self, worker: Worker) -> None:
        with self._changed:
            if worker in self._all:
                self._idle.append(worker)
            self._changed.notify_all()

    def _drop(self, worker: Worker) -> None:
        worker.close()
        with self._changed:
            self._all.discard(worker)
            self._changed.notify_all()


class Killable(Generic[P, R]):
    """A function that runs in a worker process; what `killable` makes."""

    def __init__(self, function: Callable[P, R], timeout_s: float, max_characters: int, warm: str) -> None:
        self.warm = warm
        self.function, self.timeout_s, self.max_characters = function, timeout_s, max_characters
        functools.update_wrapper(self, function)
        self._name = (function.__module__, function.__qualname__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | Score:
        """What the function gives. A `Score` of 0 where a text is over the cap, one without a value where it failed or was killed."""
        longest = max((_characters(value) for value in (*args, *kwargs.values())), default=0)
        if longest > self.max_characters:
            return Score(0.0, f"a text of {longest} characters is over the cap of {self.max_characters}")
        try:
            arguments = pickle.dumps((args, dict(kwargs)))
            with _workers.lent(self._name, self.warm) as worker:
                result: R = worker.ask(("run", *self._name, arguments), self.timeout_s)
                return result
        except TimeoutError:
            return Score(None, error=f"{self._name[1]} was killed after {self.timeout_s:g} s")
        except WorkerError as error:
            return Score(None, error=f"{self._name[1]}: {error}")
        except Exception as error:  # noqa: BLE001 - it failed in the worker, or cannot be sent there: a fault of the grader
            return Score(None, error=f"{self._name[1]}: {error}")


def killable(
    function: Callable[P, R],
    *,
    timeout_s: float = 10.0,
    max_characters: int = MAX_CHARACTERS,
    warm: Callable[[], None] | None = None,
) -> Killable[P, R]:
    """Makes a grader that is killed at its deadline. Its arguments and its result are pickled; it blocks its caller until then.

    `timeout_s`: seconds of one call. `max_characters`: of a text among the arguments, or of the answer in a `Scoring`; a longer one scores
    0 before anything starts, since its length is the policy's doing. `warm`: a function of the same module that each worker calls once
    before it has a deadline, for what is slow the first time.

    Raises:
        ValueError: a fresh interpreter could not import the function: it is nested, a lambda, or of the program that was started.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ValueError(f"{name} cannot be imported by another process: put it at the top of a module of its own")
    if timeout_s <= 0 or max_characters < 1:
        raise ValueError(f"{name}: timeout_s and max_characters must be above 0, got {timeout_s} and {max_characters}")
    if warm is not None and (warm.__module__ != function.__module__ or "<" in warm.__qualname__):
        raise ValueError(f"{name}: what warms it stands at the top of the same module")
    return Killable(function, timeout_s, max_characters, "" if warm is None else warm.__qualname__)


def _characters(value: Any) -> int:
    if isinstance(value, Scoring):
        return len(value.answer)
    if isinstance(value, Mapping):
        return max((_characters(item) for item in value.values()), default=0)
    return len(value) if isinstance(value, str | bytes) else 0


async def _started() -> Worker:
    return Worker()


_workers = Workers()


def worker_pids() -> list[int]:
    """The grader processes of this process."""
    return _workers.pids()


def close_workers() -> None:
    """Ends the grader processes of this process; the next call starts new ones."""
    _workers.close()


def _forget() -> None:
    """A forked child must not talk to its parent's workers."""
    global _workers
    _workers.disown()
    _workers = Workers()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget)
