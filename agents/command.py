"""An agent that is a command: any program that speaks to an OpenAI or Anthropic URL which its environment names.

A command line goes in, and an `Agent` comes out that starts it anew for every episode, in the episode's folder and with a minimal
environment: none of the host's secrets goes along. It waits for the command, at most until the episode's deadline; then the command is
ended, and no process of it is left in any case (see `leash.py`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from palestra.agents.session import current
from palestra.agents.transcript import text_of
from palestra.agents.types import AgentContext, AgentError, Outcome, PolicyStop
from palestra.envs.tasks import task_to_json
from palestra.envs.types import StopReason, Task

KEPT_BYTES = 65_536
"""Of stdout and of stderr: the last ones."""
TERM_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL at the deadline."""
KILL_GRACE_S = 5.0
"""How long killed processes may take to be gone."""
ENV_LIMIT = 100_000
"""Bytes of one variable, which the kernel bounds at 128 KiB: PALESTRA_TASK and PALESTRA_PROMPT are left out where they are longer."""
FOLDER = ".palestra"
"""Below the workspace: task.json, prompt.txt, and afterwards the last of stdout.txt and stderr.txt."""
LEASH = Path(__file__).with_name("leash.py")
_WORD = re.compile(r"\{(prompt|task_file|session_url|workspace)\}")


class CommandAgent:
    """Plays by running a command, whose last line on stdout is its answer.

    `{prompt}`, `{task_file}`, `{session_url}` and `{workspace}` in its words are filled in. A text is split as a shell splits it, but no
    shell runs it. A program named by a relative path is looked for in the current folder, not in the episode's.
    """

    def __init__(
        self, command: Sequence[str] | str, env: Mapping[str, str] | None = None, pass_env: Sequence[str] = ()
    ) -> None:
        """`env`: variables to set, over all others; `pass_env`: names of variables that are passed on from here.

        Raises:
            AgentError: the command is empty, or there is no such program.
        """
        try:
            words = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise AgentError(f"agent command {command!r}: {error}") from None
        if not words or not words[0]:
            raise AgentError("the agent's command is empty")
        self._env = dict(env or {})
        self._passed = {name: os.environ[name] for name in pass_env if name in os.environ}
        if "/" in words[0] and not _WORD.search(words[0]):
            words[0] = os.path.abspath(os.path.expanduser(words[0]))
        path = self._env.get("PATH", os.environ.get("PATH", os.defpath))
        if not _WORD.search(words[0]) and shutil.which(words[0], path=path) is None:
            raise AgentError(f"agent command: there is no program {words[0]!r} that can be run (PATH={path})")
        self._words, self._path = words, path

    def run(self, task: Task, session_url: str, workspace: Path) -> Outcome:
        """See `Agent.run`. An exit status that is not 0 is no fault: it is put down in the outcome, and the rubric decides.

        Raises:
            AgentError: the command could not be started.
            PolicyStop: it was ended at the deadline.
        """
        context = current()
        folder = workspace / FOLDER
        folder.mkdir()
        (workspace / ".tmp").mkdir()
        prompt = prompt_of(context)
        (folder / "prompt.txt").write_text(prompt, encoding="utf-8")
        shown = _plain(json.dumps(task_for_agents(context), ensure_ascii=False))
        (folder / "task.json").write_text(shown, encoding="utf-8")
        filled = {
            "prompt": prompt.replace("\0", ""),
            "task_file": str(folder / "task.json"),
            "session_url": session_url,
            "workspace": str(workspace),
        }
        words = [_WORD.sub(lambda found: filled[found[1]], word) for word in self._words]
        environment = self._environment(context, session_url, shown, prompt)
        with (folder / "prompt.txt").open("rb") as stdin:
            run = _Running(words, workspace, environment, stdin)
        status, cut = run.wait(context.deadline - time.monotonic())
        stdout, stderr = run.out.text(), run.err.text()
        (folder / "stdout.txt").write_text(stdout, encoding="utf-8")
        (folder / "stderr.txt").write_text(stderr, encoding="utf-8")
        if cut:
            raise PolicyStop(StopReason.DEADLINE, f"{words[0]} was ended at its deadline; stderr: {stderr[-500:]}")
        info: dict[str, int | str] = {
            "exit_status": status,
            "stdout_bytes": run.out.total,
            "stderr_bytes": run.err.total,
        }
        if status:
            info["stderr"] = stderr[-2000:]
        lines = [line.strip() for line in stdout.splitlines() if line.strip()]
        return Outcome(answer=lines[-1] if lines else None, info=info)

    def _environment(self, context: AgentContext, session_url: str, task: str, prompt: str) -> dict[str, str]:
        key, workspace = context.session.api_key, str(context.workspace)
        environment = {
            "PATH": self._path,
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            **self._passed,
            "HOME": workspace,
            "TMPDIR": f"{workspace}/.tmp",
            "OPENAI_BASE_URL": session_url,
            "OPENAI_API_BASE": session_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": session_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_AUTH_TOKEN": key,
            "PALESTRA_SESSION_URL": session_url,
            "PALESTRA_WORKSPACE": workspace,
        }
        long = {"PALESTRA_TASK": task, "PALESTRA_PROMPT": prompt.replace("\0", "")}
        fitting = {name: value for name, value in long.items() if len(value.encode()) <= ENV_LIMIT}
        return {**environment, **fitting, **self._env}


def prompt_of(context: AgentContext) -> str:
    """The text that a command gets as its prompt: that of the last user message."""
    users = [text_of(message) for message in context.messages if message.get("role") == "user"]
    return _plain(users[-1] if users else "")


def task_for_agents(context: AgentContext) -> dict[str, object]:
    """The task as a command may see it: without the answer, and with the environment's first messages and tools."""
    shown = {key: value for key, value in task_to_json(context.task).items() if key != "answer"}
    return {**shown, "messages": list(context.messages), "tools": list(context.tools)}


def _plain(text: str) -> str:
    """Lone surrogates cannot be written."""
    return text.encode("utf-8", "replace").decode("utf-8")


class _Tail:
    """Reads a pipe to its end in a thread of its own, and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.total = 0
        self._kept = bytearray()
        self._pipe = pipe
        self.thread = threading.Thread(target=self._read, daemon=True, name="command-output")
        self.thread.start()

    def _read(self) -> None:
        with self._pipe as pipe:
            while chunk := os.read(pipe.fileno(), KEPT_BYTES):
                self.total += len(chunk)
                self._kept += chunk
                del self._kept[:-KEPT_BYTES]

    def text(self) -> str:
        """What is kept."""
        return bytes(self._kept).decode("utf-8", "replace")


class _Running:
    """One started command, on its leash."""

    def __init__(self, words: Sequence[str], folder: Path, env: Mapping[str, str], stdin: IO[bytes]) -> None:
        """Raises AgentError where nothing could be started."""
        self._name = words[0]
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", str(LEASH), str(theirs.fileno()), str(TERM_GRACE_S), *words]
        with theirs:
            try:
                self._leash = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(env),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                self._control.close()
                raise AgentError(f"agent command {self._name!r}: {type(error).__name__}: {error}") from error
        assert self._leash.stdout is not None
        assert self._leash.stderr is not None
        self.out, self.err = _Tail(self._leash.stdout), _Tail(self._leash.stderr)

    def wait(self, timeout_s: float) -> tuple[int, bool]:
        """Exit status (128 + N after signal N), and whether the deadline ended it.

        Raises:
            AgentError: it was not started, or it cannot be ended.
        """
        cut = False
        with self._control:
            said = self._said(max(0.0, timeout_s))
            if said is None:
                cut = True
                self._control.shutdown(socket.SHUT_WR)
                said = self._said(TERM_GRACE_S + KILL_GRACE_S)
        if said is None:
            self._leash.kill()
            self._leash.wait()
            raise AgentError(f"agent command {self._name!r}: its processes cannot be ended")
        self._leash.wait()
        for tail in (self.out, self.err):
            tail.thread.join(KILL_GRACE_S)
        if "status" not in said:
            raise AgentError(f"agent command {self._name!r}: {said.get('fault', 'its leash died')}")
        status = int(said["status"])
        return (status if status >= 0 else 128 - status), cut

    def _said(self, timeout_s: float) -> dict[str, str | int] | None:
        """The leash's last line; {} where it died without one, None where it did not come in time."""
        give_up, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            self._control.settimeout(max(0.001, give_up - time.monotonic()))
            try:
                chunk = self._control.recv(65_536)
            except TimeoutError:
                return None
            except ConnectionResetError:
                return {}
            if not chunk:
                return {}
            line += chunk
        said: dict[str, str | int] = json.loads(line)
        return said
