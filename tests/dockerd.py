"""A container engine of the tests' own: dockerd, in its own network and mount namespaces, with an image made from this host's files.

In: root, dockerd and a folder. Out: the engine's address, with `palestra-sandbox:1` in it. Its data lie on a tmpfs inside its namespace, so
that overlayfs works wherever this runs and all of it is gone with it. Where it cannot start, the tests fail and say what to install. Waits
for dockerd.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IMAGE = "palestra-sandbox:1"
FROM_HOST = Path(__file__).resolve().parent.parent / "docker" / "sandbox" / "from_host.py"
SCRIPT = """
set -e
ip link set lo up
mkdir -p "$D/data" && mount -t tmpfs -o size=2g tmpfs "$D/data"
mount -t tmpfs -o size=64m tmpfs /run
exec dockerd --data-root "$D/data" --exec-root /run/docker --pidfile "$D/pid" -H "unix://$D/docker.sock" --cgroup-parent "/$PARENT" \
    --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --storage-driver=overlay2 \
    --exec-opt native.cgroupdriver=cgroupfs --shutdown-timeout=1 --log-level=warn
"""
START_S, STOP_S = 60.0, 20.0


def started() -> Iterator[str]:
    """Starts the engine, makes the image, yields the address; ends and removes everything."""
    if os.geteuid() != 0:
        pytest.fail("a container engine needs root: run the ci tests as root")
    if missing := [name for name in ("dockerd", "ip", "unshare", "setpriv") if shutil.which(name) is None]:
        pytest.fail(
            f"{', '.join(missing)} not found: apt-get install -y --no-install-recommends docker.io iproute2 util-linux"
        )
    with tempfile.TemporaryDirectory(prefix="palestra-dockerd-") as name:
        folder = Path(name)
        parent = f"palestra-tests-{os.getpid()}"
        process = _spawn(folder, parent)
        url = f"unix://{folder}/docker.sock"
        try:
            _until(lambda: _answers(url), START_S, lambda: _stillborn(process, folder))
            _make_image(url)
            yield url
        finally:
            _stop(process, url, parent)


def _spawn(folder: Path, parent: str) -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ["PATH"], "D": str(folder), "PARENT": parent, "HOME": "/root"}
    with (folder / "log").open("wb") as log:
        # The engine ends its containers and itself when the tests are killed.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--net", "--mount", "sh", "-c", SCRIPT]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _make_image(url: str) -> None:
    command = [sys.executable, "-P", str(FROM_HOST), "--tag", IMAGE, "--host", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.fail(f"the sandbox's image cannot be made from this host's files:\n{done.stderr[-2000:]}")


def _answers(url: str) -> bool:
    with contextlib.suppress(Exception), contextlib.closing(client(url)) as api:
        return bool(api.ping())
    return False


def client(url: str) -> Any:
    """The engine's plain client, for looking at it from beside the backend."""
    import docker

    return docker.APIClient(base_url=url, version="auto", timeout=60)


def _stillborn(process: subprocess.Popen[bytes], folder: Path) -> None:
    code = process.poll()
    log = (folder / "log").read_text(errors="replace")[-2000:]
    pytest.fail(
        f"dockerd {'does not answer' if code is None else f'ended with {code}'}; it needs root, overlayfs, namespaces and writable cgroups "
        f"(apt-get install -y --no-install-recommends docker.io):\n{log}"
    )


def _until(ready: Callable[[], bool], seconds: float, failed: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            failed()
            return
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes], url: str, parent: str) -> None:
    with contextlib.suppress(Exception), contextlib.closing(client(url)) as api:
        for container in api.containers(all=True, quiet=True):
            with contextlib.suppress(Exception):  # it may be going by itself
                api.remove_container(container["Id"], force=True, v=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # What it left: processes in its mount namespace, and those of containers by their cgroup.
    for pid in _in_cgroups(parent):
        _kill(pid)
    _until(
        lambda: not _in_cgroups(parent), STOP_S, functools.partial(pytest.fail, "the engine's containers do not end")
    )
    for folder in _cgroups(parent):
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(below)


def _cgroups(parent: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / parent, *root.glob(f"*/{parent}")) if path.is_dir()]


def _in_cgroups(parent: str) -> set[int]:
    found: set[int] = set()
    for folder in _cgroups(parent):
        for file in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in file.read_text().split())
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
