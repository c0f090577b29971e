"""`palestra/Code-v0`: write a function or a program that passes tests, in one reply, in several, or with tools.

The policy gets a task in words with two visible examples. Three ways to play:

- `tools=False, turns=1` (the default): the first reply is the answer.
- `tools=False, turns=N`: a reply whose code fails the examples is answered with what failed, up to N - 1 times.
- `tools=True`: `python` and `bash` are sessions in a box of the episode's own, `write_file` and `read_file` reach its files, `run_tests`
  tries the examples on solution.py; a message without calls is the answer.

The answer is the last fenced code block of the final message that defines the function (for programs: the last one that is not empty). With
tools, where the final message has none, it is the file solution.py. A reply that is cut inside its block, or over 64 Ki characters, has no
answer.

Reward, at most 1.0, all parts on the last step:

| component | weight | value |
| --------- | ------ | ----- |
| `format`  | 0.1    | 1 where there is an answer |
| `tests`   | 0.9    | 1 where all hidden cases pass, else 0; with `credit="share"` the share of cases that pass |

Hidden cases run against the answer in a fresh box. They stay out here: arguments or input go in, literals or output come back, so code in
the box can neither find what is expected nor say that it passed. A fault of the sandbox leaves the reward unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palestra.envs import boxes
from palestra.envs.boxes import EpisodeBox
from palestra.envs.code.answers import MOST_TEXT, defines, final_text, read_code
from palestra.envs.code.examples import try_examples
from palestra.envs.code.generated import code_tasks
from palestra.envs.code.judging import Examination, note_of
from palestra.envs.code.toolbox import Toolbox
from palestra.envs.code.types import WORK, Problem, problem_of
from palestra.envs.core import Response
from palestra.envs.tasks import TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import EnvError, Message, Reward, StopReason, Task

WEIGHTS = {"format": 0.1, "tests": 0.9}
CREDITS = ("all", "share")
SYSTEM = "Reply with one Python code block."
TOOLS_SYSTEM = (
    "You write Python. Write your work to solution.py, try it, and mend it; run_tests tries the examples on it. Then reply with the whole "
    "code in one Python code block."
)


class CodeEnv(ToolEnv):
    """Functions and programs, graded by hidden cases."""

    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        size: int = 4096,
        levels: Sequence[int] = (1, 2, 3, 4),
        kind: str = "function",
        prompt: str = "plain",
        tools: bool = False,
        turns: int = 1,
        credit: str = "all",
        test_s: float = 20.0,
        tool_s: float = 10.0,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """
        Args:
            seed, size, levels, kind, prompt: of the generated tasks; see `generated.code_tasks`.
            tools: whether there is a box with tools.
            turns: replies without tools; the last one is the answer.
            credit: `all` or `share`, see the table above.
            test_s: most seconds for all hidden cases together.
            tool_s: most seconds for one tool call.
            tasks: others than the generated ones; see `types` for their form.

        Raises:
            ValueError: one of them cannot be.
        """
        if turns < 1 or (tools and turns > 1):
            raise ValueError(
                f"turns counts replies without tools and must be at least 1; got {turns} with tools={tools}"
            )
        if credit not in CREDITS:
            raise ValueError(f"credit must be one of {CREDITS}, got {credit!r}")
        if tools and prompt != "plain":
            raise ValueError(f"prompt {prompt!r} shows a reply without tools; it needs tools=False")
        if min(test_s, tool_s) <= 0:
            raise ValueError(f"test_s and tool_s must be positive, got {test_s} and {tool_s}")
        self._replies, self._credit, self._test_s, self._tool_s = turns, credit, test_s, tool_s
        self._toolbox = Toolbox(tool_s)
        if not tools:
            self.tools = {}  # type: ignore[misc]  # of the class, but this one offers none
        elif self.system == SYSTEM:
            self.system = TOOLS_SYSTEM  # type: ignore[misc]  # as above
        super().__init__(render_mode, code_tasks(seed, size, levels, kind, prompt) if tasks is None else tasks)

    # Tools.

    @tool
    def python(self, code: str) -> str:
        """Runs Python code in a session that keeps its variables, and returns what it prints.

        Args:
            code: what to run.
        """
        return self._toolbox.run("python", code)

    @tool
    def bash(self, command: str) -> str:
        """Runs a command in a shell session, in /workspace, and returns what it prints.

        Args:
            command: what to run.
        """
        return self._toolbox.run("bash", command)

    @tool
    def write_file(self, path: str, content: str) -> str:
        """Writes a text file.

        Args:
            path: of the file; relative paths are below /workspace.
            content: all that will be in it.
        """
        return self._toolbox.write(path, content)

    @tool
    def read_file(self, path: str) -> str:
        """Returns the content of a text file.

        Args:
            path: of the file; relative paths are below /workspace.
        """
        return self._toolbox.read(path)

    @tool
    def run_tests(self) -> str:
        """Tries the task's examples on /workspace/solution.py and returns which of them pass."""
        box = self._toolbox.box()
        return self._try(box)[1]

    # The episode.

    def setup(self, task: Task) -> None:
        self._toolbox.close()
        problem_of(task)  # a task that tells no problem is a fault now, not after a whole episode

    def respond(self, action: Message) -> Response:
        if action.get("tool_calls") or self._replies == 1 or self.turn >= self._replies:
            return super().respond(action)
        code = self.answer_of(action)
        if code is None:
            said = "There is no whole Python code block in your reply."
        else:
            with boxes.shared().open() as box:
                box.put(WORK, code.encode("utf-8", "replace"))
                passes, said = self._try(box)
            if passes:
                return Response(stop=StopReason.ANSWER)
        return Response([{"role": "user", "content": f"{said}\n\nReply with the whole code again, mended."}])

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        problem = problem_of(task)
        code = self.answer_of(transcript[-1]) if transcript else None
        if code is None and transcript and final_text(transcript[-1]):
            code = self._left_file(problem)
        self._toolbox.close()  # graders need boxes too: nobody holds one while he waits for another
        if code is None:
            return Reward(0.0, dict.fromkeys(WEIGHTS, 0.0), "no answer")
        exam = Examination(problem, whole=self._credit == "all", case_s=self._test_s)
        work = {WORK: code.encode("utf-8", "replace")}
        grade = boxes.shared().grade(work, exam.check, timeout_s=self._test_s)
        parts = {"format": 1.0, "tests": exam.share(grade)}
        value = sum(WEIGHTS[name] * part for name, part in parts.items())
        return Reward(round(value, 6), parts, note_of(grade))

    def answer_of(self, message: Message) -> str | None:
        """The code that a final message gives."""
        return read_code(final_text(message), self._problem().entry)

    def oracle(self, task: Task) -> list[Message]:
        if not isinstance(task.answer, str):
            raise NotImplementedError(f"task {task.id!r} has no solution")
        return [{"role": "assistant", "content": f"```python\n{task.answer.rstrip()}\n```"}]

    def close(self) -> None:
        self._toolbox.close()
        super().close()

    def _problem(self) -> Problem:
        if self.task is None:
            raise EnvError("no episode is going on")
        return problem_of(self.task)

    def _try(self, box: EpisodeBox) -> tuple[bool, str]:
        return try_examples(box, self._problem(), self._tool_s)

    def _left_file(self, problem: Problem) -> str | None:
        """solution.py as the episode's box, or the folder of an agent that played by itself, has it."""
        if self.workspace is not None:
            path = self.workspace / WORK
            fits = path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_TEXT
            code = path.read_bytes().decode("utf-8", "replace") if fits else ""
        else:
            code = self._toolbox.left(WORK, MOST_TEXT)
        found = defines(code, problem.entry) if problem.entry else bool(code.strip())
        return code if found else None
