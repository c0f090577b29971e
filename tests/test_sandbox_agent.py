"""The agent of a box: its frames against whatever comes, and its runs, on a plain child process without confinement."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.sandbox import bundle
from palestra.sandbox.box import AgentBox
from palestra.sandbox.inside import frames
from palestra.sandbox.inside.bash_session import Bash
from palestra.sandbox.inside.frames import FrameError, Inbox, pack, unpack
from palestra.sandbox.types import BoxFileError, BoxSpec, Limits
from palestra.sandbox.unsafe import UnsafeSubprocess

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
PLAIN = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT | st.binary()
MESSAGES = st.dictionaries(
    TEXT, PLAIN | st.lists(PLAIN, max_size=4) | st.dictionaries(TEXT, PLAIN, max_size=3), max_size=6
)


@given(MESSAGES, st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_messages_arrive_as_they_were_in_pieces_of_any_size(message: dict[str, Any], sizes: list[int]) -> None:
    inbox, data, found = Inbox(), pack(message) * 2, []
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        found += inbox.feed(data[at : at + size])
        at += size
    assert found == [message, message]


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_whatever_comes_is_a_message_or_a_frame_error(body: bytes) -> None:
    with suppress(FrameError):  # any other error fails
        assert isinstance(unpack(body), dict)


@given(MESSAGES, st.data())
@settings(max_examples=200)
def test_a_frame_with_a_changed_byte_is_a_message_or_a_frame_error(
    message: dict[str, Any], data: st.DataObject
) -> None:
    raw = bytearray(pack(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FrameError):
        assert all(isinstance(each, dict) for each in Inbox().feed(bytes(raw)))


@pytest.mark.parametrize(
    "body",
    [
        b"d\xff\xff\xff\xff",
        b"d\0\0\0\1s\0\0\0\1al\0\0\x4e\x21",
        b"d\0\0\0\1s\0\0\0\1a" + b"l\0\0\0\1" * 2000 + b"n",
        b"d\0\0\0\1s\0\0\0\1ab\x7f\xff\xff\xff",
        b"d\0\0\0\1i" + b"\0" * 8 + b"n",
        b"l\0\0\0\0",
        pack({})[4:] + b"n",
        b"",
    ],
    ids=["many names", "many values", "deep", "long", "a name of another kind", "no dict", "bytes behind", "nothing"],
)
def test_frames_are_bounded(body: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(body)


def test_a_frame_too_long_is_refused_by_its_head_alone() -> None:
    with pytest.raises(FrameError, match="at most"):
        Inbox().feed(frames.HEAD.pack(frames.MAX_FRAME + 1))


@pytest.mark.parametrize("value", [object(), 2**63, "\ud800", {1: {2}}, b"x" * (frames.MAX_FRAME + 1)])
def test_what_cannot_travel_is_a_frame_error_before_it_is_sent(value: Any) -> None:
    with pytest.raises(FrameError):
        pack({"value": value})


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=200))
@settings(max_examples=200, deadline=None)
def test_a_cell_of_bash_is_one_line_that_ends_its_quotes(code: str) -> None:
    typed = Bash().cell(b"f" * 32, code)
    cell, report, rest = typed.split(b"\n")
    assert rest == b""
    assert report == b"builtin echo " + b"f" * 32 + b" $? >&9"
    word = cell.partition(b"; eval ")[2].removesuffix(b" </dev/null 9>&-")
    assert word[:2] + word[-1:] == b"$''"
    inner = word[2:-1].replace(b"\\\\", b"")
    assert inner.count(b"'") == inner.count(b"\\'")


@pytest.mark.walk
def test_bash_reads_back_what_is_typed(tmp_path: Path) -> None:
    every = "".join(map(chr, range(1, 256))) + "\\\\'\\n\n\\'$(x)`y`\u20ac"
    typed = Bash().cell(b"f" * 32, f"printf %s '{every.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'")
    script = tmp_path / "typed"
    script.write_bytes(typed.split(b"\n")[0] + b"\n")
    done = subprocess.run(
        ["bash", "-c", f". {script} 9>&2"], capture_output=True, timeout=20, env={"LANG": "C.UTF-8"}, check=True
    )
    assert (done.stdout, done.stderr) == (every.encode(), b"f" * 32 + b" begun\n")


@pytest.fixture
async def box() -> AsyncIterator[AgentBox]:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    yield await backend.create(BoxSpec(limits=Limits(total_output_bytes=1 << 20, output_bytes=4096)))
    await backend.close()


async def agent_pid(box: AgentBox) -> int:
    return int((await box.run_python("import os; print(os.getppid())")).stdout)


def children(pid: int) -> dict[int, str]:
    """State of each process below this one."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            state, parent = (
                (path / "stat").read_text().rpartition(")")[2].split()[:2] if path.name.isdigit() else ("", -1)
            )
        except OSError:
            continue
        if int(parent) == pid:
            found[int(path.name)] = state
    return found


@pytest.mark.walk
async def test_commands(box: AgentBox) -> None:
    await box.put("here/note", b"found")
    assert (await box.exec(["cat", "note"], cwd="here")).stdout == b"found"
    result = await box.exec('echo "$X $0" >&2; exit 3', env={"X": "given"})
    assert (result.status, result.exit_code, result.stderr) == ("nonzero", 3, b"given /bin/bash\n")
    result = await box.exec(["cat"], stdin=bytes(range(256)) * 8192, max_output=4 << 20)
    assert (result.status, result.bytes_total) == ("output_limit" if result.bytes_total > 4 << 20 else "ok", 256 * 8192)
    assert (await box.exec(["/nowhere/at-all"])).exit_code == 127
    await box.put("plain", b"no program")
    plain = await box.exec(["./plain"])
    assert (plain.exit_code, b"plain" in plain.stderr) == (126, True)
    assert (await box.exec(["true"], cwd="nowhere")).exit_code == 127
    assert (await box.exec("kill -TERM $$")).signal == signal.SIGTERM
    assert (await box.exec("kill -HUP $$")).signal == signal.SIGHUP, "the agent ignores it, its children do not"
    assert (await box.exec(["true"], stdin=b"x" * (1 << 20))).status == "ok", "input that nobody reads"
    names = (await box.exec([sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])).stdout
    assert names == b"['0', '1', '2', '3']\n", "3 is the listing itself"


@pytest.mark.walk
async def test_python_of_its_own(box: AgentBox) -> None:
    first = await box.run_python("import sys\nsys.kept = 1\nprint(__name__, sys.argv, sys.stdin.read())", stdin=b"in")
    assert first.stdout == b"__main__ ['-c'] in\n"
    assert (await box.run_python("import sys; print(hasattr(sys, 'kept'))")).stdout == b"False\n"
    assert (await box.run_python("def f(a: 1 + 1): pass\nprint(f.__annotations__)")).stdout == b"{'a': 2}\n"
    for code, status, text in (
        ("exit(3)", 3, b""),
        ("raise SystemExit('why')", 1, b"why\n"),
        ("1 / 0", 1, b"ZeroDivisionError"),
        ("def", 1, b"SyntaxError"),
        ("import atexit; atexit.register(print, 'at the end')", 0, b""),
        ("import os; os.close(1); os.close(2); raise SystemExit(4)", 4, b""),
        ("'\\0'", 0, b""),
    ):
        result = await box.run_python(code)
        assert (result.exit_code, text in result.stderr) == (status, True), (code, result)
    threads = (
        "import atexit, threading, time\natexit.register(print, 'end')\nthreading.Timer(0.1, print, ['thread']).start()"
    )
    end = await box.run_python(threads)
    assert end.stdout == b"thread\nend\n"


@pytest.mark.walk
async def test_deadlines_and_output_are_bounded_and_partial_output_comes_back(box: AgentBox) -> None:
    late = await box.exec("echo out; echo err >&2; sleep 100", timeout=0.3)
    assert (late.status, late.stdout, late.stderr, late.signal) == ("timeout", b"out\n", b"err\n", 9)
    assert 0.3 <= late.usage.wall_s < 5
    flood = await box.exec(["cat", "/dev/zero"])
    assert (flood.status, flood.truncated, len(flood.stdout)) == ("output_limit", True, 4096)
    assert flood.bytes_total > 1 << 20
    assert (await box.exec(["cat"], stdin=b"x" * 9000)).bytes_total == 9000


@pytest.mark.walk
async def test_a_run_is_over_with_its_main_process_and_nothing_of_it_stays(box: AgentBox) -> None:
    daemon = await box.exec("(setsid sleep 1000 &); sleep 1000 & echo started")
    assert (daemon.status, daemon.stdout) == ("ok", b"started\n")
    assert daemon.usage.wall_s < 5, "its pipes are still held"
    assert children(await agent_pid(box)) == {}


@pytest.mark.walk
async def test_orphans_are_collected_while_a_run_goes_on(box: AgentBox) -> None:
    agent = await agent_pid(box)
    session = await box.open_session("bash")
    running = asyncio.create_task(
        box.exec("for ((i = 0; i < 40; i++)); do (true &); done; : >done; sleep 100", timeout=5)
    )
    for _ in range(200):
        zombies = [pid for pid, state in children(agent).items() if state == "Z"]
        if not zombies and "done" in {entry.name for entry in await box.list()}:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError(f"{len(zombies)} are left")
    await box.kill_processes()
    assert (await running).signal == 9
    assert not (await session.run("1")).stdout


@pytest.mark.walk
@pytest.mark.parametrize(
    "request_",
    [
        {"op": "nothing"},
        {},
        {"op": 7},
        {"op": "exec"},
        {"op": "exec", "argv": [], "keep": 1, "most": 1, "timeout": 1.0, "stdin": 5},
        {"op": "exec", "argv": "true", "keep": "x", "most": 1, "timeout": 1.0},
        {"op": "cell", "session": "one"},
        {"op": "open", "kind": "perl"},
        {"op": "open", "kind": ["bash"]},
        {"op": "read", "path": 5},
        {"op": "read", "path": "no\0such", "offset": 0, "size": 1},
        {"op": "write", "path": "x", "offset": -1, "data": b"x", "mode": 0o600},
        {"op": "list", "path": None},
        {"op": "shut"},
    ],
    ids=str,
)
async def test_a_bad_request_is_answered_and_the_agent_goes_on(box: AgentBox, request_: dict[str, Any]) -> None:
    reply = await box._channel.call(request_, 10)
    assert reply.get("error") or reply["why"] == "lost" or reply["exit"] != 0, reply
    assert (await box.exec("echo well")).stdout == b"well\n"


@pytest.mark.walk
async def test_one_run_at_a_time(box: AgentBox) -> None:
    bounds = {"keep": 100, "most": 100, "timeout": 5.0}
    first = asyncio.create_task(box._channel.call({"op": "exec", "argv": "read x </dev/zero; sleep 1", **bounds}, 10))
    await asyncio.sleep(0.05)
    second = await box._channel.call({"op": "exec", "argv": "true", **bounds}, 10)
    assert "runs already" in second["error"]
    await box.kill_processes()
    assert (await first)["why"] == "timeout"


@pytest.mark.walk
async def test_an_answer_that_is_too_long_is_told(box: AgentBox) -> None:
    await box.run_python("import os\nfor i in range(3000): os.symlink('x' * 4095, '%0250d' % i)", timeout=60)
    with pytest.raises(BoxFileError, match="no answer"):
        await box.list()
    assert (await box.exec("echo well")).stdout == b"well\n"


@pytest.mark.ci  # an agent's descriptors are for root's eyes alone
async def test_the_agent_keeps_no_descriptors(box: AgentBox) -> None:
    agent = await agent_pid(box)

    def held() -> int:
        return len(os.listdir(f"/proc/{agent}/fd"))

    before = held()
    for kind in ("python", "bash"):
        for code in ("1", "exit 3", "import os; os._exit(1)"):
            session = await box.open_session(kind)  # type: ignore[arg-type]
            await session.run(code)
            await session.close()
    await box.exec(["/nowhere"])
    await box.exec("sleep 9", timeout=0.1)
    await box.run_python("1")
    assert held() == before


@pytest.mark.walk
@pytest.mark.parametrize(
    "last", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1x"], ids=["it leaves", "a long frame", "no frame"]
)
def test_all_ends_with_the_supervisor_even_while_something_runs(last: bytes) -> None:
    """A supervisor that leaves or talks nonsense is gone, and the box with it."""
    ours, theirs = socket.socketpair()
    argv = bundle.command(sys.executable, theirs.fileno(), theirs.fileno())
    with subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={}, cwd="/") as process:
        theirs.close()
        ours.settimeout(20)
        setup = {"op": "setup", "mode": "tree", "limits": {}, "preload": [], "packages": None, "home": "/tmp", "id": 1}
        ours.sendall(bundle.sources() + pack({**setup, "env": {"PATH": "/usr/bin:/bin"}}))
        assert unpack(_frame(ours))["pid"] == process.pid
        run = {"op": "exec", "argv": "sleep 1000 & sleep 1000", "keep": 10, "most": 10, "timeout": 100.0, "id": 2}
        ours.sendall(pack(run) + pack({"op": "open", "kind": "bash", "id": 3}))
        assert unpack(_frame(ours))["session"] == 1
        started = set(children(process.pid))
        assert len(started) == 2
        ours.sendall(last)
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(20) == 0
        ours.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def _frame(sock: socket.socket) -> bytes:
    head = sock.recv(4, socket.MSG_WAITALL)
    return sock.recv(frames.length(head), socket.MSG_WAITALL)
