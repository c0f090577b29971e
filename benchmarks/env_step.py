"""What a step of an environment costs in Palestra, and in its peers.

`--setup` installs the peers and lets OpenEnv's own client play against our host; `--quick` measures within a minute, no option measures
longer. In one process: microseconds of CPU per step, beside gem and skyrl-gym. Over `/ws`: our host beside OpenEnv's server, with the same
client and an echo environment. Peers take turns, so that a busy neighbour meets all of them. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

if TYPE_CHECKING:
    from benchmarks.env_step_wire import Client

FOLDER = ROOT / ".bench" / "peers"
START_S = 120.0
CLIENTS = 64


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/env_step.py", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="install the peers, and play with OpenEnv's client")
    what.add_argument("--quick", action="store_true", help="measure within a minute")
    options = parser.parse_args(argv)
    if options.setup:
        return setup()
    import uvloop

    rounds = 5 if options.quick else 25
    with contextlib.ExitStack() as stack:
        step_us = steps(stack, rounds)
        print(json.dumps({"cpu_us_per_step": step_us}), flush=True)
        wire = uvloop.run(over_the_wire(stack, rounds))
    ours, theirs = wire["palestra"], wire["openenv"]
    ratios = {
        "latency_ratio": round(ours["p50_us"] / theirs["p50_us"], 3),
        "cpu_ratio_64": round(ours["cpu_us_64"] / theirs["cpu_us_64"], 3),
    }
    print(json.dumps({"step_us": step_us.pop("palestra"), "ws": ratios, "peers": {**step_us, "ws": wire}}))
    return 0


def setup() -> int:
    """Installs the peers, and proves the wire with OpenEnv's own client."""
    from benchmarks.env_step_peers import ALL, OPENENV

    FOLDER.mkdir(parents=True, exist_ok=True)
    for peer in ALL:
        peer.install(FOLDER)
    with contextlib.ExitStack() as stack:
        url, _ = _host(stack, "palestra/Calculator-v0")
        command, environ = OPENENV.command(FOLDER, "client-openenv", url)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S)
    print(done.stdout.strip() or done.stderr[-2000:])
    return done.returncode


def steps(stack: contextlib.ExitStack, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of CPU per step in one process, by library: the median of the rounds' best."""
    from benchmarks.env_step_peers import GEM, ROLES, SKYRL

    roles = {
        "palestra": ([sys.executable, "-P", str(ROLES), "step-palestra"], None),
        "gem": GEM.command(FOLDER, "step-gem"),
        "skyrl-gym": SKYRL.command(FOLDER, "step-skyrl"),
    }
    running = {name: stack.enter_context(_process(command, environ)) for name, (command, environ) in roles.items()}
    for process in running.values():
        _line(process)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, process in running.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            found[name].append(json.loads(_line(process)))
    return {
        name: {kind: round(statistics.median(one[kind] for one in seen), 1) for kind in ("plain", "tool")}
        for name, seen in found.items()
    }


async def over_the_wire(stack: contextlib.ExitStack, rounds: int) -> dict[str, dict[str, float]]:
    """Latency at one client and CPU at 64, of our host and of OpenEnv's server: medians of the rounds."""
    from benchmarks.env_step_echo import ECHO
    from benchmarks.env_step_peers import OPENENV
    from benchmarks.env_step_wire import Client, load
    from benchmarks.gateway_peers import free_port

    port = free_port()
    openenv = stack.enter_context(_process(*OPENENV.command(FOLDER, "serve-openenv", str(port))))
    servers = {
        "palestra": _host(stack, ECHO, "--max-envs", str(CLIENTS + 1)),
        "openenv": (f"http://127.0.0.1:{port}", openenv.pid),
    }
    await _listening(port)
    clients: dict[str, list[Client]] = {name: [] for name in servers}
    found: dict[str, dict[str, list[float]]] = {name: {"p50_us": [], "cpu_us": []} for name in servers}
    crowd: dict[str, dict[str, list[float]]] = {name: {"p50_us_64": [], "cpu_us_64": []} for name in servers}
    for name, (url, _) in servers.items():
        clients[name].append(await Client.to(url))
        await load(clients[name], servers[name][1], 0.3)
    for _ in range(rounds):
        for name, (_, pid) in servers.items():
            one = await load(clients[name], pid, 0.5)
            found[name]["p50_us"].append(one.p50_us)
            found[name]["cpu_us"].append(one.cpu_us)
    for name, (url, _) in servers.items():
        clients[name] += [await Client.to(url) for _ in range(CLIENTS - 1)]
        await load(clients[name], servers[name][1], 0.3)
    for _ in range(rounds):
        for name, (_, pid) in servers.items():
            one = await load(clients[name], pid, 1.0)
            crowd[name]["p50_us_64"].append(one.p50_us)
            crowd[name]["cpu_us_64"].append(one.cpu_us)
    for client in [one for several in clients.values() for one in several]:
        client.close()
    return {
        name: {key: round(statistics.median(values), 1) for key, values in {**found[name], **crowd[name]}.items()}
        for name in servers
    }


def _host(stack: contextlib.ExitStack, env_id: str, *options: str) -> tuple[str, int]:
    """URL and process of a host of ours."""
    command = [sys.executable, "-P", "-m", "palestra.server.env_host.main", env_id, *options]
    process = stack.enter_context(_process(command, None))
    return _line(process).split()[-1], process.pid


@contextlib.contextmanager
def _process(command: list[str], environ: dict[str, str] | None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        env=environ,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints.

    Raises:
        RuntimeError: there comes none.
    """
    assert process.stdout is not None
    if select.select([process.stdout], [], [], START_S)[0] and (line := process.stdout.readline()):
        return line
    raise RuntimeError(f"{process.args}: nothing was said within {START_S:g} s, or it ended: {process.poll()}")


async def _listening(port: int) -> Any:
    until = time.monotonic() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


if __name__ == "__main__":
    sys.exit(main())
