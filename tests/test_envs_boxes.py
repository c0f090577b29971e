"""The sandbox as environments have it: leases, what a fault becomes, and that nobody waits for himself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from palestra.envs import background, boxes
from palestra.envs.boxes import Boxes
from palestra.envs.episodebox import EpisodeBox
from palestra.envs.sandboxes import SandboxConfig
from palestra.envs.types import EnvError, ToolError
from palestra.sandbox.calls import Calls
from palestra.sandbox.grading import Grade
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import (
    Backend,
    Box,
    BoxProtocolError,
    BoxSpec,
    ExecResult,
    SandboxError,
    SandboxUnavailableError,
)
from tests.fakes.boxes import Boxes as MemoryBoxes
from tests.fakes.boxes import MemoryBox


class Says:
    """A check with a verdict of its own."""

    def __init__(self, *verdicts: bool | None) -> None:
        self.verdicts, self.files = list(verdicts), dict[str, bytes]()

    async def run(self, box: Box, timeout: float) -> Grade:  # noqa: ASYNC109 - the interface
        assert isinstance(box, MemoryBox)
        self.files = dict(box.files)
        if (verdict := self.verdicts.pop(0)) is None:
            raise SandboxError("the box was lost")
        return Grade(verdict, "so it is")


@pytest.fixture
def memory() -> MemoryBoxes:
    return MemoryBoxes()


@pytest.fixture
def two(memory: MemoryBoxes) -> Iterator[Boxes]:
    """At most two boxes of memory at a time."""

    async def start(section: SandboxConfig) -> tuple[Backend, Pool]:
        pool = Pool(memory, BoxSpec(), boxes=2, warm=0, memory_bytes=1 << 40)
        await pool.start()
        return memory, pool

    made = Boxes(SandboxConfig(), start)
    yield made
    made.close()
    assert not memory.living


def answers(memory: MemoryBoxes, result: ExecResult, *, breaks: bool = False) -> None:
    async def answer(box: MemoryBox, what: object, stdin: bytes) -> ExecResult:
        if breaks:
            box.lose()
        return result

    memory.answer = answer  # type: ignore[method-assign]


class TestLeases:
    def test_after_failures_and_forgotten_boxes_the_pool_has_its_full_size(self, two: Boxes) -> None:
        for _ in range(6):
            with pytest.raises(RuntimeError, match="a fault"), two.open(wait_s=5):
                raise RuntimeError("a fault")
        for _ in range(6):
            two.open(wait_s=5)
        with two.open(wait_s=5), two.open(wait_s=5):
            assert two.figures()["in_use"] == 2

    def test_no_box_within_the_wait_is_a_fault_that_says_where_they_are(self, two: Boxes) -> None:
        with two.open(), two.open(), pytest.raises(EnvError, match="2 of at most 2 boxes are in use"):
            two.open(wait_s=0.01)

    def test_a_box_that_was_given_back_runs_nothing_more(self, two: Boxes) -> None:
        box = two.open()
        box.close()
        box.close()
        with pytest.raises(EnvError, match="given back"):
            box.exec("true")

    def test_a_start_that_fails_is_a_fault_and_is_tried_again(self, memory: MemoryBoxes) -> None:
        tries = []

        async def start(section: SandboxConfig) -> tuple[Backend, Pool]:
            tries.append(section)
            raise SandboxUnavailableError("no bubblewrap here: apt-get install bubblewrap")

        made = Boxes(SandboxConfig(boxes=3), start)
        for _ in range(2):
            with pytest.raises(EnvError, match="starting: no bubblewrap here"):
                made.open()
        assert [section.boxes for section in tries] == [3, 3]
        assert made.figures() == {}
        made.close()

    def test_a_backend_whose_pool_cannot_start_is_closed(
        self, memory: MemoryBoxes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed = []

        async def close() -> None:
            closed.append(True)

        async def make_backend(section: SandboxConfig) -> Any:
            return memory

        def make_pool(section: SandboxConfig, backend: Backend) -> Pool:
            raise SandboxUnavailableError("no room for one box")

        monkeypatch.setattr(memory, "close", close)
        monkeypatch.setattr(boxes, "make_backend", make_backend)
        monkeypatch.setattr(boxes, "make_pool", make_pool)
        with pytest.raises(EnvError, match="no room for one box"):
            Boxes(SandboxConfig()).open()
        assert closed == [True]


class TestFaults:
    def test_a_lost_box_is_the_sandbox_s_fault(self, two: Boxes, memory: MemoryBoxes) -> None:
        with two.open() as box:
            memory.made[-1].lose()
            for lost in (lambda: box.exec("true"), lambda: box.run_python("1"), lambda: box.put("a", b"")):
                with pytest.raises(EnvError, match="the box went away"):
                    lost()

    def test_a_file_that_is_not_there_is_told_to_the_model(self, two: Boxes) -> None:
        with two.open() as box:
            with pytest.raises(ToolError, match="absent: no such file"):
                box.get("absent")
            box.put("there", b"x")
            assert box.get("there") == b"x"

    def test_how_code_ends_is_no_fault_and_a_box_that_it_broke_says_so(self, two: Boxes, memory: MemoryBoxes) -> None:
        answers(memory, ExecResult("nonzero", 3))
        with two.open() as box:
            assert box.exec("exit 3").exit_code == 3
            assert box.broken == ""
            answers(memory, ExecResult("timeout", message="the box was destroyed"), breaks=True)
            assert box.run_python("while True: pass").status == "timeout"
            assert box.broken == "the box was destroyed"
            assert box.grade(["a"], Says(True)) == Grade(False, "the box was destroyed")

    def test_a_box_that_talks_nonsense_is_broken_by_what_ran_in_it(
        self, two: Boxes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def get(box: MemoryBox, path: str, *, max_bytes: int = 0) -> bytes:
            raise BoxProtocolError("half an answer")

        monkeypatch.setattr(MemoryBox, "get", get)
        with two.open() as box:
            with pytest.raises(ToolError, match="half an answer"):
                box.get("a")
            assert box.broken == "half an answer"

    def test_a_deadline_of_ours_is_a_fault(self, two: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
        async def put(box: MemoryBox, path: str, data: bytes, *, mode: int = 0) -> None:
            raise background.DeadlineError("not done after 60 s")

        monkeypatch.setattr(MemoryBox, "put", put)
        with two.open() as box, pytest.raises(EnvError, match="writing a file: not done"):
            box.put("a", b"")

    def test_the_folder_of_a_box_has_one_name_everywhere(self, two: Boxes, memory: MemoryBoxes) -> None:
        answers(memory, ExecResult("ok", 0, stdout=b"/somewhere/7/workspace\n"))
        with two.open() as box:
            box.learn_home()
            said = ExecResult("ok", 0, stdout=b"/somewhere/7/workspace/a /somewhere/7/tmp/b /somewhere/70")
            assert box.text(said) == "/workspace/a /tmp/b /somewhere/70"


class TestGrading:
    def test_the_worker_s_box_goes_before_the_grader_s_comes(self, two: Boxes, memory: MemoryBoxes) -> None:
        with two.open(), two.open() as box:  # all there are
            box.put("solution.py", b"work")
            memory.made[-1].files["other.py"] = b"not declared"
            check = Says(True)
            assert box.grade(["solution.py"], check).verdict is True
            assert check.files == {"solution.py": b"work"}
            assert memory.made[1].log[-2:] == ["kill", "get solution.py"]

    def test_work_that_is_not_there_fails(self, two: Boxes) -> None:
        with two.open() as box:
            found = box.grade(["solution.py"], Says(True))
        assert (found.verdict, found.reason) == (False, "solution.py: there is no such file")

    def test_faults_are_tried_again_and_no_verdict_is_a_fault(self, two: Boxes) -> None:
        assert two.grade({"a": b""}, Says(None, None, False)).verdict is False
        with pytest.raises(EnvError, match="no verdict in 3 tries; the last one: the box was lost"):
            two.grade({"a": b""}, Says(None, None, None))
        assert two.figures()["in_use"] == 0


def test_equal_sections_share_boxes_and_nothing_is_started_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boxes, "_made", {})
    monkeypatch.setattr(boxes, "_section", SandboxConfig())
    usual = boxes.shared()
    boxes.configure(SandboxConfig(boxes=3))
    other = boxes.shared()
    assert other is not usual
    boxes.configure(SandboxConfig(boxes=3))
    assert boxes.shared() is other
    assert (usual.figures(), other.figures(), other.section.boxes) == ({}, {}, 3)
    boxes.close_all()


@pytest.fixture(scope="module")
def real() -> Iterator[Boxes]:
    """Of whatever backend works here."""
    made = Boxes(SandboxConfig(boxes=3, warm=1))
    yield made
    made.close()


@pytest.mark.walk
class TestRealBoxes:
    def test_sessions_files_and_verdicts(self, real: Boxes) -> None:
        with real.open() as box:
            session = box.session("python")
            assert session.run("x = 20").status == "ok"
            assert session.run("x + 1").stdout == b"21\n"
            assert box.session("bash").run("echo $((6 * 7))").stdout == b"42\n"
            assert box.text(box.exec("pwd")) == "/workspace\n"
            box.run_python("open('solution.py', 'w').write('def f(x): return -x')")
            found = box.grade(["solution.py"], Calls("solution.py", lambda call: call("f", 3) == -3))
            assert found.verdict is True

    def test_a_forked_child_has_no_boxes_of_its_parent(self, real: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(boxes, "_made", {"its parent's": real})
        with real.open() as box:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    box.exec("true")
                except EnvError as error:
                    status = 0 if "forked" in str(error) and not boxes._made else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert box.exec("true").status == "ok"


@pytest.fixture(scope="module")
def unsafe() -> Iterator[Boxes]:
    """No sandbox at all: what runs here is harmless."""
    made = Boxes(SandboxConfig(backend="unsafe_subprocess", i_understand=True, boxes=2, warm=0))
    yield made
    made.close()


@pytest.mark.walk
class TestUnsafeBoxes:
    def test_workspace_and_tmp_are_the_box_s_own(self, unsafe: Boxes) -> None:
        with unsafe.open() as box, unsafe.open() as other:
            box.put("/tmp/palestra-test-file", b"here")
            box.put("/workspace/deep/file", b"there")
            assert not os.path.exists("/tmp/palestra-test-file")
            code = "import os, tempfile\nprint(sorted(os.listdir(tempfile.gettempdir())), os.listdir('.'))"
            assert box.run_python(code).stdout == b"['palestra-test-file'] ['deep']\n"
            assert other.run_python(code).stdout == b"[] []\n"

    def test_snapshots_and_forks_have_the_box_s_files_alone(self, unsafe: Boxes) -> None:
        async def forked(box: Box) -> tuple[set[str], bytes]:
            other = await box.fork()
            try:
                names = {entry.name for entry in await other.list("/tmp")}
                return names, await other.get("/workspace/work")
            finally:
                await other.close()

        with unsafe.open() as box:
            box.put("work", b"kept")
            box.put("/tmp/aside", b"too")
            assert background.call(forked(inner(box)), 60) == ({"aside"}, b"kept")


def inner(box: EpisodeBox) -> Box:
    """The sandbox's own box."""
    return box._box
