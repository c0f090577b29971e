"""Landlock boxes: what code in them can reach, as root (a user per box) and as an ordinary user (whose own files and processes are around).

Where this needs root or a recent kernel and does not have it, it fails: CI has both.
"""

from __future__ import annotations

import ast
import asyncio
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import pytest_asyncio

from palestra.sandbox import landlock, seccomp
from palestra.sandbox.inside import files
from palestra.sandbox.keeper import confine
from palestra.sandbox.landlock import Landlock
from palestra.sandbox.local import Ground, Place
from palestra.sandbox.types import Box, BoxSpec, Limits, Mount, SandboxUnavailableError

ROOT = Path(__file__).resolve().parent.parent
ORDINARY = 64321
"""A user that owns nothing else here."""

PROBES = """
import ctypes, os, resource, signal, socket
def tried(what):
    try:
        return what() or "done"
    except OSError as error:
        return error.__class__.__name__
def link():
    os.symlink(SECRET, "link")
    return open("link").read()
def libc(number, *args):
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "refused")
found = {
    "reads a file of the host": tried(lambda: open(SECRET).read()),
    "reads it through a link": tried(link),
    "cuts it short": tried(lambda: os.truncate(SECRET, 0)),
    "removes it": tried(lambda: os.unlink(SECRET)),
    "changes its mode": tried(lambda: os.chmod(SECRET, 0o777)),
    "changes its times": tried(lambda: os.utime(SECRET, (1, 1))),
    "lists /": tried(lambda: os.listdir("/")),
    "lists /proc": tried(lambda: os.listdir("/proc")),
    "reads an environment": tried(lambda: open(f"/proc/{SUPERVISOR}/environ").read()),
    "writes to the host's /tmp": tried(lambda: open("/tmp/palestra-landlock-probe", "w").close()),
    "opens a TCP socket": tried(lambda: socket.socket().close()),
    "opens an IPv6 socket": tried(lambda: socket.socket(socket.AF_INET6).close()),
    "opens a unix socket": tried(lambda: socket.socket(socket.AF_UNIX).close()),
    "opens a netlink socket": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()),
    "opens datagrams by pair": tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "signals the supervisor": tried(lambda: os.kill(SUPERVISOR, 0)),
    "signals the agent": tried(lambda: os.kill(os.getppid(), 0)),
    "limits the supervisor": tried(lambda: resource.prlimit(SUPERVISOR, resource.RLIMIT_CPU)),
    "slows the supervisor": tried(lambda: os.setpriority(os.PRIO_PROCESS, SUPERVISOR, 19)),
    "makes a device": tried(lambda: os.mknod("device", 0o020666, os.makedev(1, 3))),
    "makes shared memory": tried(lambda: libc(SHMGET, 0, 4096, 0o1600)),
}
pair = socket.socketpair()
pair[0].send(b"x")
open("mine", "w").write("written")
os.makedirs(os.environ["TMPDIR"] + "/deep")
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGKILL)
allowed = [open("mine").read(), pair[1].recv(1).decode(), os.waitpid(child, 0)[1], len(os.urandom(3)), open("/dev/null").read()]
print(repr((found, allowed)))
"""
SHMGET = {"x86_64": 29, "aarch64": 194}

AS_ORDINARY = """
import asyncio, os, sys
from palestra.sandbox.landlock import Landlock
from palestra.sandbox.types import BoxSpec
async def main():
    backend = Landlock()
    await backend.start()
    box = await backend.create(BoxSpec())
    ran = await box.run_python(sys.stdin.read().replace("SUPERVISOR", str(os.getpid())))
    left = await box.exec("setsid sleep 300 & (setsid sleep 300 &) ; exit 3")
    again = await box.exec(["true"])
    await box.close()
    await backend.close()
    print(repr((ran.stdout.decode(), ran.stderr.decode(), left.exit_code, again.status, backend.enforced().weaker())))
asyncio.run(main())
"""


def probes(secret: Path, supervisor: int | None = None) -> str:
    """The probes, with what they are to look for."""
    code = PROBES.replace("SECRET", repr(str(secret))).replace("SHMGET", str(SHMGET[platform.machine()]))
    return code if supervisor is None else code.replace("SUPERVISOR", str(supervisor))


def judge(said: str) -> None:
    """All that leads out of the box was refused, all that a program needs was not."""
    found, allowed = ast.literal_eval(said)
    assert {name: came for name, came in found.items() if not str(came).endswith("Error")} == {}
    assert allowed == ["written", "x", signal.SIGKILL, 3, ""]


def processes_of(user: int) -> bytes:
    """Numbers of a user's processes."""
    return subprocess.run(["pgrep", "-U", str(user)], capture_output=True, check=False).stdout


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-landlock-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest_asyncio.fixture
async def backend() -> AsyncIterator[Landlock]:
    if os.geteuid() != 0:
        pytest.fail("this test needs root: each box has a user of its own")
    backend = Landlock()
    await backend.start()
    yield backend
    await backend.close()
    folder = Path(tempfile.gettempdir()) / f"palestra-boxes-{os.getuid()}"
    mine = [path for owner in folder.glob("*") for path in owner.glob("*") if f"-{os.getpid()}-" in f"-{owner.name}-"]
    assert mine == []


@pytest_asyncio.fixture
async def box(backend: Landlock) -> Box:
    return await backend.create(BoxSpec())


@pytest.mark.ci
class TestAsRoot:
    """Each box has a user of its own."""

    async def test_nothing_leads_out(self, box: Box, open_folder: Path) -> None:
        secret = open_folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        result = await box.run_python(probes(secret, os.getpid()))
        assert result.status == "ok", result
        judge(result.stdout.decode())
        assert secret.read_text() == "secret"

    async def test_nothing_of_a_run_is_left_and_the_agent_cannot_be_killed(self, box: Box) -> None:
        await box.exec("setsid sleep 300 & (setsid sleep 300 &) ; kill -9 $PPID; kill -9 -1; exit 0")
        result = await box.exec("sleep 0 & wait; echo alive")
        assert (result.status, result.stdout) == ("ok", b"alive\n")
        owner = (await box.run_python("import os; print(os.getuid())")).stdout.strip()
        await box.close()
        assert await asyncio.to_thread(processes_of, int(owner)) == b""

    async def test_two_boxes_do_not_reach_each_other(self, backend: Landlock, box: Box) -> None:
        other = await backend.create(BoxSpec())
        await box.put("mine", b"1", mode=0o666)
        home = (await box.exec("pwd")).stdout.decode().strip()
        for command in (f"cat {home}/mine", f"ls {home}", f"echo x > {home}/mine"):
            assert (await other.exec(command)).status == "nonzero", command

    async def test_a_session_outlives_runs_beside_it(self, box: Box) -> None:
        session = await box.open_session("python")
        await session.run("x = 41")
        await box.exec("sleep 300 & exit 0")
        assert (await session.run("x + 1")).stdout == b"42\n"
        killed = await session.run("import os\nos.kill(os.getppid(), 9)")
        assert b"PermissionError" in killed.stderr
        assert box.alive

    async def test_files_have_the_same_names_as_in_other_boxes_and_move_with_a_fork(self, box: Box) -> None:
        await box.put("/workspace/deep/file", b"1")
        await box.put("/tmp/file", b"2")
        assert (await box.exec("cat deep/file $TMPDIR/file")).stdout == b"12"
        other = await box.fork()
        assert (await other.get("deep/file"), await other.get("/tmp/file")) == (b"1", b"2")

    async def test_mounts_are_seen_where_they_are_and_nowhere_else(self, backend: Landlock, open_folder: Path) -> None:
        data = open_folder / "data"
        data.write_text("numbers")
        mounts = (Mount(str(data), str(data)),)
        box = await backend.create(BoxSpec(mounts=mounts))
        result = await box.exec(f"cat {data}; echo x > {data}")
        assert (result.status, result.stdout) == ("nonzero", b"numbers")
        with pytest.raises(SandboxUnavailableError, match=r"not at /data; give the mount that target"):
            await backend.create(BoxSpec(mounts=(Mount(str(data), "/data"),)))
        with pytest.raises(SandboxUnavailableError, match="no images"):
            await backend.create(BoxSpec(image="x"))

    async def test_packages_are_imported_and_preloaded(self, backend: Landlock) -> None:
        packages = str(Path(numpy.__file__).parent.parent)
        box = await backend.create(BoxSpec(packages=packages, preload=("numpy",)))
        result = await box.run_python("import numpy\nprint(int(numpy.arange(4).sum()))")
        assert (result.status, result.stdout) == ("ok", b"6\n"), result

    async def test_memory_and_processes_are_limited(self, backend: Landlock) -> None:
        box = await backend.create(BoxSpec(Limits(memory_bytes=64 << 20, pids=16)))
        hungry = await box.run_python("x = bytearray(200 << 20)")
        assert hungry.status == "oom"
        many = await box.run_python(
            "import os\nfor _ in range(40):\n    if os.fork() == 0:\n        os.read(0, 1)\n        os._exit(0)"
        )
        assert many.status in ("pids", "nonzero")
        assert (await box.exec(["true"])).status == "ok"


@pytest.mark.ci
def test_as_an_ordinary_user_nothing_leads_out_to_that_users_own_files_and_processes(open_folder: Path) -> None:
    shutil.copytree(
        ROOT / "sandbox", open_folder / "palestra" / "sandbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    secret = open_folder / "secret"
    secret.write_text("secret")
    os.chown(secret, ORDINARY, ORDINARY)
    done = subprocess.run(
        ["/usr/bin/python3", "-P", "-B", "-c", AS_ORDINARY],
        input=probes(secret),
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={"PYTHONPATH": str(open_folder), "PATH": "/usr/bin:/bin"},
        user=ORDINARY,
        group=ORDINARY,
        extra_groups=[],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said, errors, left, again, weaker = ast.literal_eval(done.stdout)
    assert errors == ""
    judge(said)
    assert (left, again) == (3, "ok")
    assert weaker["disk"] == "watched"
    assert not {"files", "network", "processes", "syscalls"} & set(weaker)
    assert secret.read_text() == "secret"
    assert secret.stat().st_mode & 0o777 == 0o644
    assert processes_of(ORDINARY) == b""


class TestWithoutBoxes:
    """What is decided before anything runs."""

    @pytest.mark.parametrize(
        ("version", "uid", "reason"),
        [
            (0, 0, "this kernel has none"),
            (2, 0, "version 3 is needed"),
            (5, 1000, "lets code signal all processes of this user"),
        ],
    )
    async def test_kernels_that_cannot_hold_it_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, version: int, uid: int, reason: str
    ) -> None:
        monkeypatch.setattr(confine, "abi", lambda: version)
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        with pytest.raises(SandboxUnavailableError, match=reason):
            await Landlock().start()

    def test_what_is_weaker_is_told_for_each_ground(self) -> None:
        backend = Landlock()
        backend._abi = landlock.SIGNALS_ABI
        backend.ground = Ground(True, "v1", frozenset(("memory", "pids", "cpu")), "")
        assert backend.enforced().weaker() == {"disk": "watched"}
        backend.ground = Ground(False, "", frozenset(), "not root")
        found = backend.enforced()
        assert found.weaker() == {"disk": "watched", "memory": "watched", "pids": "watched", "cpu": "none"}
        assert any("chmod" in note for note in found.notes)
        backend._abi = 5
        assert backend.enforced().weaker()["processes"] == "watched"

    async def test_a_plan_writes_to_its_own_folder_alone(self) -> None:
        backend = Landlock()
        backend._abi = 7
        plan = await backend.plan(BoxSpec(), Place(1, "/tmp/boxes/1"))
        assert plan.confine is not None
        assert plan.confine["write"] == ["/tmp/boxes/1"]
        assert (plan.home, plan.mode, plan.folder) == ("/tmp/boxes/1/workspace", "domain", True)
        assert plan.confine["pids"] == BoxSpec().limits.pids

    @pytest.mark.parametrize("machine", seccomp.MACHINES)
    def test_filters_are_whole_instructions_that_never_jump_out(self, machine: str) -> None:
        for shared in (False, True):
            code = confine.calls_filter(machine, shared_user=shared)
            assert len(code) % 8 == 0
            steps = [code[at : at + 8] for at in range(0, len(code), 8)]
            assert len(steps) < 4096
            for at, step in enumerate(steps):
                if step[0] == 0x15:
                    assert at + 1 + max(step[2], step[3]) < len(steps)
        with pytest.raises(ValueError, match="no table of system calls for riscv64"):
            confine.calls_filter("riscv64", shared_user=False)

    def test_a_boxs_names_lead_to_its_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert files.at("/tmp/x") == "/tmp/x"
        monkeypatch.setattr(files, "HOME", "/tmp/b/1/workspace")
        monkeypatch.setattr(files, "PLACES", {"/workspace": "/tmp/b/1/workspace", "/tmp": "/tmp/b/1/tmp"})
        assert files.at("a/b") == "/tmp/b/1/workspace/a/b"
        assert files.at("/workspace") == "/tmp/b/1/workspace"
        assert files.at("/workspaces/x") == "/workspaces/x"
        assert files.at("/tmp/x") == "/tmp/b/1/tmp/x"
        assert files.at("/tmp/b/1/tmp/x") == "/tmp/b/1/tmp/x"
        assert files.at("../tmp/x") == "/tmp/b/1/tmp/x"

    def test_a_users_tasks_are_counted(self) -> None:
        assert confine.tasks_of(os.getuid()) >= 1


def test_options_are_typed() -> None:
    options: dict[str, Any] = {"python": "/opt/python3"}
    assert Landlock(**options).python == "/opt/python3"
