"""`palestra/GuessTheNumber-v0`: a hidden number is found by guesses that are answered with "higher" or "lower".

Reward: see `games/base.py`. Progress is the share of the range, in bits, that the answers have ruled out: a guess in the
middle earns the most that can be counted on, a guess outside of what is still possible earns nothing.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.envs.arithmetic import level_at
from palestra.envs.games.base import Move, TextGame, checked_levels, tries_left
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Task

LEVELS = ((10, 4), (50, 6), (100, 7), (1000, 10))
"""Highest number and guesses, by level. Halving the range always finds the number."""
_GUESS = re.compile(r"(?:my |the )?(?:guess(?: is)?)?\s{0,3}[:=]?\s{0,3}(-?[0-9]{1,9})\s{0,3}\.?", re.IGNORECASE)


def guessing_tasks(seed: int = 0, size: int = 1000, levels: Sequence[int] = (1, 2, 3)) -> TaskSource:
    """A deterministic source that rises through `levels`.

    Raises:
        ValueError: unknown levels.
    """
    chosen = checked_levels(levels, LEVELS)

    def make(index: int) -> Task:
        level = level_at(chosen, index, size)
        high, tries = LEVELS[level - 1]
        number = random.Random(f"guess/{seed}/{index}").randint(1, high)
        prompt = (
            f"I have a number from 1 to {high} in mind. Find it with at most {tries} guesses; after each I say "
            "whether mine is higher or lower.\nEnd every message with a line of this form, with your number for N:\n"
            "guess N"
        )
        return Task(prompt, number, f"guess/{seed}/{index}", {"level": level, "high": high, "tries": tries})

    return GeneratedTasks(size, make)


class GuessTheNumber(TextGame):
    """Higher or lower."""

    form: ClassVar[str] = "End your message with a line like: guess 7"

    def __init__(
        self,
        seed: int = 0,
        size: int = 1000,
        levels: Sequence[int] = (1, 2, 3),
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        super().__init__(render_mode, guessing_tasks(seed, size, levels) if tasks is None else tasks)

    def begin(self, task: Task) -> None:
        self.number = int(task.answer)
        self.low, self.high = 1, int(task.meta["high"])
        self.bits, self.left = math.log(self.high), int(task.meta["tries"])

    def play_line(self, line: str) -> Move:
        found = _GUESS.fullmatch(line)
        if found is None:
            raise ValueError("I found no number on the last line.")
        guess = int(found[1])
        self.left -= 1
        if guess == self.number:
            return Move("", 1.0, solved=True)
        if guess < self.number:
            self.low, word = max(self.low, guess + 1), "higher"
        else:
            self.high, word = min(self.high, guess - 1), "lower"
        progress = 1.0 - math.log(self.high - self.low + 1) / self.bits if self.bits else 0.0
        text = f"My number is {word} than {guess}. {tries_left(self.left)}"
        return Move(text, progress, over=self.left <= 0)
