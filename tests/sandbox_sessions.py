"""What sessions keep, whatever is done to them: cases that every backend runs.

Each `check_*` takes a box that nothing ran in and closes what it opens. Those named in `CONFINED_ONLY` harm a machine that does not hold
them. Only bash, Python, sleep and cat are taken to be in the box.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from palestra.sandbox.types import Box, ExecResult, Session, SessionKind

CONFINED_ONLY = ("check_a_full_disk_keeps_bash", "check_a_fork_bomb_is_over_with_its_session")

SAYS_HELLO: dict[SessionKind, str] = {"python": "print('hel' + 'lo')", "bash": "echo hel''lo"}
COUNTS_FOR_EVER: dict[SessionKind, str] = {"python": "while True: pass", "bash": "while :; do :; done"}
LIVES = """
import os, sys
try: os.kill(int(sys.stdin.read()), 0)
except ProcessLookupError: print('gone')
except PermissionError: print('lives')
else: print('lives')
"""


@asynccontextmanager
async def opened(box: Box, kind: SessionKind) -> AsyncIterator[Session]:
    """A session, closed at the end."""
    session = await box.open_session(kind)
    try:
        yield session
    finally:
        await session.close()


async def said(session: Session, code: str, within: float = 20) -> str:
    """What a cell that must be well wrote."""
    result = await session.run(code, timeout=within)
    assert (result.status, result.exit_code, session.alive) == ("ok", 0, True), (code[:200], result)
    return result.text


async def still_whole(session: Session) -> None:
    """The session goes on, and nothing of what was before is in the next cell's output."""
    assert await said(session, SAYS_HELLO[session.kind]) == "hello\n"


async def is_lost(box: Box, session: Session, result: ExecResult) -> None:
    """The session is over, says so from here on, and the box is well."""
    assert result.status == "session_lost", result
    assert result.message
    await is_over(box, session)


async def is_over(box: Box, session: Session) -> None:
    """No later cell is run, and another session and a plain run are as ever."""
    assert not session.alive
    again = await session.run(SAYS_HELLO[session.kind])
    assert (again.status, again.text) == ("session_lost", ""), again
    async with opened(box, session.kind) as other:
        await still_whole(other)
    assert (await box.exec(["/bin/bash", "-c", "echo well"])).text == "well\n"


async def lives(box: Box, pid: str) -> bool:
    """Whether a process of the box is there."""
    result = await box.run_python(LIVES, stdin=pid.strip().encode())
    assert result.text in ("gone\n", "lives\n"), result
    return result.text == "lives\n"


async def check_state_stays(box: Box) -> None:
    async with opened(box, "python") as python, opened(box, "bash") as bash:
        await said(python, "import os\nx = 20\ndef twice(n): return 2 * n\nos.chdir('/')")
        await said(bash, "cd /; A=42; twice() { echo $(($1 * 2)); }; export B=there")
        assert await said(python, "twice(x) + 2") == "42\n"
        assert await said(python, "_, os.getcwd()") == "(42, '/')\n"
        assert await said(bash, "twice 21; echo $A $PWD; bash -c 'echo \"$B\"'") == "42\n42 /\nthere\n"


async def check_python_is_a_prompt(box: Box) -> None:
    async with opened(box, "python") as session:
        assert await said(session, "1; None; 'a'") == "'a'\n"
        assert await said(session, "None") == ""
        assert await said(session, "import sys\nsys.displayhook = lambda value: print('<', value, '>')\n5") == "< 5 >\n"
        await said(session, "sys.displayhook = sys.__displayhook__")
        await said(session, "def half(n):\n    return 1 / n\n")
        wrong = await session.run("print('first')\nhalf(0)")
        assert (wrong.status, wrong.exit_code, wrong.stdout) == ("nonzero", 1, b"first\n")
        trace = wrong.stderr.decode()
        assert "    return 1 / n\n" in trace, trace
        assert '  File "<cell 6>", line 2, in <module>\n    half(0)\n' in trace, trace
        assert trace.count("File ") == 2, "frames of ours are in it"
        assert (await session.run("half(")).stderr.endswith(b"SyntaxError: '(' was never closed\n")
        await said(session, "from __future__ import annotations")
        assert await said(session, "def f(a: absent): pass\nf.__annotations__") == "{'a': 'absent'}\n"
        await still_whole(session)


async def check_modules_are_imported_from_the_working_folder(box: Box) -> None:
    await box.put("made_here.py", b"value = 'mine'\n")
    async with opened(box, "python") as session:
        assert await said(session, "import made_here; made_here.value") == "'mine'\n"


UNFINISHED = {
    "cat <<END\nhalf": "ok",
    "echo 'open": "nonzero",
    'x="': "nonzero",
    "if true; then": "nonzero",
    "echo a \\": "ok",
    "f() {": "nonzero",
    "# only this": "ok",
    "": "ok",
    "echo $((1": "nonzero",
}


async def check_unfinished_text_ends_with_its_cell(box: Box) -> None:
    async with opened(box, "bash") as session:
        for code, status in UNFINISHED.items():
            result = await session.run(code)
            assert (result.status, session.alive) == (status, True), (code, result)
            await still_whole(session)
    async with opened(box, "python") as session:
        for code in ("'''open", "if True:", "(", "x = \\", "\tx\n  y"):
            result = await session.run(code)
            assert (result.status, session.alive) == ("nonzero", True), (code, result)
            await still_whole(session)


async def check_exit_is_told(box: Box) -> None:
    async with opened(box, "python") as session:
        for code, status in (("raise SystemExit", 0), ("exit(3)", 3), ("import sys; sys.exit('why')", 1), ("exit(-1)", 255)):  # fmt: skip
            result = await session.run(code)
            assert (result.exit_code, session.alive) == (status, True), result
        await still_whole(session)
    async with opened(box, "bash") as session:
        assert (await session.run("(exit 7)")).exit_code == 7
        result = await session.run("echo bye; exit 3")
        assert (result.exit_code, result.stdout) == (3, b"bye\n")
        await is_lost(box, session, result)


async def check_errexit_is_the_shells_own(box: Box) -> None:
    async with opened(box, "bash") as session:
        result = await session.run("set -e; echo before; false; echo never")
        assert (result.exit_code, result.stdout) == (1, b"before\n")
        await is_lost(box, session, result)


async def check_another_program_takes_its_place(box: Box) -> None:
    programs: dict[SessionKind, str] = {
        "bash": "exec {0}",
        "python": "import os; words = '{0}'.split(' ', 2)\nos.execvp(words[0], words)",
    }
    for kind, code in programs.items():
        async with opened(box, kind) as session:
            result = await session.run(code.format("echo Linux"))
            assert (result.exit_code, result.stdout[:5]) == (0, b"Linux"), result
            await is_lost(box, session, result)
        async with opened(box, kind) as session:
            result = await session.run(code.format("sleep 100"), timeout=0.4)
            assert result.status == "timeout", result
            await is_over(box, session)


async def check_closed_descriptors(box: Box) -> None:
    async with opened(box, "python") as session:
        await is_lost(box, session, await session.run("import os; os.closerange(0, 200)"))
    async with opened(box, "python") as session:
        await is_lost(box, session, await session.run("import os\nfor fd in range(3, 20): os.dup2(1, fd)"))
    async with opened(box, "bash") as session:
        assert await said(session, "exec 8>&- 9>&- 7<&-; echo still") == "still\n"
        await still_whole(session)
        await said(session, "exec >&- 2>&-")
        assert (await session.run("echo unheard")).text == ""
    async with opened(box, "bash") as session:
        every = 'for ((i = 0; i < 200; i++)); do eval "exec $i>&-" 2>/dev/null; done'
        await is_lost(box, session, await session.run(every))


async def check_forged_reports_end_the_session(box: Box) -> None:
    forged = "f" * 32 + " 0"
    async with opened(box, "bash") as session:
        every = f"for i in 3 4 5 6 7 8 9 10 11 12 13 14 15; do eval \"echo '{forged}' >&$i\" 2>/dev/null; done; true"
        await is_lost(box, session, await session.run(every))
    for what in (f"b'{forged}\\n'", "b'x' * 100000", "b'\\n'", "b'\\xff\\0 0\\n'"):
        async with opened(box, "python") as session:
            every = f"import os\nfor fd in range(3, 30):\n    try: os.write(fd, {what})\n    except OSError: pass"
            await is_lost(box, session, await session.run(every))


async def check_a_later_cell_cannot_be_answered_in_advance(box: Box) -> None:
    """Code that knows its own cell's token may answer that cell, and no other."""
    early = (
        "import os, sys\nframe = sys._getframe()\nwhile 'head' not in frame.f_locals: frame = frame.f_back\n"
        "token = frame.f_locals['head'][:32]\nos.write(3, token + b' 0\\n'{})"
    )
    async with opened(box, "python") as session:
        first = await session.run(early.format("") + "\nimport time; time.sleep(0.3)\nraise SystemExit(9)")
        assert first.status in ("ok", "session_lost"), first
        second = await session.run("print('second')\nraise SystemExit(5)")
        assert (second.status, second.exit_code) != ("ok", 0), second
        assert second.status == "session_lost", second
        await is_over(box, session)
    async with opened(box, "python") as session:
        # Many at once: the first answers this cell, the others are nobody's.
        await session.run(early.format(" * 50"))
        await is_lost(box, session, await session.run("print('second')"))
    async with opened(box, "python") as session:
        later = (
            "\nimport threading, time\ndef forge():\n    time.sleep(0.2)\n    os.write(3, token + b' 0\\n')"
            "\nthreading.Thread(target=forge).start()"
        )
        await said(session, early.partition("os.write")[0] + later)
        await is_lost(box, session, await session.run("time.sleep(5); raise SystemExit(5)"))


async def check_sessions_are_apart(box: Box) -> None:
    async with opened(box, "python") as one, opened(box, "bash") as two, opened(box, "python") as three:
        await said(one, "mine = 1")
        assert (await three.run("mine")).status == "nonzero"
        await said(two, "A=2")
        forged = (
            "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'f' * 32 + b' 0\\n')\n    except OSError: pass"
        )
        assert (await one.run(forged)).status == "session_lost"
        assert (await box.exec(["/bin/bash", "-c", "exit 4"])).exit_code == 4
        assert await said(two, "echo $A") == "2\n"
        await still_whole(three)


async def check_the_numbers_are_ours(box: Box) -> None:
    async with opened(box, "python") as session:
        await said(session, "import os, time\ntime.monotonic = time.time = lambda: 0.0\nnap = time.sleep")
        result = await session.run("nap(0.9); os.write(1, b'12345'); os.write(2, b'678')", max_output=4)
        assert (result.stdout, result.stderr, result.bytes_total, result.truncated) == (b"1234", b"678", 10, True)
        # Counted from when the agent hears that the cell has begun, which on a busy machine is a little later.
        assert result.usage.wall_s >= 0.3
        assert (await session.run("sum(range(20_000_000))")).usage.cpu_s >= 0.05
    async with opened(box, "bash") as session:
        result = await session.run("echo '{\"wall_s\": 0}'; sleep 0.9")
        assert (result.bytes_total, result.usage.wall_s >= 0.3) == (14, True)


INTERRUPTED: dict[str, tuple[SessionKind, str]] = {
    "a loop": ("bash", "while :; do :; done; echo never"),
    "a program": ("bash", "sleep 100; echo never"),
    "a program that tells": ("bash", "python3 -c 'import time; time.sleep(100)'; echo never"),
    "a pipeline": ("bash", "cat /dev/zero | cat >/dev/null; echo never"),
    "a loop in a pipeline": ("bash", "while :; do :; done | cat; echo never"),
    "a function in a loop": ("bash", "nap() { sleep 0.01; }; while :; do nap; done; echo never"),
    "a subshell": ("bash", "(while :; do :; done); echo never"),
    "a substitution": ("bash", "x=$(sleep 100); echo never"),
    "a wait": ("bash", "sleep 0.9 & wait; echo never"),
    "python's loop": ("python", "while True: pass"),
    "python's sleep": ("python", "import time; time.sleep(100)"),
    "python's child": ("python", "import subprocess; subprocess.run(['sleep', '100'])"),
    "python's threads": ("python", "import threading\nlock = threading.Lock(); lock.acquire()\nlock.acquire()"),
}


async def _each_interrupted(box: Box, stop: Callable[[Session, str], Awaitable[ExecResult]]) -> None:
    async with opened(box, "bash") as bash, opened(box, "python") as python:
        await said(bash, "A=42")
        await said(python, "A = 42")
        for name, (kind, code) in INTERRUPTED.items():
            session = bash if kind == "bash" else python
            result = await stop(session, code)
            assert b"never" not in result.stdout, name
            assert session.alive, (name, result)
            assert await said(session, "echo $A" if kind == "bash" else "A") == "42\n", name


async def check_ctrl_c_ends_the_cell_and_keeps_the_session(box: Box) -> None:
    async def stop(session: Session, code: str) -> ExecResult:
        mark = {"bash": "echo begun\n", "python": "print('begun')\n"}[session.kind]
        running = asyncio.create_task(session.run(mark + code, timeout=15))
        while not running.done():  # one that comes before the cell has begun is for nobody
            await asyncio.wait([running], timeout=0.15)
            await session.interrupt()
        result = await running
        assert (result.status, result.exit_code) == ("nonzero", 130), (code, result)
        return result

    await _each_interrupted(box, stop)


async def check_a_deadline_keeps_what_gives_in(box: Box) -> None:
    async def stop(session: Session, code: str) -> ExecResult:
        result = await session.run(code, timeout=0.15)
        assert result.status == "timeout", (code, result)
        return result

    await _each_interrupted(box, stop)


async def check_ctrl_c_before_a_cell_has_begun_is_for_that_cell(box: Box) -> None:
    longs: dict[SessionKind, str] = {"python": "x = '" + "y" * 400_000 + "'\n", "bash": "x='" + "y" * 400_000 + "'\n"}
    for kind, code in COUNTS_FOR_EVER.items():
        async with opened(box, kind) as session:
            for _ in range(5):
                running = asyncio.create_task(session.run(longs[kind] + code, timeout=60))
                await asyncio.sleep(0)
                await session.interrupt()
                result = await running
                assert (result.status, result.exit_code, session.alive) == ("nonzero", 130, True), result
                await still_whole(session)


async def check_ctrl_c_at_any_moment_leaves_the_session_whole(box: Box) -> None:
    for kind in SAYS_HELLO:
        async with opened(box, kind) as session:
            for moment in range(60):
                running = asyncio.create_task(session.run(SAYS_HELLO[kind]))
                await asyncio.sleep(moment * 2e-5)
                await session.interrupt()
                result = await running
                assert (result.status, session.alive) in (("ok", True), ("nonzero", True)), result
                await still_whole(session)


async def check_ctrl_c_between_cells_does_nothing(box: Box) -> None:
    for kind in SAYS_HELLO:
        async with opened(box, kind) as session:
            await session.interrupt()
            await still_whole(session)
            await session.interrupt()
            await still_whole(session)


async def check_what_ignores_ctrl_c_is_killed(box: Box) -> None:
    stubborn: tuple[tuple[SessionKind, str], ...] = (
        ("python", "import time\nprint('begun')\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass"),
        ("python", "import signal\nprint('begun')\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass"),
        ("bash", "echo begun; trap '' INT; while :; do :; done"),
    )
    for kind, code in stubborn:
        async with opened(box, kind) as session:
            result = await session.run(code, timeout=0.3)
            assert (result.status, result.stdout) == ("timeout", b"begun\n"), result
            assert 0.3 <= result.usage.wall_s < 8
            await is_over(box, session)


async def check_it_ends_itself(box: Box) -> None:
    ends: tuple[tuple[SessionKind, str, int | None, int | None], ...] = (
        ("python", "import os; os._exit(7)", 7, None),
        ("python", "import os; os.kill(os.getpid(), 9)", None, 9),
        ("python", "import os; os.abort()", None, 6),
        ("bash", "kill -9 $$", None, 9),
    )
    for kind, code, exit_code, signal in ends:
        async with opened(box, kind) as session:
            result = await session.run(code)
            assert (result.exit_code, result.signal) == (exit_code, signal), (code, result)
            await is_lost(box, session, result)


async def check_it_ends_itself_between_cells(box: Box) -> None:
    async with opened(box, "python") as session:
        await said(session, "import os, threading; threading.Timer(0.05, os._exit, [4]).start()")
        await asyncio.sleep(0.5)
        await is_lost(box, session, await session.run("1"))


async def check_it_stops_itself(box: Box) -> None:
    stops: dict[SessionKind, str] = {"python": "import os; os.kill(os.getpid(), 19)", "bash": "kill -STOP $$"}
    for kind, code in stops.items():
        async with opened(box, kind) as session:
            assert (await session.run(code, timeout=0.3)).status == "timeout"
            if session.alive:
                await still_whole(session)


async def check_a_fork_that_comes_back_is_not_the_session(box: Box) -> None:
    async with opened(box, "python") as session:
        await said(session, "import os\nparent = os.getpid()\nchild = os.fork()")
        assert await said(session, "os.getpid() == parent and child > 0") == "True\n"
        await still_whole(session)


async def check_output_of_all_sorts(box: Box) -> None:
    async with opened(box, "python") as session:
        every = bytes(range(256)) * 4
        result = await session.run("import os; n = os.write(1, bytes(range(256)) * 4)")
        assert (result.status, result.stdout, result.bytes_total) == ("ok", every, 1024)
        result = await session.run("import sys; n = sys.stdout.buffer.write(b'\\xff\\xfe\\0caf\\xe9')")
        assert (result.status, result.stdout) == ("ok", b"\xff\xfe\0caf\xe9")
        assert (await session.run("print('\\ud800')")).status == "nonzero"
        await still_whole(session)
    async with opened(box, "bash") as session:
        result = await session.run("printf '\\0\\377\\001no end of line'; printf $'caf\\xe9' >&2")
        assert (result.status, result.stdout, result.stderr) == ("ok", b"\0\xff\x01no end of line", b"caf\xe9")
        await still_whole(session)


async def check_a_line_of_10_mb(box: Box) -> None:
    lines: dict[SessionKind, str] = {
        "python": "print('x' * 10_000_000)",
        "bash": "printf -v line '%10000000s' x; printf '%s\\n' \"$line\"",
    }
    for kind, code in lines.items():
        async with opened(box, kind) as session:
            result = await session.run(code, timeout=60)
            allowed = box.spec.limits.total_output_bytes > 10_000_001
            assert result.status == ("ok" if allowed else "output_limit"), result.status
            assert result.truncated
            assert len(result.stdout) == box.spec.limits.output_bytes
            assert (
                result.bytes_total == 10_000_001 if allowed else result.bytes_total > box.spec.limits.total_output_bytes
            )
            if session.alive:
                await still_whole(session)


async def check_output_without_end(box: Box) -> None:
    floods: dict[SessionKind, str] = {"python": "while True: print('x' * 1000)", "bash": "cat /dev/zero"}
    for kind, code in floods.items():
        async with opened(box, kind) as session:
            result = await session.run(code, timeout=60)
            assert result.status == "output_limit", result.status
            assert result.bytes_total > box.spec.limits.total_output_bytes
            assert session.alive
            await still_whole(session)


async def check_input_is_empty(box: Box) -> None:
    async with opened(box, "python") as session:
        assert b"EOFError" in (await session.run("input()")).stderr
        assert await said(session, "import sys; sys.stdin.read()") == "''\n"
    async with opened(box, "bash") as session:
        assert (
            await said(session, "read x; echo got:$x $?; cat; python3 -c 'import sys; print(sys.stdin.read())'")
            == "got: 1\n\n"
        )
        await still_whole(session)


async def check_deep_recursion(box: Box) -> None:
    async with opened(box, "python") as session:
        result = await session.run("def deeper(): deeper()\ndeeper()")
        assert (result.status, session.alive) == ("nonzero", True)
        assert b"RecursionError" in result.stderr
        await still_whole(session)
    async with opened(box, "bash") as session:
        result = await session.run("FUNCNEST=500; deeper() { deeper; }; deeper")
        assert (result.status, session.alive) == ("nonzero", True)
        await still_whole(session)


async def check_a_cell_of_1_mb(box: Box) -> None:
    text = "x\\é\n\t" * 170_000 + "'\"$(`"
    async with opened(box, "python") as session:
        assert await said(session, f"text = {text!r}\nlen(text)", within=60) == f"{len(text)}\n"
    async with opened(box, "bash") as session:
        quoted = "'" + text.replace("'", "'\\''") + "'"
        assert await said(session, f"text={quoted}; echo ${{#text}}", within=60) == f"{len(text)}\n"


async def check_nul_bytes_in_a_cell(box: Box) -> None:
    for kind in SAYS_HELLO:
        async with opened(box, kind) as session:
            result = await session.run(SAYS_HELLO[kind] + "\0")
            assert (result.status, result.stdout, session.alive) == ("nonzero", b"", True), result
            await still_whole(session)


async def check_background_processes_live_as_long_as_their_session(box: Box) -> None:
    starts: dict[SessionKind, str] = {
        "bash": "sleep 1000 >/dev/null 2>&1 & echo $!",
        "python": "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)",
    }
    async with opened(box, "bash") as witness:
        for kind, code in starts.items():
            async with opened(box, kind) as session:
                pid = (await session.run(code)).stdout.decode()
                assert await lives(box, pid), "a run in the same box must leave it alone"
                assert (await session.run(COUNTS_FOR_EVER[kind], timeout=0.1)).status == "timeout"
                assert kind == "python" or await lives(box, pid), "Ctrl-C is for the foreground"
            assert not await lives(box, pid)
        await still_whole(witness)


async def check_strays_end_with_the_session(box: Box) -> None:
    async with opened(box, "bash") as session:
        stray = (
            "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        print(os.getpid(), flush=True)"
            "\n        os.execvp('sleep', ['sleep', '1000'])\n    os._exit(0)\nos.wait()"
        )
        pid = await said(session, f"python3 -c '{stray.replace(chr(39), chr(34))}'")
        assert await lives(box, pid)
    assert not await lives(box, pid)


async def check_output_between_cells_comes_with_the_next(box: Box) -> None:
    async with opened(box, "bash") as session:
        await said(session, "(sleep 0.2; echo late) & 2>/dev/null")
        await asyncio.sleep(0.7)
        assert (await session.run("echo next")).stdout == b"late\nnext\n"


async def check_a_background_writer_is_drained(box: Box) -> None:
    async with opened(box, "bash") as session:
        first = await session.run("(for ((i = 0; i < 3000; i++)); do printf '%1000s\\n' x; done; : >done) &")
        for _ in range(100):
            if "done" in {entry.name for entry in await box.list(".")}:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the writer was held up")
        result = await session.run("echo next", max_output=1000)
        assert (result.status, len(result.stdout), result.truncated) == ("ok", 1000, True), result.status
        assert first.bytes_total + result.bytes_total >= 3_003_000
        await still_whole(session)


async def check_closing_answers_what_runs(box: Box) -> None:
    for kind, code in COUNTS_FOR_EVER.items():
        session = await box.open_session(kind)
        running = asyncio.create_task(session.run(code))
        await asyncio.sleep(0.2)
        await session.close()
        assert (await running).status == "session_lost"
        await session.close()
        assert (await session.run("1")).status == "session_lost"


async def check_killing_all_ends_sessions(box: Box) -> None:
    async with opened(box, "bash") as bash, opened(box, "python") as python:
        pid = (await bash.run("sleep 1000 & echo $!")).stdout.decode()
        await box.kill_processes()
        assert not await lives(box, pid)
        for session in (bash, python):
            await is_lost(box, session, await session.run("1"))


async def check_a_full_disk_keeps_bash(box: Box) -> None:
    async with opened(box, "bash") as session:
        result = await session.run("cat /dev/zero >/tmp/full; cat /dev/zero >/workspace/full", timeout=60)
        assert result.status == "nonzero", result
        await still_whole(session)
        await said(session, "A=42")
        assert await said(session, "echo $A") == "42\n"


async def check_a_fork_bomb_is_over_with_its_session(box: Box) -> None:
    bombs: dict[SessionKind, str] = {
        "bash": "bomb() { bomb | bomb & }; bomb; sleep 100",
        "python": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    }
    for kind, code in bombs.items():
        session = await box.open_session(kind)
        result = await session.run(code, timeout=1)
        assert result.status in ("timeout", "session_lost", "pids"), result
        await session.close()
        async with opened(box, kind) as other:
            await still_whole(other)
        assert (await box.exec(["/bin/bash", "-c", "echo well"])).text == "well\n"
