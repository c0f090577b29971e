"""Agents that are commands: what a process gets, what becomes of its output and exit status, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra.agents import command as command_module
from palestra.agents.command import KEPT_BYTES, CommandAgent
from palestra.agents.foreign import play_agent
from palestra.agents.types import AgentError, Limits
from palestra.agents.workspace import Workspaces
from palestra.envs.core import MessageEnv
from palestra.envs.types import Episode, StopReason, Task
from tests.fakes.sessions import FakeSessions
from tests.live import wait_for

ROOT = Path(__file__).resolve().parent.parent
TASK = Task("What is 12 plus 30? {workspace} $HOME", {"secret": 4711}, "t")


class Plain(MessageEnv):
    """Any episode scores 1."""

    def score(self, task: Task, transcript: Any) -> float:
        return 1.0


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def play(agent: CommandAgent, kept: Path | None = None, task: Task = TASK, deadline_s: float = 20.0) -> Episode:
    host = FakeSessions()
    workspaces = Workspaces(kept, keep=kept is not None)
    return play_agent(
        Plain(), agent, host, host.handle(), Limits(deadline_s=deadline_s), task=task, seed=0, workspaces=workspaces
    )


def sh(script: str, *words: str, **more: Any) -> CommandAgent:
    return CommandAgent(["sh", "-c", script, "sh", *words], **more)


def answer(episode: Episode) -> str:
    return str(episode.messages[-1]["content"])


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def cut(folder: Path, script: str) -> tuple[int, int]:
    """Starts a script that writes its pid, and ends it once it runs: exit status and pid."""
    with open(os.devnull, "rb") as stdin:
        running = command_module._Running(["sh", "-c", script], folder, dict(os.environ), stdin)
    pid = int(
        wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip(), "the script's start")
    )
    status, was_cut = running.wait(0.0)
    assert was_cut
    return status, pid


class TestWhatItGets:
    def test_the_environment_is_minimal_and_names_the_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOST_SECRET", "hush")
        monkeypatch.setenv("PASSED", "through")
        monkeypatch.setenv("OPENAI_API_KEY", "the host's own")
        agent = CommandAgent(
            [sys.executable, "-c", "import os, json; print(json.dumps([dict(os.environ), os.getcwd()]))"],
            env={"MINE": "1", "LANG": "C"},
            pass_env=["PASSED", "NOWHERE", "OPENAI_API_KEY"],
        )
        given, cwd = json.loads(answer(play(agent)))
        url = "http://127.0.0.1:9/sessions/key-0/v1"
        assert given.pop("PATH") == os.environ["PATH"]
        task = json.loads(given.pop("PALESTRA_TASK"))
        given.pop("LC_CTYPE", None)  # Python's own, for the C locale
        assert given == {
            "LANG": "C",
            "MINE": "1",
            "PASSED": "through",
            "HOME": cwd,
            "TMPDIR": f"{cwd}/.tmp",
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "key-0",
            "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/sessions/key-0",
            "ANTHROPIC_API_KEY": "key-0",
            "ANTHROPIC_AUTH_TOKEN": "key-0",
            "PALESTRA_SESSION_URL": url,
            "PALESTRA_WORKSPACE": cwd,
            "PALESTRA_PROMPT": TASK.prompt,
        }
        assert task["id"] == "t"
        assert task["messages"] == [{"role": "user", "content": TASK.prompt}]
        assert "4711" not in json.dumps(task)

    def test_words_are_filled_in_once_and_no_shell_reads_them(self) -> None:
        agent = CommandAgent('printf "%s|" "{prompt}" {session_url} {workspace} {task_file} {other}')
        prompt, url, workspace, file, other, _ = answer(play(agent)).split("|")
        assert (prompt, url, other) == (TASK.prompt, "http://127.0.0.1:9/sessions/key-0/v1", "{other}")
        assert file == f"{workspace}/.palestra/task.json"

    def test_the_prompt_is_on_stdin_also_where_it_is_longer_than_a_variable_may_be(self, kept: Path) -> None:
        long = Task("x" * 300_000 + "\0\ud800é", id="long")
        episode = play(sh('echo "${PALESTRA_PROMPT-none} $(wc -c)"'), kept, long)
        assert answer(episode) == f"none {300_000 + 4}"
        (folder,) = kept.iterdir()
        assert json.loads((folder / ".palestra" / "task.json").read_text())["prompt"].startswith("xxx")

    def test_a_program_in_the_current_folder_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine.sh").write_text("#!/bin/sh\necho from $0\n")
        (tmp_path / "mine.sh").chmod(0o755)
        monkeypatch.chdir(tmp_path)
        assert answer(play(CommandAgent("./mine.sh"))) == f"from {tmp_path}/mine.sh"


class TestWhatItGives:
    def test_the_last_line_is_the_answer_and_an_exit_status_is_no_fault(self, kept: Path) -> None:
        episode = play(sh("echo one; echo '  two  '; echo; echo oops >&2; exit 3"), kept)
        assert (answer(episode), episode.reward.value, episode.terminated) == ("two", 1.0, True)
        assert '"exit_status": 3' in episode.reward.note
        assert "oops" in episode.reward.note
        (folder,) = kept.iterdir()
        assert (folder / ".palestra" / "stderr.txt").read_text() == "oops\n"

    def test_nothing_on_stdout_is_no_answer(self) -> None:
        episode = play(sh("true"))
        assert [message["role"] for message in episode.messages] == ["user"]

    def test_a_signal_is_a_status_as_a_shell_says_it(self) -> None:
        assert '"exit_status": 137' in play(sh("kill -9 $$")).reward.note

    def test_ten_megabytes_on_both_pipes_and_no_reader_of_stdin(self) -> None:
        script = "head -c 10000000 /dev/zero | tr '\\0' x; head -c 10000000 /dev/zero | tr '\\0' y >&2; echo; echo end"
        episode = play(sh(script), deadline_s=60)
        assert answer(episode) == "end"
        assert '"stdout_bytes": 10000005' in episode.reward.note
        assert '"stderr_bytes": 10000000' in episode.reward.note

    def test_one_endless_line_is_kept_in_part(self, kept: Path) -> None:
        episode = play(sh("head -c 200000 /dev/zero | tr '\\0' x"), kept)
        assert len(answer(episode)) == KEPT_BYTES


class TestFaults:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("no-such-program-here --x", "no program 'no-such-program-here'"),
            ("./no/such/file", "no program '.*/no/such/file'"),
            ([], "is empty"),
            ([""], "is empty"),
            ("echo 'open", "No closing quotation"),
        ],
    )
    def test_a_command_that_cannot_be(self, command: Any, said: str) -> None:
        with pytest.raises(AgentError, match=said):
            CommandAgent(command)

    def test_a_program_that_vanished_is_a_fault(self, tmp_path: Path) -> None:
        program = tmp_path / "mine.sh"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        agent = CommandAgent([str(program)])
        program.unlink()
        episode = play(agent)
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
        assert "FileNotFoundError" in (episode.error or "")

    def test_words_that_the_kernel_refuses_are_a_fault(self) -> None:
        episode = play(CommandAgent("echo {prompt}"), task=Task("x" * 3_000_000, id="long"))
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
        assert "Argument list too long" in (episode.error or "")


class TestNothingIsLeft:
    def test_what_it_started_is_gone_when_it_ends(self, kept: Path) -> None:
        daemon = f"setsid -f {sys.executable} -c \"import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)\""
        script = f"{daemon}; sleep 600 & echo $! > other; while [ ! -s pid ]; do :; done; echo done"
        episode = play(sh(script), kept)
        assert answer(episode) == "done"
        (folder,) = kept.iterdir()
        pids = [int((folder / name).read_text()) for name in ("pid", "other")]
        assert [alive(pid) for pid in pids] == [False, False]

    def test_the_deadline_cuts_it_and_what_there_is_is_scored(self) -> None:
        episode = play(sh("exec sleep 600"), deadline_s=0.3)
        assert (episode.stop_reason, episode.truncated, episode.reward.value) == (StopReason.DEADLINE, True, 1.0)

    def test_before_the_end_it_may_tidy_up(self, tmp_path: Path) -> None:
        status, pid = cut(
            tmp_path, "trap 'echo tidy > tidied; exit 7' TERM; echo $$ > pid; while :; do sleep 0.02; done"
        )
        assert (status, alive(pid)) == (7, False)
        assert (tmp_path / "tidied").read_text() == "tidy\n"

    def test_one_that_will_not_end_is_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command_module, "TERM_GRACE_S", 0.1)
        status, pid = cut(tmp_path, "trap '' TERM; echo $$ > pid; while :; do sleep 0.02; done")
        assert (status, alive(pid)) == (137, False)

    @pytest.mark.walk
    def test_it_is_gone_when_its_worker_is_killed(self, tmp_path: Path) -> None:
        code = (
            "import sys\nfrom pathlib import Path\nfrom tests.test_agents_command import play, sh\n"
            "play(sh(\"trap '' TERM; echo $$ > pid; sleep 600 & echo $! > other; wait\"), Path(sys.argv[1]), deadline_s=60)"
        )
        worker = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            wait_for(lambda: [p for p in tmp_path.glob("*/other") if p.read_text().strip()], "the command's start")
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        (folder,) = tmp_path.iterdir()
        pids = [int((folder / name).read_text()) for name in ("pid", "other")]
        wait_for(lambda: not any(map(alive, pids)), "the command's end", 20)
