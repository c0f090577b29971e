"""Runs: statuses, output, input, deadlines, fresh state."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from pathlib import Path

import pytest

from palestra.sandbox.attacks.scene import survivors
from palestra.sandbox.types import MIB, Backend, Box, BoxSpec, Limits
from tests.sandbox_backends import PACKAGES


def agent_above(pid: int) -> int:
    """The agent whose run this process is."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"palestra_box" in Path(f"/proc/{parent}/cmdline").read_bytes()
    return parent


async def until_found(marker: str) -> int:
    """The process with this in its command line, once it is there."""
    async with asyncio.timeout(20):
        while not (found := survivors(marker)):  # noqa: ASYNC110 - the kernel tells nobody of new processes
            await asyncio.sleep(0.02)
    return found[0]


class RunCases:
    quick_runs = 1000

    async def test_programs_and_shell(self, box: Box) -> None:
        result = await box.exec(["/bin/sh", "-c", "echo out; echo err >&2"])
        assert (result.status, result.exit_code, result.signal) == ("ok", 0, None)
        assert (result.stdout, result.stderr, result.bytes_total, result.truncated) == (b"out\n", b"err\n", 8, False)
        assert (await box.exec("echo $((6 * 7))")).stdout == b"42\n"
        assert (await box.run_python("import sys; print(sys.version_info.major, __name__)")).stdout == b"3 __main__\n"

    async def test_exit_codes_and_signals(self, box: Box) -> None:
        result = await box.exec("exit 7")
        assert (result.status, result.exit_code) == ("nonzero", 7)
        assert (await box.run_python("raise SystemExit(3)")).exit_code == 3
        result = await box.exec("kill -SEGV $$")
        assert (result.status, result.exit_code, result.signal) == ("nonzero", None, signal.SIGSEGV)
        result = await box.exec(["no-such-program"])
        assert (result.status, result.exit_code) == ("nonzero", 127)
        assert b"no-such-program" in result.stderr
        assert (await box.exec("true")).status == "ok"

    async def test_errors_of_python_code_are_its_own(self, box: Box) -> None:
        result = await box.run_python("def broken(:")
        assert (result.status, result.exit_code) == ("nonzero", 1)
        assert b"SyntaxError" in result.stderr
        result = await box.run_python("print('before', end=''); 1 / 0")
        assert (result.status, result.stdout) == ("nonzero", b"before")
        assert b"ZeroDivisionError" in result.stderr

    async def test_output_is_bytes(self, box: Box) -> None:
        every = bytes(range(256))
        result = await box.run_python(
            "import os; os.write(1, bytes(range(256))); os.write(2, bytes(range(255, -1, -1)))"
        )
        assert (result.stdout, result.stderr) == (every, every[::-1])

    async def test_stdin(self, box: Box) -> None:
        data = os.urandom(MIB)
        result = await box.exec("wc -c", stdin=data)
        assert result.stdout.strip() == str(MIB).encode()
        assert (await box.run_python("print(repr(input()))", stdin=b"a line\n")).stdout == b"'a line'\n"
        assert (await box.exec("true", stdin=data)).status == "ok"  # nobody reads it
        assert (await box.exec("cat")).stdout == b""

    async def test_environment_and_folder(self, box: Box) -> None:
        result = await box.exec("echo $FROM_THE_SPEC $MINE; pwd", env={"MINE": "a b"}, cwd="/usr")
        assert result.stdout == b"yes a b\n/usr\n"
        assert (await box.exec("echo -$MINE-")).stdout == b"--\n"
        assert (await box.run_python("import os; print(os.getcwd())", cwd="/usr")).stdout == b"/usr\n"
        assert (await box.exec("true", cwd="/no/such/folder")).status == "nonzero"

    async def test_what_is_kept_and_what_is_counted(self, box: Box) -> None:
        code = "import os\nfor _ in range(100): os.write(1, b'x' * 1000)\nos.write(2, b'y' * 500)"
        result = await box.run_python(code, max_output=1500)
        assert (len(result.stdout), len(result.stderr), result.truncated) == (1500, 500, True)
        assert (result.status, result.bytes_total) == ("ok", 100_500)
        result = await box.run_python(code, max_output=0)
        assert (result.stdout, result.truncated, result.bytes_total) == (b"", True, 100_500)

    async def test_too_much_output_is_stopped(self, box: Box) -> None:
        result = await box.run_python("import os\nwhile True: os.write(1, b'x' * 65536)", timeout=20)
        assert (result.status, result.truncated) == ("output_limit", True)
        assert result.stdout == b"x" * box.spec.limits.output_bytes
        assert (await box.exec("true")).status == "ok"

    async def test_a_deadline_ends_a_run_and_its_output_is_there(self, box: Box) -> None:
        result = await box.exec("echo before; sleep 60; echo after", timeout=0.5)
        assert (result.status, result.stdout, result.exit_code) == ("timeout", b"before\n", None)
        assert 0.4 < result.usage.wall_s < 10
        result = await box.run_python("import os\nos.write(1, b'before')\nwhile True: pass", timeout=0.5)
        assert (result.status, result.stdout) == ("timeout", b"before")
        assert result.usage.cpu_s > 0

    async def test_what_a_run_leaves_running_is_ended_and_not_waited_for(self, box: Box) -> None:
        marker = f"palestra-left-{secrets.token_hex(8)}"
        code = f"import os\nif os.fork() == 0: os.execv('/bin/sleep', ['{marker}', '60'])\nprint('over')"
        result = await box.run_python(code, timeout=20)
        assert (result.status, result.stdout) == ("ok", b"over\n")
        assert survivors(marker) == []

    async def test_calls_at_once_wait_their_turn_and_deadlines_begin_with_the_run(self, box: Box) -> None:
        runs = [box.exec(f"echo {number}; sleep 0.2", timeout=1.5) for number in range(12)]
        results = await asyncio.gather(*runs)
        assert [result.status for result in results] == ["ok"] * 12
        assert [result.stdout.strip() for result in results] == [str(number).encode() for number in range(12)]

    async def test_many_quick_runs(self, box: Box) -> None:
        for number in range(self.quick_runs):
            result = await box.run_python(f"print({number})")
            assert (result.status, result.stdout) == ("ok", b"%d\n" % number)

    async def test_runs_share_no_state(self, box: Box) -> None:
        await box.run_python(
            "import builtins, sys; builtins.left = 1; sys.modules['json'] = None; x = 1; import os; os.environ['LEFT'] = '1'"
        )
        code = "import builtins, os, json; print(hasattr(builtins, 'left'), 'x' in globals(), os.environ.get('LEFT'))"
        assert (await box.run_python(code)).stdout == b"False False None\n"
        drawn = {(await box.run_python("import random; print(random.random())")).stdout for _ in range(5)}
        assert len(drawn) == 5

    async def test_nonsense_is_refused(self, box: Box) -> None:
        with pytest.raises(ValueError, match="empty"):
            await box.exec([])
        with pytest.raises(ValueError, match="max_output"):
            await box.exec("true", max_output=1 << 30)
        with pytest.raises(ValueError, match="timeout"):
            await box.exec("true", timeout=0)
        assert (await box.exec(["/bin/echo", "a\0b"])).status == "nonzero"
        assert (await box.exec("true")).status == "ok"

    async def test_a_box_that_is_killed_from_outside_is_a_fault_of_ours(self, backend: Backend) -> None:
        box = await backend.create(self.spec)  # type: ignore[attr-defined] # of the suite
        marker = f"palestra-killed-{secrets.token_hex(8)}"
        code = f"import os; os.execv('/bin/sleep', ['{marker}', '60'])"
        run = asyncio.create_task(box.run_python(code, timeout=60))
        os.kill(agent_above(await until_found(marker)), signal.SIGKILL)
        result = await run
        assert result.status == "infra_error"
        assert result.message
        assert not box.alive
        assert (await box.exec("true")).status == "infra_error"
        await box.close()
        assert survivors(marker) == []

    async def test_numpy_is_there_when_code_begins(self, backend: Backend) -> None:
        box = await backend.create(BoxSpec(preload=("numpy",), packages=PACKAGES))
        try:
            first = "import sys; loaded = 'numpy' in sys.modules; import numpy; print(loaded, numpy.random.rand(), numpy.ones(3).sum())"
            results = [await box.run_python(first) for _ in range(3)]
            assert [result.status for result in results] == ["ok"] * 3, results[0].text
            words = [result.stdout.split() for result in results]
            assert all(loaded == b"True" and total == b"3.0" for loaded, _, total in words)
            assert len({drawn for _, drawn, _ in words}) == 3
        finally:
            await box.close()


class ConfinedRuns:
    counts = True
    """Whether what the kernel did to the box can be read out here."""

    async def test_too_much_memory(self, box: Box) -> None:
        code = "import os\nos.write(1, b'before')\nheld = [b'x' * (8 << 20) for _ in range(100)]\nprint('held')"
        result = await box.run_python(code, timeout=30)
        assert result.stdout == b"before"
        assert result.status == ("oom" if self.counts else "nonzero")
        if self.counts:
            assert result.usage.oom_kills > 0
            assert (result.usage.peak_bytes or 0) > 100 * MIB
        assert (await box.exec("true")).status == "ok"

    async def test_a_process_that_ends_for_memory_while_the_main_one_goes_on(self, box: Box) -> None:
        code = (
            "import os\nif os.fork() == 0:\n    held = [b'x' * (8 << 20) for _ in range(100)]\nprint(os.wait()[1] != 0)"
        )
        result = await box.run_python(code, timeout=30)
        assert (result.status, result.stdout) == ("ok", b"True\n")
        assert bool(result.usage.oom_kills) == self.counts

    async def test_too_many_processes(self, box: Box) -> None:
        code = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(30)\nprint('all there')"
        result = await box.run_python(code, timeout=30)
        assert result.stdout == b""
        assert result.status == ("pids" if self.counts else "nonzero")
        assert (await box.exec("true")).status == "ok"

    async def test_what_it_is_like_in_there(self, box: Box) -> None:
        code = "import json, os; print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), os.uname().nodename, os.getcwd()]))"
        uid, gid, groups, node, folder = json.loads((await box.run_python(code)).stdout)
        assert 0 not in (uid, gid, *groups)
        assert "" not in (node, folder)
        assert (await box.exec("ls /root || ls /home")).stdout == b""

    async def test_limits_are_the_specs(self, backend: Backend) -> None:
        box = await backend.create(BoxSpec(limits=Limits(memory_bytes=512 * MIB, open_files=40)))
        try:
            code = "held = b'x' * (300 << 20)\nimport resource; print(len(held) >> 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
            assert (await box.run_python(code)).stdout == b"300 40\n"
        finally:
            await box.close()
