"""`palestra/Hangman-v0`: a hidden word is found letter by letter, or named as a whole.

Reward: see `games/base.py`. Progress is the share of the word's different letters that were found.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.envs.games.base import Move, TextGame
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Task

LIVES = 7
WORDS = tuple(
    """
    anchor apple apron artist autumn bakery balloon banana basket beacon bicycle blanket blossom border bottle branch
    bread bridge bronze bucket button cabin cactus camera candle canyon captain carpet carrot castle ceiling cellar
    chain chalk cherry chimney circle cliff clock cloud coast coffee compass copper corner cotton cradle crane cricket
    crown crystal curtain daisy dancer desert diamond dinner doctor dolphin donkey dragon drawer eagle engine falcon
    farmer feather fence fiddle finger flame flower forest fossil fountain garden garlic giant ginger glacier glove
    goose grape guitar hammer harbor harvest helmet honey horizon hunter island ivory jacket jungle kettle kitchen
    kitten ladder lantern lemon letter library lizard magnet maple marble market meadow melon mirror monkey morning
    mountain museum mustard needle ocean olive onion orange orchard oyster paddle palace pancake parrot pebble pencil
    pepper piano picnic pigeon pillow planet pocket potato prairie pumpkin puzzle quarry rabbit railway rainbow ribbon
    river rocket saddle salmon school shadow shell shovel silver spider spoon squirrel stable statue summer sunset
    teapot temple thunder ticket tiger timber tomato tower tractor tunnel turtle valley velvet village violin walnut
    whale whistle willow window winter wizard zebra
    """.split()  # noqa: SIM905 - a hundred and eighty quotes would hide the words
)
_GUESS = re.compile(r"(?:my |the )?(?:guess(?: is)?(?= |:|=))?\s{0,3}[:=]?\s{0,3}([a-z]{1,20})\.?", re.IGNORECASE)


def hangman_tasks(seed: int = 0, size: int = 1000) -> TaskSource:
    """A deterministic source; words come back after all of them were used once."""

    def make(index: int) -> Task:
        turn, position = divmod(index, len(WORDS))
        word = _shuffled(seed, turn)[position]
        prompt = (
            f"I have an English word of {len(word)} letters in mind: {' '.join('_' * len(word))}\nGuess letters, or the "
            f"whole word. {LIVES} wrong guesses end the game.\nEnd every message with a line of this form:\n"
            "guess LETTER-OR-WORD"
        )
        return Task(prompt, word, f"hangman/{seed}/{index}", {"letters": len(word)})

    return GeneratedTasks(size, make)


@functools.lru_cache(64)
def _shuffled(seed: int, turn: int) -> tuple[str, ...]:
    words = list(WORDS)
    random.Random(f"hangman/{seed}/{turn}").shuffle(words)
    return tuple(words)


class Hangman(TextGame):
    """Find the word."""

    form: ClassVar[str] = "End your message with a line like: guess e"

    def __init__(
        self,
        seed: int = 0,
        size: int = 1000,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        super().__init__(render_mode, hangman_tasks(seed, size) if tasks is None else tasks)

    def begin(self, task: Task) -> None:
        self.word, self.tried, self.lives = str(task.answer), set[str](), LIVES

    def play_line(self, line: str) -> Move:
        found = _GUESS.fullmatch(line)
        guess = found[1].lower() if found else ""
        if len(guess) not in (1, len(self.word)):
            raise ValueError(f"I found no letter, and no word of {len(self.word)} letters, on the last line.")
        if guess in self.tried:
            raise ValueError(f"You have guessed {guess!r} before.")
        self.tried.add(guess)
        if guess == self.word:
            return Move("", 1.0, solved=True)
        right = len(guess) == 1 and guess in self.word
        self.lives -= not right
        shown = [letter if letter in self.tried else "_" for letter in self.word]
        share = len(set(shown) - {"_"}) / len(set(self.word))
        said = f"{guess}: {'yes' if right else 'no'}. {' '.join(shown)}\n{self.lives} wrong guesses left."
        return Move(said, share, solved="_" not in shown, over=self.lives <= 0)
