"""Words of grading: what a component of a rubric is shown, and what it says.

A `Scoring` goes into each component, a `Score` (or a plain number) comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.envs.types import Message, Task

if TYPE_CHECKING:
    from palestra.envs.tools import Call


@dataclass(frozen=True, slots=True)
class Score:
    """What one component says of one episode."""

    value: float | None
    """None: it could not be judged. The reward of the whole episode is unknown then."""
    reason: str = ""
    """For people; no code reads it."""
    error: str | None = None
    """Why there is no value: a fault of the grader, in one line."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a component is shown of an episode."""

    task: Task
    transcript: tuple[Message, ...]
    """What came after the prompt, tool results included; it can be empty where a limit cut the episode."""
    calls: tuple[Call, ...] = ()
    """The tool calls of the episode, in order, with what they gave."""
    workspace: Path | None = None
    """The folder of an agent that played by itself; None in other episodes."""

    @property
    def answer(self) -> str:
        """The text of the final assistant message; empty where there is none, or where it has tool calls."""
        final = next((item for item in reversed(self.transcript) if item.get("role") == "assistant"), {})
        return "" if final.get("tool_calls") else text_of(final.get("content"))


def text_of(content: Any) -> str:
    """The text of a message's content: a text as it is, text parts put together, anything else as nothing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return ""
    parts = (part for part in content if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for part in parts if isinstance(text := part.get("text"), str))
