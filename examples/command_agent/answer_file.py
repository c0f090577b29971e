"""`examples/AnswerFile-v0`: calculator tasks whose answer is a file, `answer.txt`, that the agent leaves in its folder.

Reward: 0.2 for a call that gave a value, 0.3 for the right value, 0.5 for the right number in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.envs.calculator import Calculator, read_answer
from palestra.envs.registry import register
from palestra.envs.types import Message, Reward, Task


@register("examples/AnswerFile-v0")
class AnswerFile(Calculator):
    """Arithmetic, answered in a file."""

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        """See the module."""
        results = [read_answer(message.get("content")) for message in transcript if message.get("role") == "tool"]
        path = self.workspace / "answer.txt" if self.workspace is not None else None
        written = path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else None
        used = any(result is not None for result in results)
        parts = {
            "valid_call": used,
            "right_call": task.answer in results,
            "right_answer": used and read_answer(written) == task.answer,
        }
        value = 0.2 * parts["valid_call"] + 0.3 * parts["right_call"] + 0.5 * parts["right_answer"]
        return Reward(round(value, 6), {name: float(earned) for name, earned in parts.items()})
