"""What `sandbox.py` measures: each cell does one thing again and again for a while, so many at a time, and notes how long each took.

In: backends and boxes that are up. Out: latencies in seconds, and the time that the whole cell took.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.sandbox.types import Backend, Box, BoxSpec

PYTHON = "/usr/bin/python3"
SCRIPT = (PYTHON, "-I", "-S", "-c", "print(1)")
NUMPY = "import numpy; print(numpy.__name__)"
AT_A_TIME = 4
"""Workers of a cell: enough for two cores to be busy all the time."""
USER = 299_999
"""Whom a raw bubblewrap runs as where this process is root."""
BARE = (
    "bwrap --unshare-user --unshare-all --die-with-parent --as-pid-1 --new-session --cap-drop ALL "
    "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev "
    "--tmpfs /tmp --tmpfs /workspace --tmpfs /dev/shm --chdir /workspace --remount-ro / --clearenv --"
)
"""bubblewrap with the mounts of a box, without limits, filter and agent."""


@dataclass
class Cell:
    """What was measured of one thing, over all rounds."""

    name: str
    latencies: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Done per second, a figure per round."""

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def run_async(cell: Cell, seconds: float, jobs: list[Callable[[], Awaitable[Any]]]) -> None:
    """A round of a cell: each job again and again, all jobs at a time."""
    began = time.perf_counter()
    end, count = began + seconds, len(cell.latencies)

    async def worker(job: Callable[[], Awaitable[Any]]) -> None:
        while (start := time.perf_counter()) < end:
            await job()
            cell.latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(worker(job) for job in jobs))
    cell.rates.append((len(cell.latencies) - count) / (time.perf_counter() - began))


def run_threads(cell: Cell, seconds: float, job: Callable[[], Any], workers: int = AT_A_TIME) -> None:
    """A round of a cell whose job blocks."""
    began = time.perf_counter()
    end, count = began + seconds, len(cell.latencies)

    def worker() -> None:
        while (start := time.perf_counter()) < end:
            job()
            cell.latencies.append(time.perf_counter() - start)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(worker) for _ in range(workers)]:
            done.result()
    cell.rates.append((len(cell.latencies) - count) / (time.perf_counter() - began))


def plain_python() -> None:
    """A fresh interpreter with nothing around it."""
    done = subprocess.run(SCRIPT, capture_output=True, env={}, cwd="/", check=True)
    assert done.stdout == b"1\n", done


def raw_bubblewrap() -> None:
    """A bubblewrap that starts an interpreter, which ends at once."""
    who: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
    command = [*BARE.split(), PYTHON, "-I", "-S", "-c", "pass"]
    subprocess.run(command, capture_output=True, env={"PATH": "/usr/bin:/bin"}, cwd="/", check=True, **who)


def expects(box: Box, run: Callable[[Box], Awaitable[Any]], stdout: bytes) -> Callable[[], Awaitable[None]]:
    """A job that runs something in a box and looks at what came back."""

    async def job() -> None:
        result = await run(box)
        assert result.status == "ok", result
        assert result.stdout == stdout, result

    return job


async def run_true(box: Box) -> Any:
    """The least that a box can run."""
    return await box.exec(["/bin/true"])


async def run_script(box: Box) -> Any:
    """A fresh interpreter in a box."""
    return await box.exec(SCRIPT)


async def run_numpy(box: Box) -> Any:
    """A forked interpreter that has numpy loaded."""
    return await box.run_python(NUMPY)


def lifecycle(backend: Backend, spec: BoxSpec) -> Callable[[], Awaitable[None]]:
    """A job that makes a box, runs a program in it, and destroys it."""

    async def job() -> None:
        box = await backend.create(spec)
        try:
            result = await box.exec(["/bin/true"])
            assert result.status == "ok", result
        finally:
            await box.close()

    return job
