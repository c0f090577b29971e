"""Grading: what crosses, what counts, and that nothing a model writes makes a wrong answer pass.

The code here is harmless to its machine, so that it can run in boxes without walls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from palestra.sandbox import calls as calls_module
from palestra.sandbox.artifacts import TESTS, ArtifactError, check_names, read_artifacts
from palestra.sandbox.calls import Calls, Candidate
from palestra.sandbox.checks import Case, Cases, Command, same_lines
from palestra.sandbox.choose import make
from palestra.sandbox.grading import Grade, grade
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import (
    Box,
    BoxSpec,
    ExecResult,
    Limits,
    SandboxError,
    SandboxUnavailableError,
)
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests.fakes.boxes import Boxes, MemoryBox

ADD = b"def add(a, b):\n    return a + b\n"
WRONG = b"def add(a, b):\n    return a - b\n"
CHECK = b"from solution import add\nassert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
UNIT = b"""import unittest
from solution import add
class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""


class Passes:
    """A check that always passes, and remembers its boxes."""

    def __init__(self, faults: int = 0) -> None:
        self.faults, self.boxes = faults, list[Box]()

    async def run(self, box: Box, timeout: float) -> Grade:  # noqa: ASYNC109 - the interface
        self.boxes.append(box)
        if len(self.boxes) <= self.faults:
            raise SandboxError("the box was lost")
        return Grade(True, "")


class TestWithoutProcesses:
    """Order, faults and names, on boxes of memory."""

    @pytest_asyncio.fixture
    async def backend(self) -> Boxes:
        return Boxes()

    @pytest_asyncio.fixture
    async def pool(self, backend: Boxes) -> AsyncIterator[Pool]:
        pool = Pool(backend, BoxSpec(), boxes=3, warm=0, memory_bytes=1 << 40)
        yield pool
        await pool.close()
        assert {box.id for box in backend.living} <= {"memory-1"}

    async def test_processes_die_first_and_the_tests_come_last_into_another_box(
        self, backend: Boxes, pool: Pool
    ) -> None:
        box = await backend.create(BoxSpec())
        box.files = {"solution.py": ADD, "conftest.py": b"", "other.txt": b""}
        check = Passes()
        found = await grade(box, pool, artifacts=["solution.py"], tests={"t.py": CHECK}, check=check)
        assert (found.verdict, found.tries) == (True, 1)
        assert box.log == ["kill", "get solution.py"]
        fresh = backend.made[-1]
        assert fresh is not box
        assert check.boxes == [fresh]
        assert fresh.files == {"solution.py": ADD, f"{TESTS}/t.py": CHECK}
        assert fresh.log == ["put solution.py", f"put {TESTS}/t.py"]
        assert box.alive
        assert not fresh.alive

    async def test_a_fault_is_tried_again_in_another_box_and_ends_as_no_verdict(
        self, backend: Boxes, pool: Pool
    ) -> None:
        check = Passes(faults=2)
        found = await grade(None, pool, artifacts={"a": b""}, check=check)
        assert (found.verdict, found.tries) == (True, 3)
        assert len({box.id for box in check.boxes}) == 3
        found = await grade(None, pool, artifacts={"a": b""}, check=Passes(faults=3))
        assert (found.verdict, found.tries) == (None, 3)
        assert "in 3 tries; the last one: the box was lost" in found.reason

    async def test_a_box_that_dies_under_each_check_is_a_fault_and_never_a_verdict(
        self, backend: Boxes, pool: Pool
    ) -> None:
        async def dies(box: MemoryBox, what: object, stdin: bytes) -> ExecResult:
            box.lose()
            return ExecResult("infra_error", message="gone")

        backend.answer = dies  # type: ignore[method-assign]
        cases = Cases(["x"], [Case(b"", b"")])
        for check in (cases, Command(["t.py"]), Command(["./t"], harness="none")):
            found = await grade(None, pool, artifacts={"a": b""}, check=check, tries=2)
            assert (found.verdict, found.tries) == (None, 2), check

    async def test_no_box_within_the_wait_is_no_verdict_and_a_spec_that_cannot_be_had_is_an_error(
        self, backend: Boxes, pool: Pool
    ) -> None:
        held = [await pool.acquire() for _ in range(3)]
        found = await grade(None, pool, artifacts={"a": b""}, check=Passes(), wait=0.01)
        assert found.verdict is None
        assert "no box within 0.01 s" in found.reason
        for box in held:
            await pool.release(box)
        huge = BoxSpec(Limits(memory_bytes=1 << 50))
        with pytest.raises(SandboxUnavailableError):
            await grade(None, pool, artifacts={"a": b""}, check=Passes(), spec=huge)

    async def test_work_that_is_not_there_fails_and_work_in_a_lost_box_is_no_verdict(
        self, backend: Boxes, pool: Pool
    ) -> None:
        box = await backend.create(BoxSpec())
        found = await grade(box, pool, artifacts=["solution.py"], check=Passes())
        assert (found.verdict, found.reason) == (False, "solution.py: there is no such file")
        box.lose()
        found = await grade(box, pool, artifacts=["solution.py"], check=Passes())
        assert found.verdict is None

    @pytest.mark.parametrize(
        ("odd", "reason"),
        [
            ({"a": "link"}, "a: a link, where a regular file"),
            ({"a": "other"}, "a: a other, where a regular file"),
            ({}, "a: there is no such file"),
        ],
    )
    async def test_only_regular_files_cross(self, backend: Boxes, odd: Mapping[str, str], reason: str) -> None:
        box = await backend.create(BoxSpec())
        box.odd = dict(odd)
        with pytest.raises(ArtifactError, match=reason):
            await read_artifacts(box, ["a"])

    async def test_folders_on_the_way_are_no_links_and_all_files_together_are_bounded(self, backend: Boxes) -> None:
        box = await backend.create(BoxSpec())
        box.odd = {"out": "link"}
        with pytest.raises(ArtifactError, match="out on the way is a link"):
            await read_artifacts(box, ["out/passwd"])
        box.odd = {}
        box.files = {"x/a": b"12345", "x/b": b"12345"}
        assert await read_artifacts(box, ["x/a", "x/b"], 10) == box.files
        with pytest.raises(ArtifactError, match="x/b: 5 bytes, where all artifacts may have 9"):
            await read_artifacts(box, ["x/a", "x/b"], 9)

    @pytest.mark.parametrize(
        "name",
        [
            "conftest.py",
            "src/conftest.py",
            "sitecustomize.py",
            "usercustomize.py",
            "pytest.ini",
            "setup.cfg",
            "tox.ini",
            "pyproject.toml",
            "lib/x.pth",
            "x.dist-info/entry_points.txt",
            "__pycache__/solution.pyc",
            "CONFTEST.py",
            "../x",
            "/etc/passwd",
            "a//b",
            "./a",
            ".",
            "",
            f"{TESTS}/t.py",
        ],
    )
    async def test_names_that_steer_or_lead_elsewhere_are_refused(self, pool: Pool, name: str) -> None:
        with pytest.raises(ValueError, match="artifact"):
            await grade(None, pool, artifacts={name: b""}, check=Passes())

    def test_a_steering_name_crosses_where_it_is_allowed(self) -> None:
        check_names(["pyproject.toml"], allowed=["pyproject.toml"])
        with pytest.raises(ValueError, match="steer"):
            check_names(["pyproject.toml"])

    def test_python_by_its_exit_status_is_refused(self) -> None:
        with pytest.raises(ValueError, match="could end it with 0"):
            Command(["/usr/bin/python3", "t.py"], harness="none")
        with pytest.raises(ValueError, match="needs argv"):
            Command()

    def test_lines_are_compared_without_blanks_at_their_ends(self) -> None:
        assert same_lines(b"1 2\n3\n", b"1 2 \r\n3\n\n")
        assert not same_lines(b"1 2\n3\n", b"1 2\n\n3\n")
        assert not same_lines(b"1", b"")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Pool]:
    """A pool of real agents, unconfined."""
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    pool = Pool(backend, BoxSpec(), boxes=4, warm=0, memory_bytes=1 << 40)
    yield pool
    await pool.close()
    await backend.close()


async def by_script(pool: Pool, work: bytes, test: bytes = CHECK, timeout: float = 20.0) -> Grade:  # noqa: ASYNC109
    return await grade(
        None,
        pool,
        artifacts={"solution.py": work},
        tests={"t.py": test},
        check=Command(["t.py"]),
        timeout=timeout,
        tries=1,
    )


def check_add(call: Candidate) -> None:
    assert call("add", 1, 2) == 3
    assert call("add", -1, 1) == 0


async def by_calls(pool: Pool, work: bytes, timeout: float = 20.0) -> Grade:  # noqa: ASYNC109
    check = Calls("solution.py", check_add)
    return await grade(None, pool, artifacts={"solution.py": work}, check=check, timeout=timeout, tries=1)


async def by_cases(pool: Pool, work: bytes, timeout: float = 20.0) -> Grade:  # noqa: ASYNC109
    check = Cases(["python3", "solution.py"], [Case(b"1 2\n", b"3\n"), Case(b"-1 1\n", b"0\n")], case_timeout=timeout)
    return await grade(None, pool, artifacts={"solution.py": work}, check=check, tries=1)


FORGERIES = {
    "exits with 0 when it is imported": b"import os\nos._exit(0)\n",
    "sys.exit(0)": b"import sys\nsys.exit(0)\n",
    "prints that it passed": WRONG + b"print('PASSED'); print('1 passed in 0.01s'); print('OK')\n",
    "prints on every descriptor": WRONG
    + b"import os\nfor fd in range(64):\n    try: os.write(fd, b'PASSED\\n')\n    except OSError: pass\n",
    "exits with 0 from atexit": WRONG + b"import atexit, os\natexit.register(os._exit, 0)\n",
    "patches exits and hooks": WRONG
    + b"import builtins, sys, os\n"
    + b"sys.exit = builtins.exit = builtins.quit = lambda *a: os._exit(0)\nsys.excepthook = lambda *a: os._exit(0)\n"
    + b"builtins.print = lambda *a, **k: None\n",
    "raises what ends interpreters": b"raise SystemExit(0)\n",
    "exits with 0 when it is called": b"import os\ndef add(a, b):\n    os._exit(0)\n",
    "raises SystemExit when it is called": b"def add(a, b):\n    raise SystemExit(0)\n",
    "rewrites the tests": WRONG
    + b"import os, glob\n"
    + b"for path in glob.glob('palestra-tests/*'):\n    os.chmod(path, 0o600); open(path, 'w').write('')\n",
    "closes all descriptors": WRONG + b"import os\nos.closerange(0, 256)\n",
    "patches the runner's names": WRONG
    + b"import __main__\nfor n in list(vars(__main__)): setattr(__main__, n, lambda *a, **k: True)\n",
}


@pytest.mark.walk
@pytest.mark.asyncio(loop_scope="module")
class TestForgeries:
    """Each is wrong, and tries to pass."""

    @pytest.mark.parametrize("name", FORGERIES)
    async def test_by_script_unittest_and_calls(self, real: Pool, name: str) -> None:
        work = FORGERIES[name]
        unit = grade(
            None,
            real,
            artifacts={"solution.py": work},
            tests={"test_add.py": UNIT},
            check=Command(harness="unittest"),
            tries=1,
        )
        found = await asyncio.gather(by_script(real, work), unit, by_calls(real, work), by_cases(real, work))
        assert [each.verdict for each in found] == [False] * 4, found

    async def test_right_work_passes_all_of_them(self, real: Pool) -> None:
        program = b"a, b = map(int, input().split())\nprint(a + b)\n"
        unit = grade(
            None,
            real,
            artifacts={"solution.py": ADD},
            tests={"test_add.py": UNIT},
            check=Command(harness="unittest"),
        )
        found = await asyncio.gather(by_script(real, ADD), unit, by_calls(real, ADD), by_cases(real, program))
        assert [each.verdict for each in found] == [True] * 4, found
        assert (found[2].passed, found[3].passed) == (2, 2)

    async def test_an_object_that_equals_everything_does_not_pass_calls(self, real: Pool) -> None:
        work = b"class Any(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef add(a, b): return Any()\n"
        assert (await by_calls(real, work)).verdict is False
        liar = b"class Any:\n    __eq__ = lambda s, o: True\n    __repr__ = lambda s: '__import__(\"os\")'\ndef add(a, b): return Any()\n"
        found = await by_calls(real, liar)
        assert found.verdict is False
        assert "no literal" in found.reason

    async def test_a_test_that_catches_everything_cannot_make_ended_work_pass(self, real: Pool) -> None:
        def lenient(call: Candidate) -> None:
            for _ in range(3):
                try:
                    call("add", 1, 2)
                except Exception:  # noqa: BLE001 - as tests do
                    continue

        work = FORGERIES["exits with 0 when it is called"]
        found = await grade(None, real, artifacts={"solution.py": work}, check=Calls("solution.py", lenient), tries=1)
        assert found.verdict is False


@pytest.mark.walk
@pytest.mark.asyncio(loop_scope="module")
class TestRealBoxes:
    """What the checks do with what work does."""

    async def test_what_the_model_left_running_cannot_change_the_work_after_it_was_taken(self, real: Pool) -> None:
        async with real.box() as box:
            await box.put("solution.py", WRONG)
            session = await box.open_session("bash")
            loop = "(while :; do printf 'def add(a, b): return a + b\\n' > solution.py; printf pass > result; sleep 0.01; done) &"
            await session.run(loop)
            await box.put("result", b"fail")
            found = await grade(
                box, real, artifacts=["solution.py"], tests={"t.py": CHECK}, check=Command(["t.py"]), tries=1
            )
            assert found.verdict in (True, False)  # whichever text was there when its processes were killed
            await box.put("solution.py", WRONG)
            found = await grade(
                box, real, artifacts=["solution.py"], tests={"t.py": CHECK}, check=Command(["t.py"]), tries=1
            )
            assert found.verdict is False
            assert await box.get("solution.py") == WRONG

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            ("ln -s /etc/passwd solution.py", "a link"),
            ("mkfifo solution.py", "a other"),
            ("mkdir solution.py", "a folder"),
            ("truncate -s 60M solution.py", "62914560 bytes, where all artifacts may have 16777216"),
            (": ", "no such file"),
        ],
    )
    async def test_what_is_no_small_regular_file_does_not_cross(self, real: Pool, make: str, reason: str) -> None:
        async with real.box() as box:
            assert (await box.exec(make)).status == "ok"
            found = await grade(box, real, artifacts=["solution.py"], check=Passes())
            assert found.verdict is False
            assert reason in found.reason

    async def test_a_folder_that_is_a_link_does_not_cross(self, real: Pool) -> None:
        async with real.box() as box:
            await box.exec("ln -s /etc etc")
            found = await grade(box, real, artifacts=["etc/passwd"], check=Passes())
            assert (found.verdict, found.reason) == (False, "etc/passwd: etc on the way is a link, no folder")

    async def test_planted_files_that_were_not_declared_do_not_cross(self, real: Pool) -> None:
        async with real.box() as box:
            for name in ("conftest.py", "sitecustomize.py", "unittest.py", "t.py", f"{TESTS}/t.py"):
                await box.put(name, b"import os\nos._exit(0)\n")
            await box.put("solution.py", WRONG)
            found = await grade(
                box, real, artifacts=["solution.py"], tests={"t.py": CHECK}, check=Command(["t.py"]), tries=1
            )
            assert found.verdict is False

    async def test_work_cannot_stand_for_a_module_of_the_standard_library_or_of_the_tests(self, real: Pool) -> None:
        fake = b"import os\ndef dumps(x):\n    os._exit(0)\nwanted = None\n"
        found = await grade(
            None,
            real,
            artifacts={"solution.py": WRONG, "json.py": fake, "helper.py": fake},
            tests={
                "t.py": b"import json, helper\n" + CHECK + b"json.dumps(helper.wanted)\n",
                "helper.py": b"wanted = 3\n",
            },
            check=Command(["t.py"]),
            tries=1,
        )
        assert found.verdict is False
        assert "AssertionError" in found.reason

    async def test_loops_end_at_the_deadline_as_failures(self, real: Pool) -> None:
        work = b"def add(a, b):\n    while True: pass\n"
        program = b"while True: pass\n"
        found = await asyncio.gather(
            by_script(real, work, timeout=0.7), by_calls(real, work, 0.7), by_cases(real, program, 0.7)
        )
        assert [each.verdict for each in found] == [False] * 3, found

    async def test_tests_that_cannot_begin_are_a_fault_of_ours(self, real: Pool) -> None:
        found = await grade(
            None, real, artifacts={"solution.py": ADD}, tests={}, check=Command(["missing.py"]), tries=1
        )
        assert found.verdict is None
        assert "could not begin" in found.reason

    async def test_no_test_at_all_is_no_success(self, real: Pool) -> None:
        empty = Command(harness="unittest")
        found = await grade(None, real, artifacts={"a.py": b""}, tests={"test_a.py": b""}, check=empty, tries=1)
        assert found.verdict is False
        with pytest.raises(ValueError, match="no cases"):
            await grade(None, real, artifacts={"a.py": b""}, check=Cases(["x"], []), tries=1)

    async def test_a_program_that_is_no_python_is_judged_by_its_exit_status(self, real: Pool) -> None:
        script = b"#!/bin/sh\ngrep -q 42 answer.txt\n"
        check = Command(["sh", f"{TESTS}/t.sh"], harness="none")
        for answer, verdict in ((b"42\n", True), (b"41\n", False)):
            found = await grade(None, real, artifacts={"answer.txt": answer}, tests={"t.sh": script}, check=check)
            assert found.verdict is verdict

    async def test_all_cases_are_counted_where_that_is_wished(self, real: Pool) -> None:
        program = b"a, b = map(int, input().split())\nprint(abs(a) + b)\n"
        cases = [Case(b"1 2", b"3"), Case(b"-1 1", b"0"), Case(b"2 2", b"4\n")]
        check = Cases("python3 solution.py", cases, stop_early=False)
        found = await grade(None, real, artifacts={"solution.py": program}, check=check)
        assert (found.verdict, found.passed, found.total) == (False, 2, 3)
        assert found.reason.startswith("case 2:")

    async def test_a_flood_of_output_and_one_that_is_too_long_are_wrong_answers(self, real: Pool) -> None:
        program = b"print(3)\nprint('x' * 5_000_000)\n"
        assert (await by_cases(real, program)).verdict is False
        chatty = b"import sys\nsys.stdout.write('x' * 1_000_000)\n" + ADD + b"    \n"
        chatty = chatty.replace(b"    return", b"    print('y' * 500_000)\n    return")
        assert (await by_calls(real, chatty)).verdict is True
        large = b"def add(a, b):\n    return 'x' * 1_000_000\n"
        assert (await by_calls(real, large)).verdict is False

    async def test_exceptions_state_and_literals_cross_in_calls(self, real: Pool) -> None:
        work = b"""
kept = []
def keep(x):
    kept.append(x)
    return kept
def fail(kind):
    raise {"value": ValueError, "own": type("Own", (Exception,), {}), "exit": SystemExit}[kind]("no")
def echo(*args, **kwargs):
    return args, kwargs
def infinite():
    return float("inf")
"""

        def judge(call: Candidate) -> None:
            assert call("keep", 1) == [1]
            assert call("keep", "\n'\"\u20ac\x00") == [1, "\n'\"\u20ac\x00"]
            with pytest.raises(ValueError):
                call("fail", "value")
            with pytest.raises(RuntimeError):
                call("fail", "own")
            with pytest.raises(RuntimeError):
                call("fail", "exit")
            with pytest.raises(AttributeError):
                call("absent")
            given = ((1, (2.5, None, True)), {"k": {"a": [b"\xff", {1, 2}]}})
            assert call("echo", *given[0], **given[1]) == given

        found = await grade(None, real, artifacts={"solution.py": work}, check=Calls("solution.py", judge), tries=1)
        assert found.verdict is True, found.reason
        found = await grade(
            None,
            real,
            artifacts={"solution.py": work},
            check=Calls("solution.py", lambda call: call("infinite")),
            tries=1,
        )
        assert (found.verdict, found.reason) == (False, "infinite: answered with what is no literal")
        with pytest.raises(ValueError, match="no literal"):
            await grade(
                None,
                real,
                artifacts={"solution.py": work},
                check=Calls("solution.py", lambda call: call("echo", object())),
                tries=1,
            )

    async def test_work_that_cannot_be_loaded_fails_with_its_own_words(self, real: Pool) -> None:
        found = await by_calls(real, b"def add(:\n")
        assert found.verdict is False
        assert "SyntaxError" in found.reason

    async def test_a_test_that_never_ends_is_given_up(self, real: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls_module, "LOAD_S", 1.0)
        released = threading.Event()

        def calling(call: Candidate) -> None:
            while True:
                call("add", 1, 2)

        try:
            for judge, reason in ((calling, "no time was left"), (lambda call: released.wait(60), "by the deadline")):
                check = Calls("solution.py", judge)
                found = await grade(None, real, artifacts={"solution.py": ADD}, check=check, timeout=0.5, tries=1)
                assert found.verdict is False
                assert reason in found.reason
        finally:
            released.set()

    async def test_a_cancelled_grade_gives_its_box_back_and_ends_the_tests_thread(self, real: Pool) -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def judge(call: Candidate) -> None:
            loop.call_soon_threadsafe(begun.set)
            try:
                call("add", 1, 2)
            finally:
                loop.call_soon_threadsafe(ended.set)

        work = b"import time\ndef add(a, b):\n    time.sleep(60)\n"
        check = Calls("solution.py", judge)
        task = asyncio.create_task(grade(None, real, artifacts={"solution.py": work}, check=check))
        await asyncio.wait_for(begun.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 20)
        assert real.figures()["in_use"] == 0


@pytest.mark.walk
@pytest.mark.asyncio(loop_scope="module")
async def test_pytest_runs_where_the_box_has_it_and_forgeries_do_not_pass(real: Pool) -> None:
    spec = BoxSpec(packages=pytest.__file__.rpartition("/pytest/")[0])
    test = b"from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n"

    async def verdict(work: bytes, **more: bytes) -> bool | None:
        found = await grade(
            None,
            real,
            artifacts={"solution.py": work},
            tests={"test_add.py": test, **{name.replace("_py", ".py"): data for name, data in more.items()}},
            check=Command(harness="pytest"),
            spec=spec,
            tries=1,
        )
        return found.verdict

    forged = [FORGERIES[name] for name in ("exits with 0 when it is imported", "sys.exit(0)", "prints that it passed")]
    found = await asyncio.gather(verdict(ADD), verdict(WRONG), *(verdict(work) for work in forged))
    assert found == [True, False, False, False, False]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
async def test_boxes_with_walls_grade_alike(name: str) -> None:
    backend = make(name)
    await backend.start()
    packages = BoxSpec(packages=pytest.__file__.rpartition("/pytest/")[0])
    pool = Pool(backend, BoxSpec(), boxes=8, warm=0)
    test = b"from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n"
    try:
        for work, verdict in ((ADD, True), (WRONG, False), (FORGERIES["exits with 0 from atexit"], False)):
            program = b"a, b = map(int, input().split())\n" + work + b"print(add(a, b))\n"
            found = await asyncio.gather(by_script(pool, work), by_calls(pool, work), by_cases(pool, program))
            assert [each.verdict for each in found] == [verdict] * 3, found
        by_pytest = await grade(
            None,
            pool,
            artifacts={"solution.py": ADD},
            tests={"test_add.py": test},
            check=Command(harness="pytest"),
            spec=packages,
        )
        assert by_pytest.verdict is True, by_pytest
    finally:
        await pool.close()
        await backend.close()
