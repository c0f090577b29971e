"""Real bubblewrap boxes: limits hold, nothing of the host is seen, nothing is left whoever dies. As root, and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from palestra.sandbox import bubblewrap, cgroups
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.keeper import owners, processes
from palestra.sandbox.local import Place
from palestra.sandbox.types import MIB, BoxSpec, Enforced, Limits, Mount, SandboxUnavailableError

ROOT = Path(__file__).parent.parent
SMALL = BoxSpec(limits=Limits(memory_bytes=96 * MIB, pids=24, disk_bytes=8 * MIB))
ci = pytest.mark.ci


async def test_a_missing_program_says_what_to_install() -> None:
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        await Bubblewrap(bwrap="no-such-bwrap").start()
    with pytest.raises(SandboxUnavailableError, match="below /usr"):
        await Bubblewrap(bwrap="/bin/true", python="/opt/python").start()
    with pytest.raises(SandboxUnavailableError, match="does not know --as-pid-1"):
        await Bubblewrap(bwrap="/bin/true", python="/usr/bin/env").start()


async def test_specs_that_cannot_be_had(tmp_path: Path) -> None:
    backend = Bubblewrap()
    place = Place(1, "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="take docker"):
        await backend.plan(BoxSpec(image="python:3.12"), place)
    with pytest.raises(SandboxUnavailableError, match="no such file or folder"):
        await backend.plan(BoxSpec(packages=str(tmp_path / "none")), place)
    with pytest.raises(SandboxUnavailableError, match="no such file or folder"):
        await backend.plan(BoxSpec(mounts=(Mount(str(tmp_path / "none"), "/data"),)), place)


def test_refusals_name_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("0\n")
    monkeypatch.setattr(bubblewrap, "REFUSING", {str(tmp_path / "max"): ("0", "sysctl user.max_user_namespaces=10000")})
    said = Bubblewrap().explain("bwrap: No permissions to create new namespace")
    assert f"{tmp_path}/max is 0; sysctl user.max_user_namespaces=10000" in said
    assert Bubblewrap().explain("Traceback") == ""


@pytest.fixture
async def backend() -> AsyncIterator[Bubblewrap]:
    made = Bubblewrap()
    await made.start()
    yield made
    await made.close()
    _nothing_left(made)


def _nothing_left(backend: Bubblewrap) -> None:
    keeper = backend._keeper
    assert keeper is not None
    assert owners.start_of(keeper.process.pid) is None
    where, _ = cgroups.find()
    if where is not None:
        assert keeper.hello["owner"] not in cgroups.owners(where)
    assert not os.path.exists(os.path.join(keeper.hello["folders"], keeper.hello["owner"]))


@ci
async def test_everything_is_held_by_the_kernel_for_root(backend: Bubblewrap) -> None:
    assert os.getuid() == 0, "the ci tier runs as root"
    assert backend.enforced() == Enforced(), "cgroups with memory, pids and cpu are missing on this machine"


@ci
async def test_limits_end_in_their_own_status(backend: Bubblewrap) -> None:
    box = await backend.create(SMALL)
    hog = await box.run_python("x = bytearray(1 << 30); print('got it')", timeout=20)
    assert (hog.status, hog.stdout, hog.signal) == ("oom", b"", signal.SIGKILL)
    assert hog.usage.peak_bytes is not None
    assert 64 * MIB < hog.usage.peak_bytes <= 96 * MIB
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)\n"
    bomb = await box.run_python(forks, timeout=20)
    assert bomb.status == "pids"
    assert bomb.usage.refused_pids > 0
    fill = """
import errno
for path in ("/tmp/x", "/workspace/x", "/dev/shm/x"):
    file = open(path, "wb", 0)
    try:
        for _ in range(20):
            file.write(bytes(1 << 20))
    except OSError as error:
        print(path, file.tell() >> 20, error.errno == errno.ENOSPC)
"""
    full = await box.run_python(fill, timeout=20)
    assert full.stdout.decode().splitlines() == ["/tmp/x 8 True", "/workspace/x 8 True", "/dev/shm/x 8 True"]
    assert (await box.exec("rm -f /tmp/x /dev/shm/x; : > /dev/x || : > /x || : > /etc/x")).stdout == b""
    assert (await box.exec("echo still here")).stdout == b"still here\n"
    await box.close()


@ci
async def test_what_a_box_sees(backend: Bubblewrap) -> None:
    box = await backend.create(BoxSpec(env=(("TOKEN", "of-the-box"),)))
    look = await box.exec(
        "id; hostname; ls /; ls /etc; env | cut -d= -f1 | LC_ALL=C sort | tr '\\n' ' '; cat /proc/1/environ;"
        "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr '\\t\\n' '  '; date +%Z"
    )
    said = look.stdout.decode()
    assert "uid=1000(box) gid=1000(box) groups=1000(box)\nbox\n" in said
    seen = {"bin", "dev", "etc", "lib", "proc", "tmp", "usr", "workspace"}
    assert seen <= set(said.split()) <= set(said.split()) - {"root", "home", "var", "sys", "work", "run", "shadow"}
    assert "HOME LANG MKL_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH PWD SHLVL TOKEN _" in said
    assert "CapEff: 0000000000000000 CapBnd: 0000000000000000 NoNewPrivs: 1 Seccomp: 2" in said
    assert said.endswith("UTC\n")
    assert b"/proc/1/environ: Permission denied" in look.stderr
    await box.close()


@ci
async def test_users_are_not_shared(backend: Bubblewrap) -> None:
    boxes = [await backend.create(BoxSpec()) for _ in range(3)]
    assert backend._keeper is not None
    uids = {os.stat(f"/proc/{pid}").st_uid for pid in processes.children(backend._keeper.process.pid)}
    assert len(uids) == 3
    assert min(uids) > 65535
    for box in boxes:
        await box.close()


def _closed_home() -> Path:
    home = Path(tempfile.mkdtemp())
    (home / "site").mkdir()
    (home / "site" / "planted_package.py").write_text("answer = 42\n")
    (home / "data.txt").write_text("rows")
    home.chmod(0o700)
    return home


@ci
async def test_folders_of_the_host_are_read_only_and_reached_through_closed_ones(
    backend: Bubblewrap, tmp_path: Path
) -> None:
    home = _closed_home()
    try:
        spec = BoxSpec(
            packages=str(home / "site"),
            preload=("planted_package",),
            mounts=(Mount(str(home / "data.txt"), "/data/rows.txt"),),
        )
        box = await backend.create(spec)
        run = await box.run_python(
            "import planted_package; print(planted_package.answer, open('/data/rows.txt').read())"
        )
        assert (run.stdout, run.stderr) == (b"42 rows\n", b"")
        assert (await box.exec("echo x > /data/rows.txt || touch /opt/packages/x")).status == "nonzero"
        await box.close()
        with pytest.raises(SandboxUnavailableError, match="cannot preload: no_such_module"):
            await backend.create(BoxSpec(preload=("no_such_module",)))
    finally:
        shutil.rmtree(home)


@ci
async def test_two_hundred_boxes_at_once(backend: Bubblewrap) -> None:
    before = len(os.listdir("/proc/self/fd"))
    boxes = await asyncio.gather(*(backend.create(SMALL) for _ in range(200)))
    results = await asyncio.gather(*(box.exec(["/bin/echo", str(place)]) for place, box in enumerate(boxes)))
    assert [result.stdout for result in results] == [f"{place}\n".encode() for place in range(200)]
    await asyncio.gather(*(box.close() for box in boxes))
    assert len(os.listdir("/proc/self/fd")) == before
    assert backend._keeper is not None
    assert processes.children(backend._keeper.process.pid) == set()


@ci
async def test_a_box_that_is_killed_from_outside_is_lost_and_told(backend: Bubblewrap) -> None:
    box = await backend.create(BoxSpec())
    assert backend._keeper is not None
    (outer,) = processes.children(backend._keeper.process.pid)
    (inner,) = processes.children(outer)
    run = asyncio.create_task(box.exec("sleep 600", timeout=60))
    await box._channel.call({"op": "list", "path": "."}, 30)  # the agent takes one after the other: it runs
    os.kill(inner, signal.SIGKILL)
    assert (await run).status == "infra_error"
    assert not box.alive
    await box.close()


@ci
async def test_a_keeper_that_is_killed_takes_its_boxes_along(backend: Bubblewrap) -> None:
    box = await backend.create(BoxSpec())
    assert backend._keeper is not None
    first = backend._keeper
    (outer,) = processes.children(first.process.pid)
    inner = [os.pidfd_open(pid) for pid in processes.children(outer)]
    os.kill(first.process.pid, signal.SIGKILL)
    assert (await box.exec("true")).status == "infra_error"
    assert select.select(inner, [], [], 30)[0] == inner
    other = await backend.create(BoxSpec())
    where, _ = cgroups.find()
    assert where is not None
    assert first.hello["owner"] not in cgroups.owners(where)
    assert (await other.exec("true")).status == "ok"
    for fd in inner:
        os.close(fd)


SERVICE = """
import asyncio, os, sys
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.keeper import processes
from palestra.sandbox.types import BoxSpec

async def main():
    backend = Bubblewrap()
    await backend.start()
    boxes = [await backend.create(BoxSpec()) for _ in range(3)]
    runs = [asyncio.ensure_future(box.exec("setsid sleep 600 & while :; do :; done", timeout=600)) for box in boxes]
    for box in boxes:
        await box._channel.call({"op": "list", "path": "."}, 30)
    keeper = backend._keeper
    print(keeper.process.pid, keeper.hello["owner"], *processes.descendants(keeper.process.pid), flush=True)
    await asyncio.gather(*runs)

asyncio.run(main())
"""


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], int, str, list[int]]]:
    """A service with three busy boxes; its keeper, its owner's name, and the boxes' processes as pidfds."""
    process = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keeper, owner, *boxes = process.stdout.readline().split()
    fds = [os.pidfd_open(int(pid)) for pid in boxes]
    yield process, int(keeper), owner, fds
    for fd in fds:
        os.close(fd)
    process.kill()
    process.wait()
    process.stdout.close()


def _all_end(fds: list[int]) -> None:
    for fd in fds:
        assert select.select([fd], [], [], 60)[0], "it lives on"


@ci
def test_a_service_that_is_killed_leaves_nothing(service: tuple[subprocess.Popen[str], int, str, list[int]]) -> None:
    process, keeper, owner, boxes = service
    keeping = os.pidfd_open(keeper)
    assert len(boxes) >= 6
    process.kill()
    _all_end([*boxes, keeping])
    os.close(keeping)
    where, _ = cgroups.find()
    assert where is not None
    assert owner not in cgroups.owners(where)


@ci
async def test_what_both_left_is_reaped_and_the_living_are_not_touched(
    backend: Bubblewrap, service: tuple[subprocess.Popen[str], int, str, list[int]]
) -> None:
    process, keeper, owner, boxes = service
    box = await backend.create(BoxSpec())
    where, _ = cgroups.find()
    assert where is not None
    await backend.reap()
    assert owner in cgroups.owners(where), "it lives"
    process.kill()
    os.kill(keeper, signal.SIGKILL)
    process.wait()
    _all_end(boxes)
    assert owner in cgroups.owners(where), "nobody was left to clear up"
    assert await backend.reap() >= 3
    assert owner not in cgroups.owners(where)
    assert (await box.exec("echo untouched")).stdout == b"untouched\n"
    await box.close()


ORDINARY = """
import asyncio, os
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.types import MIB, BoxSpec, Limits

async def main():
    backend = Bubblewrap()
    await backend.start()
    held = backend.enforced()
    print(os.getuid(), held.memory, held.cpu, held.pids, len(held.notes))
    box = await backend.create(BoxSpec(limits=Limits(memory_bytes=64 * MIB, pids=16)))
    print((await box.exec("id -un; cat /etc/shadow; ls /proc | grep -c '^[0-9]'")).stdout)
    hog = await box.run_python("x = [bytearray(8 << 20) for _ in range(40)]; import time; time.sleep(60)", timeout=30)
    print(hog.status)
    forks = "import os, time\\ntry:\\n  while os.fork() or time.sleep(60): pass\\nexcept BlockingIOError: print('refused')"
    bomb = await box.run_python(forks, timeout=30)
    print(bomb.status, bomb.stdout)
    print((await box.exec("echo on")).stdout)
    await backend.close()

asyncio.run(main())
"""


@ci
def test_an_ordinary_user_has_boxes_too() -> None:
    """With the system's interpreter: nothing else of this checkout has to be readable for others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(
            ROOT / "sandbox", Path(folder) / "palestra" / "sandbox", ignore=shutil.ignore_patterns("__pycache__")
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-P", "-B", "-c", ORDINARY],
            capture_output=True, text=True, timeout=100, user=64321, group=64321, extra_groups=[],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/", check=False,
        )  # fmt: skip
    assert done.stderr == ""
    first, seen, hog, bomb, last = done.stdout.splitlines()
    assert first == "64321 watched none kernel 3"
    assert seen == str(b"box\n4\n") or seen.startswith("b'box\\n")
    assert hog == "oom"
    assert bomb == "ok b'refused\\n'"
    assert last == str(b"on\n")
