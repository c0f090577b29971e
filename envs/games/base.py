"""What text games share: moves are read strictly, malformed replies are answered with help, and progress is rewarded step
by step.

Assistant messages go in, the game's answers come out; nothing is waited for.

Reward of every game, at most 1.0:

| component  | weight | given                                                                               |
| ---------- | ------ | ----------------------------------------------------------------------------------- |
| `progress` | 0.3    | step by step, as the game's own measure rises from 0 to 1; it never falls             |
| `solved`   | 0.7    | on the last step, when the game is won                                                |

What can be earned by progress is the same for every way of playing, so nothing is gained by drawing a game out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv, Response
from palestra.envs.tools import refuse_calls
from palestra.envs.types import Message, Reward, StopReason, Task

PROGRESS, SOLVED = 0.3, 0.7
MALFORMED = 3
"""Malformed replies that end a game; they cost no try."""
LONGEST_REPLY = 4000
"""Characters of a reply that is read at all."""


@dataclass(frozen=True, slots=True)
class Move:
    """What a game makes of one readable reply."""

    text: str
    """Its answer to the player."""
    progress: float
    """0 to 1: how far the game has come."""
    solved: bool = False
    over: bool = False
    """No tries are left."""


class TextGame(MessageEnv):
    """A game in which every reply is one move, written on the reply's last line; what stands before is the player's own.

    Subclasses give `tasks`, `form`, `begin` and `play_line`.
    """

    deterministic = True
    form: ClassVar[str]
    """How a move is written; stands in the help."""

    @abstractmethod
    def begin(self, task: Task) -> None:
        """Sets the game up."""

    @abstractmethod
    def play_line(self, line: str) -> Move:
        """Plays the move that a line writes.

        Raises:
            ValueError: it is no move; the text says why.
        """

    def setup(self, task: Task) -> None:
        self.malformed, self.progress, self.solved, self.over = 0, 0.0, False, False
        self.by_itself = False
        self.begin(task)

    def respond(self, action: Message) -> Response:
        refusals = refuse_calls(action)
        before = self.progress
        try:
            line = last_line(action) if not refusals else ""
            move = self.play_line(line)
        except ValueError as error:
            return self._help(str(error), refusals)
        self.progress, self.solved, self.over = max(before, move.progress), move.solved, move.over or move.solved
        stop = StopReason.ANSWER if move.solved else StopReason.ENV_DONE if move.over else None
        return Response([_user(move.text)] if stop is None else [], stop, PROGRESS * (self.progress - before))

    def replay(self, transcript: Sequence[Message]) -> None:
        """The moves of a player that played by itself, in their order."""
        assert self.task is not None, "an episode has its task"
        self.setup(self.task)
        self.by_itself = True
        for message in transcript:
            if message.get("role") == "assistant" and not self.over:
                self.respond(message)

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        value = SOLVED * self.solved
        if self.by_itself:  # then no step was rewarded
            value += PROGRESS * self.progress
        parts = {"progress": round(self.progress, 6), "solved": float(self.solved)}
        return Reward(value, parts, f"{self.malformed} malformed replies" if self.malformed else "")

    def oracle(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": f"guess {task.answer}"}]

    def _help(self, why: str, refusals: list[Message]) -> Response:
        self.malformed += 1
        left = MALFORMED - self.malformed
        if left <= 0:
            self.over = True
            return Response(refusals, StopReason.ENV_DONE)
        again = f"{left} more malformed {'reply ends' if left == 1 else 'replies end'} the game."
        return Response([*refusals, _user(f"{why} {self.form} {again}")])


def last_line(message: Message) -> str:
    """The last line of a reply that has any text.

    Raises:
        ValueError: there is none, or the reply is too long to be read.
    """
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return ""
    if len(content) > LONGEST_REPLY:
        raise ValueError(f"Your reply has over {LONGEST_REPLY} characters.")
    return content.strip().rsplit("\n", 1)[-1].strip()


def tries_left(left: int) -> str:
    """How a game says what is left."""
    return f"{left} {'guess' if left == 1 else 'guesses'} left."


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def checked_levels(levels: Sequence[int], known: Sequence[Any]) -> tuple[int, ...]:
    """The levels of a source of tasks; they are numbered from 1.

    Raises:
        ValueError: none, or one that does not exist.
    """
    chosen = tuple(levels)
    if not chosen or any(isinstance(level, bool) or not 1 <= level <= len(known) for level in chosen):
        raise ValueError(f"levels must be some of {tuple(range(1, len(known) + 1))}, got {chosen}")
    return chosen
