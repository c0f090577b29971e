"""Backends for the sandbox's tests in the ci tier: each as it is used in earnest, with what it stands on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import numpy

from palestra.sandbox.choose import make
from palestra.sandbox.types import Backend

LOCAL = ("bubblewrap", "docker", "landlock")
ALL = (*LOCAL, "remote")
BOXES = 40
PACKAGES = str(Path(numpy.__file__).resolve().parent.parent)
"""A folder with numpy, for boxes to import from."""
START_S = 60.0


@contextlib.asynccontextmanager
async def started(name: str, dockerd: str, folder: Path) -> AsyncIterator[Backend]:
    """A started backend of this name, closed at the end. `remote` is a real host process with bubblewrap behind it.

    Raises:
        SandboxUnavailableError: it cannot work here, and what is missing.
    """
    async with contextlib.AsyncExitStack() as stack:
        if name == "docker":
            backend = make(name, base_url=dockerd)
        elif name == "remote":
            backend = make(name, urls=[await stack.enter_async_context(sandbox_host(folder))])
        else:
            backend = make(name)
        stack.push_async_callback(backend.close)
        await backend.start()
        yield backend


@contextlib.asynccontextmanager
async def sandbox_host(folder: Path) -> AsyncIterator[str]:
    """`palestra sandbox serve` on a free port; its URL."""
    out = folder / "host.out"
    process = await asyncio.to_thread(_start_host, out)
    try:
        yield await asyncio.to_thread(_url_of, process, out)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)


def _start_host(out: Path) -> subprocess.Popen[bytes]:
    options = [
        "--listen=127.0.0.1:0",
        "--sandbox.backend=bubblewrap",
        f"--sandbox.boxes={BOXES}",
        "--sandbox.warm=0",
        "--sandbox.memory_bytes=536870912",
    ]
    options.append(f'--host.share=["/tmp", "{PACKAGES}"]')
    command = [sys.executable, "-P", "-m", "palestra.cli.main", "sandbox", "serve", *options]
    with out.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONSAFEPATH": "1"}
        )


def _url_of(process: subprocess.Popen[bytes], out: Path) -> str:
    """The URL that the host printed, once it answers there."""
    with subprocess.Popen(["tail", "-n", "+1", "-F", f"--pid={process.pid}", str(out)], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        for raw in tail.stdout:
            words = raw.decode().split()
            if words[:2] == ["sandbox", "host"]:
                tail.kill()
                urllib.request.urlopen(f"{words[2]}/health", timeout=START_S).close()
                return words[2]
    raise AssertionError(f"the sandbox host ended: {out.read_text()[-2000:]}")
