"""`palestra/Mastermind-v0`: a hidden code of letters is found by guesses that are answered with two counts.

Reward: see `games/base.py`. Progress is the best share of letters so far that stood in their right places.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from palestra.envs.arithmetic import level_at
from palestra.envs.games.base import Move, TextGame, checked_levels, tries_left
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Task

LEVELS = ((3, 4, 8), (4, 6, 10), (5, 8, 12))
"""Places, letters and guesses, by level."""
ALPHABET = "ABCDEFGH"
_GUESS = re.compile(r"(?:my |the )?(?:guess(?: is)?)?\s{0,3}[:=]?\s{0,3}([A-H](?:[ ,]?[A-H]){2,7})\.?", re.IGNORECASE)


def mastermind_tasks(seed: int = 0, size: int = 1000, levels: Sequence[int] = (1, 2)) -> TaskSource:
    """A deterministic source that rises through `levels`.

    Raises:
        ValueError: unknown levels.
    """
    chosen = checked_levels(levels, LEVELS)

    def make(index: int) -> Task:
        level = level_at(chosen, index, size)
        places, letters, tries = LEVELS[level - 1]
        draw = random.Random(f"mastermind/{seed}/{index}")
        code = "".join(draw.choice(ALPHABET[:letters]) for _ in range(places))
        prompt = (
            f"I have a code of {places} letters from {ALPHABET[0]} to {ALPHABET[letters - 1]} in mind; a letter can occur "
            f"more than once. Find it with at most {tries} guesses. After each I say how many letters are right and in "
            "their right place, and how many more of them are in the code but elsewhere.\nEnd every message with a line "
            "of this form, with your letters for X:\nguess " + "X" * places
        )
        meta = {"level": level, "places": places, "letters": letters, "tries": tries}
        return Task(prompt, code, f"mastermind/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


def compare(code: str, guess: str) -> tuple[int, int]:
    """How many letters of `guess` are right in their place, and how many more are right elsewhere."""
    exact = sum(a == b for a, b in zip(code, guess, strict=True))
    common = sum((Counter(code) & Counter(guess)).values())
    return exact, common - exact


class Mastermind(TextGame):
    """Find the code."""

    form: ClassVar[str] = "End your message with a line like: guess ABCA"

    def __init__(
        self,
        seed: int = 0,
        size: int = 1000,
        levels: Sequence[int] = (1, 2),
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        super().__init__(render_mode, mastermind_tasks(seed, size, levels) if tasks is None else tasks)

    def begin(self, task: Task) -> None:
        self.code = str(task.answer)
        self.letters, self.left = ALPHABET[: int(task.meta["letters"])], int(task.meta["tries"])

    def play_line(self, line: str) -> Move:
        found = _GUESS.fullmatch(line)
        guess = re.sub("[ ,]", "", found[1]).upper() if found else ""
        if len(guess) != len(self.code) or set(guess) - set(self.letters):
            raise ValueError(f"I found no {len(self.code)} letters from A to {self.letters[-1]} on the last line.")
        self.left -= 1
        exact, elsewhere = compare(self.code, guess)
        text = f"{guess}: {exact} in the right place, {elsewhere} more elsewhere. {tries_left(self.left)}"
        return Move(text, exact / len(self.code), solved=guess == self.code, over=self.left <= 0)
