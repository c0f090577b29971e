"""The docker backend on a real engine: boxes work, hold, and are gone when their time is over, whoever it is that goes first."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from palestra.sandbox.container import Docker
from palestra.sandbox.container_counts import ContainerCounts
from palestra.sandbox.container_labels import EXPIRES, OWNER, owner, place
from palestra.sandbox.types import MIB, Box, BoxLostError, BoxSpec, Limits, Mount, SandboxError, SandboxUnavailableError
from tests.dockerd import IMAGE, client

pytestmark = [pytest.mark.ci, pytest.mark.asyncio(loop_scope="module")]

SMALL = Limits(memory_bytes=128 * MIB, pids=24, disk_bytes=8 * MIB)
GONE_S = 30.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(dockerd: str) -> AsyncIterator[Docker]:
    """A started backend, for all tests here."""
    made = Docker(dockerd)
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def box(backend: Docker) -> AsyncIterator[Box]:
    """A box for all tests that leave it as it was."""
    made = await backend.create(BoxSpec(SMALL))
    yield made
    await made.close()


@pytest.fixture(scope="module")
def api(dockerd: str) -> Any:
    """The engine seen from beside the backend."""
    with contextlib.closing(client(dockerd)) as made:
        yield made


def names(api: Any) -> set[str]:
    """Names of all containers, running or not."""
    return {container["Names"][0].lstrip("/") for container in api.containers(all=True)}


async def until(true: Callable[[], bool], what: str) -> None:
    """Waits for the engine to come to something."""
    deadline = time.monotonic() + GONE_S
    while not await asyncio.to_thread(true):
        assert time.monotonic() < deadline, f"{what} within {GONE_S:g} s"
        await asyncio.sleep(0.05)


# --- what a box can do, and what it cannot


async def test_commands_python_and_files(box: Box) -> None:
    done = await box.exec("read line; echo $line $NAME; pwd; exit 3", stdin=b"hello\n", env={"NAME": "you"}, cwd="/tmp")
    assert (done.status, done.exit_code, done.stdout) == ("nonzero", 3, b"hello you\n/tmp\n")
    done = await box.run_python("import os, sys; print(os.getuid(), os.uname().nodename); sys.stderr.write('!')")
    assert (done.status, done.stdout, done.stderr) == ("ok", b"1000 box\n", b"!")
    content = os.urandom(3 * MIB)
    await box.put("deep/er/file.bin", content, mode=0o600)
    assert await box.get("deep/er/file.bin") == content
    assert (await box.exec(["stat", "-c", "%a %s", "deep/er/file.bin"])).stdout == f"600 {3 * MIB}\n".encode()
    assert (await box.exec(["rm", "-r", "deep"])).status == "ok"
    assert await box.list() == []


async def test_limits_of_memory_processes_and_time_hold_and_the_box_goes_on(box: Box) -> None:
    assert (await box.run_python("x = bytearray(1 << 30)")).status == "oom"
    fork = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(30)"
    refused = await box.run_python(fork)
    assert (refused.status, refused.usage.refused_pids > 0) == ("pids", True)
    late = await box.exec("echo first; setsid sleep 60 & sleep 60", timeout=0.5)
    assert (late.status, late.stdout) == ("timeout", b"first\n")
    assert (await box.exec("ls /proc | grep -c '^[0-9]'")).stdout in (b"4\n", b"5\n"), "somebody is left"


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
async def test_disks_are_small(box: Box, place: str) -> None:
    code = f"import os\nwith open('{place}/f', 'wb', 0) as f:\n  try:\n    while True: f.write(bytes(1 << 20))\n"
    code += f"  except OSError as e: print(e.errno, os.stat('{place}/f').st_size)\nos.unlink('{place}/f')"
    done = await box.run_python(code)
    assert done.stdout.split()[0] == b"28", done.text
    assert int(done.stdout.split()[1]) <= 8 * MIB


async def test_the_box_is_sealed(box: Box) -> None:
    status = (await box.exec(["cat", "/proc/self/status"])).text
    for line in ("CapBnd:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in status
    assert (await box.exec("ls /sys/class/net")).stdout == b"lo\n"
    for path in ("/x", "/usr/bin/x", "/etc/x", "/opt/x", "/proc/sys/kernel/core_pattern", "/proc/1/oom_score_adj"):
        assert (await box.exec(f"echo x > {path}")).status == "nonzero", path
    for path in ("/proc/1/environ", "/proc/1/fd/0", "/proc/1/mem"):
        assert (await box.exec(["cat", path])).status == "nonzero", path
    assert (await box.exec("cat /proc/mounts")).text.count("/var/run/docker") == 0
    calls = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint([libc.syscall(n, 0, 0, 0, 0, 0) for n in (425, 321, 250)])"
    assert (await box.run_python(calls)).stdout == b"[-1, -1, -1]\n"  # io_uring_setup, bpf, keyctl (x86_64)


async def test_what_it_holds_is_what_the_engine_says(backend: Docker) -> None:
    assert backend.enforced().weaker() == {}


async def test_the_agent_counts_where_the_cgroup_cannot_be_seen(
    backend: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContainerCounts, "of", lambda container, pid: None)
    async with contextlib.aclosing(Closing(await backend.create(BoxSpec(SMALL)))) as here:
        killed = await here.box.run_python("x = bytearray(1 << 30)")
        assert (killed.status, killed.usage.oom_kills) == ("oom", 1)
        assert killed.usage.peak_bytes == SMALL.memory_bytes
        assert (await here.box.run_python("print(1)")).usage.oom_kills == 0


class Closing:
    """A box that is closed at the end of a block."""

    def __init__(self, box: Box) -> None:
        self.box = box

    async def aclose(self) -> None:
        """Ends it."""
        await self.box.close()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package, which everybody may read."""
    tmp_path.chmod(0o755)
    (tmp_path / "probe_package.py").write_text("VALUE = 7\n")
    return tmp_path


async def test_mounts_are_read_only_and_packages_can_be_preloaded(backend: Docker, packages: Path) -> None:
    spec = BoxSpec(
        SMALL,
        mounts=(Mount(str(packages), "/data"),),
        packages=str(packages),
        preload=("probe_package",),
        env=(("SEED", "4"),),
    )
    async with contextlib.aclosing(Closing(await backend.create(spec))) as here:
        code = "import os, probe_package; print(probe_package.VALUE, probe_package.__file__, os.environ['SEED'])"
        assert (await here.box.run_python(code)).stdout == b"7 /opt/packages/probe_package.py 4\n"
        assert (await here.box.exec("cat /data/probe_package.py")).status == "ok"
        assert (await here.box.exec("echo > /data/new")).status == "nonzero"
    assert os.listdir(packages) == ["probe_package.py"]


# --- what cannot be had


async def test_what_cannot_be_had_is_said_and_leaves_nothing(backend: Docker, api: Any) -> None:
    before = names(api)
    for spec, told in (
        (BoxSpec(image="no-such-image:9"), r"no image no-such-image:9: make it .*from_host\.py"),
        (BoxSpec(preload=("no_such_module",)), "cannot preload: no_such_module"),
        (BoxSpec(mounts=(Mount("/no/such/folder", "/data"),)), "/no/such/folder"),
    ):
        with pytest.raises(SandboxUnavailableError, match=told):
            await backend.create(spec)
    assert names(api) == before


async def test_images_that_will_not_do_are_refused(backend: Docker, api: Any, dockerd: str) -> None:
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"))
    for tag, changes in (("volume", ["VOLUME /data"]), ("bare", [])):
        api.import_image_from_data(root.getvalue(), repository="refused", tag=tag, changes=changes)
    with pytest.raises(SandboxUnavailableError, match="declares volumes"):
        await backend.create(BoxSpec(image="refused:volume"))
    with pytest.raises(SandboxUnavailableError, match=r"Python 3\.9 or newer"):
        await backend.create(BoxSpec(image="refused:bare"))
    other = Docker(dockerd, python="/bin/false")
    with pytest.raises(SandboxUnavailableError, match=f"agent did not start in image {IMAGE}"):
        await other.start()
    await other.close()
    assert {name for name in names(api) if name.startswith(other._prefix)} == set()


# --- who goes first


async def test_a_box_that_is_removed_behind_our_back_is_our_fault(backend: Docker, api: Any) -> None:
    made = await backend.create(BoxSpec(SMALL))
    running = asyncio.create_task(made.exec("echo begun > /workspace/f; sleep 60"))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(api.remove_container, made.id, force=True)
    assert (await running).status == "infra_error"
    assert not made.alive
    assert (await made.exec("true")).status == "infra_error"
    with pytest.raises(BoxLostError):
        await made.put("f", b"")
    await made.close()


SUPERVISOR = """
import asyncio, sys
from palestra.sandbox.container import Docker
from palestra.sandbox.types import BoxSpec
async def main():
    backend = Docker(sys.argv[1])
    await backend.start()
    boxes = [await backend.create(BoxSpec()) for _ in range(2)]
    running = asyncio.ensure_future(boxes[0].exec("trap '' TERM HUP; setsid sleep 600 & while :; do :; done", timeout=600))
    await boxes[1].run_python("print(1)")
    print(*(box.id for box in boxes), flush=True)
    await running
asyncio.run(main())
"""


async def test_a_service_that_is_killed_leaves_nothing(dockerd: str, api: Any) -> None:
    command = [sys.executable, "-P", "-c", SUPERVISOR, dockerd]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    theirs = set((await asyncio.wait_for(process.stdout.readline(), 60)).decode().split())
    assert len(theirs) == 2
    assert theirs <= names(api)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not theirs & names(api), "a killed service's boxes are gone")


async def test_the_reaper_takes_what_nobody_comes_back_for(backend: Docker, box: Box, api: Any) -> None:
    dead, elsewhere, past, future = f"{place()}/1/0", "another-boot/1/2/3", "1000", str(int(time.time()) + 3600)
    labels = {
        "dead": {OWNER: dead, EXPIRES: future},
        "expired": {OWNER: elsewhere, EXPIRES: past},
        "elsewhere": {OWNER: elsewhere, EXPIRES: future},
        "living": {OWNER: owner(), EXPIRES: past},
        "stranger": {"another": "label"},
    }
    try:
        for name, given in labels.items():
            api.create_container(IMAGE, ["python3"], name=f"reap-{name}", labels=given)
        assert await backend.reap() == 2
        assert {name for name in names(api) if name.startswith("reap-")} == {
            "reap-elsewhere",
            "reap-living",
            "reap-stranger",
        }
        assert (await box.exec("true")).status == "ok"
        assert await backend.reap() == 0
    finally:
        for name in names(api):
            if name.startswith("reap-"):
                api.remove_container(name, force=True)


async def test_a_box_ends_when_its_lifetime_is_over(dockerd: str, api: Any) -> None:
    short = Docker(dockerd, lifetime_s=1.5)
    await short.start()
    made = await short.create(BoxSpec(SMALL))
    assert (await made.exec("sleep 60")).status == "infra_error"
    await until(lambda: made.id not in names(api), "a box past its lifetime is gone")
    await short.close()


async def test_eight_at_once_and_a_cancelled_one_and_nothing_is_left(dockerd: str, api: Any) -> None:
    before = names(api)
    files = len(os.listdir("/proc/self/fd"))
    many = Docker(dockerd)
    await many.start()
    given_up = asyncio.create_task(many.create(BoxSpec(SMALL)))
    boxes = [asyncio.create_task(many.create(BoxSpec(SMALL))) for _ in range(8)]
    await asyncio.sleep(0.05)
    given_up.cancel()
    made = await asyncio.gather(*boxes)
    assert len({each.id for each in made}) == 8
    done = await asyncio.gather(*(each.run_python(f"print({number})") for number, each in enumerate(made)))
    assert [each.stdout for each in done] == [f"{number}\n".encode() for number in range(8)]
    await many.close()
    assert given_up.cancelled()
    assert names(api) == before
    assert len(os.listdir("/proc/self/fd")) <= files + 2


# --- other ways to the engine


@asynccontextmanager
async def forwarded(dockerd: str, tls: ssl.SSLContext | None) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A port of the loopback that leads to the engine's socket, and how to cut it."""
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_unix_connection(dockerd.removeprefix("unix://"))
        writers.extend((writer, here))
        await asyncio.gather(carry(reader, here), carry(there, writer))

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)

    def cut() -> None:
        server.close()
        while writers:
            if not (writer := writers.pop()).is_closing():
                writer.transport.abort()

    try:
        yield server.sockets[0].getsockname()[1], cut
    finally:
        cut()


async def test_an_engine_over_tcp_that_goes_away(dockerd: str) -> None:
    async with forwarded(dockerd, None) as (port, cut):
        remote = Docker(f"tcp://127.0.0.1:{port}", timeout_s=10)
        await remote.start()
        made = await remote.create(BoxSpec(SMALL))
        assert (await made.run_python("print(6 * 7)")).stdout == b"42\n"
        cut()
        assert (await made.run_python("print(1)")).status == "infra_error"
        with pytest.raises(SandboxError, match="container engine"):
            await remote.create(BoxSpec(SMALL))
        with pytest.raises(SandboxError):
            await remote.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder as DOCKER_CERT_PATH names it; both sides have the same certificate."""
    key, certificate, config = (str(tmp_path / name) for name in ("key.pem", "cert.pem", "openssl.cnf"))
    Path(config).write_text("[req]\ndistinguished_name = name\n[name]\n")
    make = [
        "openssl",
        "req",
        "-config",
        config,
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    shutil.copy(certificate, tmp_path / "ca.pem")
    return tmp_path


async def test_an_engine_over_tls(dockerd: str, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    async with forwarded(dockerd, context) as (port, _):
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
        secured = Docker()
        await secured.start()
        made = await secured.create(BoxSpec(SMALL))
        assert (await made.run_python("print(6 * 7)")).stdout == b"42\n"
        await secured.close()
