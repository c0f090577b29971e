"""What the sandbox costs: runs per second and latencies through warm boxes, whole boxes per second, against the bare thing, in one run.

Needs root. `--setup` installs bubblewrap and a container engine where they are missing and starts the engine, `--quick` measures within a
minute, no option measures longer, `--teardown` ends what runs. The last line printed is one JSON object. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages
HOME = ROOT / ".bench" / "sandbox"
PACKAGES = {"bwrap": "bubblewrap", "dockerd": "docker.io", "ip": "iproute2"}
MANY = 200
"""Boxes at once."""
QUICK_ROUNDS, ROUNDS, ROUND_S = 4, 12, 0.9

if TYPE_CHECKING:
    from benchmarks.sandbox_cells import Cell
    from palestra.sandbox.types import Backend, Box, BoxSpec


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="install what is missing and start a container engine")
    what.add_argument("--quick", action="store_true", help="measure within a minute")
    what.add_argument("--teardown", action="store_true", help="end what --setup started")
    what.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.hold:
        return hold(options.hold)
    if os.geteuid() != 0:
        print(
            "error: this benchmark needs root: for the container engine, and for boxes with users and cgroups of their own",
            file=sys.stderr,
        )
        return 2
    from benchmarks.gateway_procs import ProcessDesk

    desk = ProcessDesk(HOME)
    if options.teardown:
        print(json.dumps({"ended": desk.end_all()}))
        return 0
    (HOME.parent / ".gitignore").write_text("*\n")
    install()
    found = desk.find("dockerd")
    engine = found or desk.start("dockerd", [sys.executable, str(Path(__file__)), "--hold", str(HOME / "dockerd.url")])
    if options.setup:
        print(json.dumps({"docker": engine.url}))
        return 0
    try:
        figures = asyncio.run(measure(engine.url, QUICK_ROUNDS if options.quick else ROUNDS))
    finally:
        if found is None:
            desk.end(engine)
    print(json.dumps(figures))
    return 0


def install() -> None:
    """Debian packages of the commands that are not there."""
    if missing := [package for command, package in PACKAGES.items() if shutil.which(command) is None]:
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=sys.stderr)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        subprocess.run(command, check=True, stdout=sys.stderr)


def hold(said: Path) -> int:
    """Runs a container engine until SIGTERM; writes its address where the starter waits for it."""
    from tests.dockerd import started

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine: Iterator[str] = started()
    with contextlib.contextmanager(lambda: engine)() as url:
        said.with_suffix(".new").write_text(url)
        said.with_suffix(".new").rename(said)
        while True:
            signal.pause()


async def measure(docker_url: str, rounds: int) -> dict[str, Any]:
    """All cells in turn, round after round; rates are medians of the rounds, latencies over all of them."""
    from benchmarks import sandbox_cells as cells
    from palestra.sandbox.bubblewrap import Bubblewrap
    from palestra.sandbox.types import BoxSpec

    spec = BoxSpec(
        preload=("numpy",), packages=str(Path(sys.prefix) / "lib" / f"python3.{sys.version_info[1]}" / "site-packages")
    )
    names = ("plain_python", "python", "true", "zygote", "raw_bwrap", "lifecycle", "docker_exec", "docker_agent")
    found = {name: cells.Cell(name) for name in names}
    async with (
        boxes(Bubblewrap(), spec, cells.AT_A_TIME) as (backend, warm),
        container(docker_url) as (inside, exec_run),
    ):
        blocking: dict[str, Callable[[], Any]] = {"plain_python": cells.plain_python, "raw_bwrap": cells.raw_bubblewrap}
        waiting = {
            "python": [cells.expects(box, cells.run_script, b"1\n") for box in warm],
            "true": [cells.expects(box, cells.run_true, b"") for box in warm],
            "zygote": [cells.expects(box, cells.run_numpy, b"numpy\n") for box in warm],
            "lifecycle": [cells.lifecycle(backend, BoxSpec())] * cells.AT_A_TIME,
            "docker_agent": [cells.expects(inside, cells.run_true, b"")],
        }
        for number in range(rounds):
            for name, cell in found.items():
                if name == "docker_exec":
                    await asyncio.to_thread(cells.run_threads, cell, ROUND_S, exec_run, 1)
                elif name in blocking:
                    await asyncio.to_thread(cells.run_threads, cell, ROUND_S, blocking[name])
                else:
                    await cells.run_async(cell, ROUND_S, waiting[name])
            print(
                f"round {number + 1}: {', '.join(f'{c.name} {c.rates[-1]:.0f}/s' for c in found.values())}",
                file=sys.stderr,
            )
        many = await crowd(backend)
    return {**report(found), **many}


@contextlib.asynccontextmanager
async def boxes(backend: Backend, spec: BoxSpec, number: int) -> AsyncIterator[tuple[Backend, list[Box]]]:
    """A backend, started, and some warm boxes."""
    await backend.start()
    try:
        yield backend, [await backend.create(spec) for _ in range(number)]
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def container(url: str) -> AsyncIterator[tuple[Box, Callable[[], Any]]]:
    """A box of the container engine, and the engine's own way to run the same program in the same container."""
    import docker
    from palestra.sandbox.container import Docker
    from palestra.sandbox.types import BoxSpec

    async with boxes(Docker(url), BoxSpec(), 1) as (_, (box,)):
        client = docker.DockerClient(base_url=url, max_pool_size=8)
        try:
            (running,) = client.containers.list()

            def exec_run() -> None:
                done = running.exec_run(["/bin/true"])
                assert done.exit_code == 0, done

            yield box, exec_run
        finally:
            client.close()


async def crowd(backend: Backend) -> dict[str, Any]:
    """MANY boxes at once: how long until all are there, what a box takes of memory, and whether all of them work."""
    from palestra.sandbox.types import BoxSpec

    before = available_bytes()
    began = time.perf_counter()
    made = await asyncio.gather(*(backend.create(BoxSpec()) for _ in range(MANY)))
    seconds = time.perf_counter() - began
    taken = before - available_bytes()
    results = await asyncio.gather(*(box.run_python("print(1)") for box in made))
    await asyncio.gather(*(box.close() for box in made))
    return {
        "boxes_at_once": sum(result.stdout == b"1\n" for result in results),
        "boxes_start_s": round(seconds, 2),
        "box_mb": round(taken / MANY / 1e6, 2),
    }


def available_bytes() -> int:
    """Memory that the kernel says could be had."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def report(found: dict[str, Cell]) -> dict[str, Any]:
    """Rates, ratios within the run, and latencies."""
    rate = {name: sorted(cell.rates)[len(cell.rates) // 2] for name, cell in found.items()}
    over = rate["docker_agent"] / rate["docker_exec"]
    figures: dict[str, Any] = {f"{name}_per_s": round(value, 1) for name, value in rate.items()}
    figures |= {
        "docker_agent_over_exec": round(over, 1),
        "python_over_plain": round(rate["python"] / rate["plain_python"], 2),
        "lifecycle_over_raw": round(rate["lifecycle"] / rate["raw_bwrap"], 2),
    }
    for name, cell in found.items():
        figures |= {f"{name}_p50_ms": round(cell.percentile(0.5), 2), f"{name}_p99_ms": round(cell.percentile(0.99), 2)}
    return figures


if __name__ == "__main__":
    sys.exit(main())
