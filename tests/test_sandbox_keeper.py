"""The keeper: starts, ends and clears boxes, tells what it saw, and outlives nobody. Real processes, harmless code."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palestra.sandbox.keeper import folders, owners, processes, users, watchdog
from palestra.sandbox.keeper.boxes import Kept
from palestra.sandbox.keeper.client import KeeperClient, KeeperLostError
from palestra.sandbox.types import BoxSpec, SandboxError, SandboxUnavailableError
from palestra.sandbox.unsafe import UnsafeSubprocess


def _spawn(number: int, script: str, **more: object) -> dict[str, object]:
    return {
        "op": "spawn", "box": number, "mode": "tree", "argv": ["/bin/sh", "-c", script], "files": [], "own_user": 0, "folder": 0,
        "confine": None, "limits": None, "watch": 0, **more,
    }  # fmt: skip


def test_ids_come_from_what_a_namespace_maps() -> None:
    whole = [(0, 4294967295)]
    assert users._range(whole, whole) == (users.FIRST, users.BLOCKS)
    first, blocks = users._range([(0, 65536)], [(0, 65536)])
    assert 0 < first < first + blocks * users.BLOCK < 65535
    assert blocks == 32
    with pytest.raises(OSError, match="maps 1000 ids"):
        users._range([(0, 1000)], whole)


def test_two_keepers_never_share_users() -> None:
    one, two = users.Users(), users.Users()
    mine = {one.take() for _ in range(users.BLOCK)}
    assert len(mine) == users.BLOCK
    assert two.take() not in mine
    with pytest.raises(OSError, match="no more users"):
        one.take()
    one.give(min(mine))
    assert one.take() == min(mine)


def test_folders_of_somebody_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = folders.base()
    assert base == folders.base()
    os.rmdir(base)
    (tmp_path / f"palestra-boxes-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="belongs to somebody else"):
        folders.base()


def test_the_watchdog_kills_the_largest_but_not_the_agent() -> None:
    child = "x = bytearray(48 << 20); print(flush=True); import time; time.sleep(60)"
    agent = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {child!r}])",
        ],
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    agent.stdout.readline()
    told: list[dict[str, object]] = []
    kept = Kept({"box": 3, "mode": "tree", "watch": 512 << 20}, -1)
    kept.pid = agent.pid
    watchdog.look([kept], told.append)
    assert told == []
    kept.watch = 32 << 20
    watchdog.look([kept], told.append)
    assert told == [{"event": "oom", "box": 3}]
    assert agent.wait() == 0, "the agent goes on; its child was killed"
    agent.stdout.close()


@pytest.fixture
async def keeper() -> AsyncIterator[KeeperClient]:
    client = await KeeperClient.start()
    yield client
    await client.close()
    assert owners.start_of(client.process.pid) is None


async def _spawned(keeper: KeeperClient, request: dict[str, object]) -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    reply = await keeper.ask(request, theirs)
    ours.setblocking(False)
    return ours, reply["pid"]


async def _line(sock: socket.socket) -> bytes:
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(sock, 4096)


@pytest.mark.walk
async def test_a_box_has_its_socket_its_files_and_no_environment(keeper: KeeperClient) -> None:
    script = "{ cat <&4; cat <&5; env | grep -v -E '^(PWD|SHLVL|_|OLDPWD)='; ls /proc/self/fd | tr '\\n' ' '; } >&3"
    sock, _ = await _spawned(keeper, _spawn(1, script, files=[b"one ", b"two "]))
    said = b""
    while more := await _line(sock):
        said += more
    assert said.startswith(b"one two ")
    assert set(said.split()[2:]) <= {b"0", b"1", b"2", b"3", b"4", b"5", b"6"}
    assert (await keeper.ask({"op": "kill", "box": 1}))["status"] == 0
    sock.close()


@pytest.mark.walk
async def test_what_cannot_start_says_why(keeper: KeeperClient, tmp_path: Path) -> None:
    sock, _ = await _spawned(keeper, _spawn(1, "", argv=["/no/such/program"]))
    assert await _line(sock) == b""
    reply = await keeper.ask({"op": "kill", "box": 1})
    assert "No such file" in reply["said"] or "No such file" in keeper.said[1]
    sock.close()
    sock, _ = await _spawned(keeper, _spawn(2, "echo first >&2; echo last >&2; exit 3"))
    assert await _line(sock) == b""
    reply = await keeper.ask({"op": "kill", "box": 2})
    assert "first\nlast" in (reply["said"] or keeper.said[2])
    assert os.waitstatus_to_exitcode(reply["status"]) == 3
    sock.close()
    there, _ = await _spawned(keeper, _spawn(3, "read x <&3"))
    ours, theirs = socket.socketpair()
    with pytest.raises(SandboxError, match="a box 3 already"):
        await keeper.ask(_spawn(3, "true"), theirs)
    assert ours.recv(1) == b"", "its socket is closed"
    ours.close()
    there.close()
    assert (await keeper.ask({"op": "kill", "box": 77}))["status"] is None


def test_nothing_but_a_folder_of_boxes_is_ever_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = folders.base()
    mine, other = "1-2-3-4-5", "1-2-3-4-6"
    for owner in (mine, other):
        for number in (1, 2):
            (Path(folders.make(base, owner, number, None)) / "file").write_text("x")
    (tmp_path / "precious").mkdir()
    for where, owner in [
        (base, ""),
        (base, "."),
        (base, ".."),
        (base, "../precious"),
        (base, "1-2-3-4"),
        (str(tmp_path), mine),
    ]:
        for remove in (lambda: folders.remove(where, owner), lambda: folders.remove_box(where, owner, 1)):  # noqa: B023
            with pytest.raises(ValueError, match="no folder of boxes"):
                remove()
    with pytest.raises(FileExistsError):
        folders.make(base, mine, 1, None)
    folders.remove_box(base, mine, 1)
    assert os.listdir(f"{base}/{mine}") == ["2"]
    assert folders.remove(base, mine) == 1
    assert os.listdir(base) == [other]
    assert (tmp_path / "precious").is_dir()


@pytest.mark.walk
async def test_a_folder_that_was_there_before_is_left_alone(keeper: KeeperClient) -> None:
    base, owner = keeper.hello["folders"], keeper.hello["owner"]
    file = Path(folders.make(base, owner, 9, None)) / "file"
    file.write_text("x")
    ours, theirs = socket.socketpair()
    with pytest.raises(SandboxError, match="File exists"):
        await keeper.ask(_spawn(9, "true", folder=1), theirs)
    assert ours.recv(1) == b""
    ours.close()
    assert file.read_text() == "x"


@pytest.mark.walk
async def test_ending_a_box_ends_what_ran_away_from_it(keeper: KeeperClient) -> None:
    script = "setsid sh -c 'sleep 600 & echo $! >&3; exec sleep 600 3>&-' & wait"
    sock, pid = await _spawned(keeper, _spawn(1, script))
    grandchild = int(await _line(sock))
    other, other_pid = await _spawned(keeper, _spawn(2, "exec sleep 600"))
    await keeper.ask({"op": "kill", "box": 1})
    assert owners.start_of(pid) is None
    assert owners.start_of(grandchild) is None
    assert owners.start_of(other_pid) is not None, "another box is not touched"
    assert processes.children(keeper.process.pid) == {other_pid}
    sock.close()
    other.close()


@pytest.mark.walk
async def test_orphans_of_a_box_that_ended_by_itself_are_ended(keeper: KeeperClient) -> None:
    sock, _ = await _spawned(keeper, _spawn(1, "setsid sleep 600 & echo $! >&3; exit 0"))
    orphan = int(await _line(sock))
    await keeper.ask({"op": "kill", "box": 1})
    assert owners.start_of(orphan) is None
    sock.close()


@pytest.mark.walk
async def test_a_keeper_that_is_killed_is_told_to_all(keeper: KeeperClient) -> None:
    sock, _ = await _spawned(keeper, _spawn(1, "read x <&3"))
    pending = keeper.ask({"op": "kill", "box": 1})
    os.kill(keeper.process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await keeper.lost
    with pytest.raises(KeeperLostError):
        await keeper.ask({"op": "kill", "box": 1})
    assert pending.done()
    if pending.exception() is None:
        pending.result()
    sock.close()


@pytest.mark.walk
async def test_boxes_go_on_with_another_keeper() -> None:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    box = await backend.create(BoxSpec())
    assert backend._keeper is not None
    folder = Path(backend._keeper.hello["folders"]) / backend._keeper.hello["owner"]
    run = asyncio.create_task(box.exec("sleep 600", timeout=60))
    os.kill(backend._keeper.process.pid, signal.SIGKILL)
    assert (await run).status == "infra_error"
    other = await backend.create(BoxSpec())
    assert (await other.exec("echo here")).stdout == b"here\n"
    assert not folder.exists(), "what the first one left was removed"
    await backend.close()
    assert not (folder.parent / backend._keeper.hello["owner"]).exists()
    with pytest.raises(SandboxError, match="closed"):
        await backend.create(BoxSpec())


@pytest.mark.walk
async def test_a_spec_that_cannot_be_had_leaves_nothing() -> None:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    with pytest.raises(SandboxUnavailableError, match="no_such_module"):
        await backend.create(BoxSpec(preload=("no_such_module",)))
    with pytest.raises(SandboxUnavailableError, match="no images"):
        await backend.create(BoxSpec(image="x"))
    assert backend._boxes == {}
    assert backend._keeper is not None
    assert processes.children(backend._keeper.process.pid) == set()
    await backend.close()


SERVICE = """
import asyncio, os
from palestra.sandbox.unsafe import UnsafeSubprocess
from palestra.sandbox.types import BoxSpec

async def main():
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    box = await backend.create(BoxSpec())
    run = asyncio.create_task(box.exec("echo $$ > here; sleep 600 & setsid sleep 600", timeout=900))
    path = os.path.join(backend._keeper.hello["folders"], backend._keeper.hello["owner"])
    while True:
        try:
            pid = (await asyncio.to_thread(open(f"{path}/{box.id.rsplit('-')[-1]}/workspace/here").read)).strip()
        except FileNotFoundError:
            pid = ""
        if pid:
            break
        await asyncio.sleep(0.01)
    print(pid, backend._keeper.process.pid, path, flush=True)
    await run

asyncio.run(main())
"""


@pytest.mark.walk
def test_a_service_that_is_killed_leaves_nothing() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    pid, keeper, path = service.stdout.readline().split()
    ended = os.pidfd_open(int(keeper))
    service.kill()
    service.wait()
    assert service.stdout.read() == "", "nobody holds its output any more"
    service.stdout.close()
    os.set_blocking(ended, False)
    import select

    assert select.select([ended], [], [], 60)[0], "the keeper ends"
    os.close(ended)
    assert owners.start_of(int(pid)) is None
    assert not os.path.exists(path)
