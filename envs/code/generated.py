"""Tasks that are made: small functions, or whole programs, in levels of difficulty. The same seed and index always make the same task.

In: a seed and levels. Out: tasks with visible examples, hidden cases that differ from them, and a reference solution in `answer`. The
references are texts of `families`, so they are run right here to see what is right.
"""

from __future__ import annotations

import functools
import random
import textwrap
from collections.abc import Sequence
from typing import Any

from palestra.envs.arithmetic import level_at
from palestra.envs.code.families import LEVELS, NAMES, Argument, Sketch, inputs, sketch
from palestra.envs.code.types import KINDS
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import Message, Task

PROMPTS = ("one_shot", "plain")
EXAMPLES, HIDDEN = 2, 8
_READS: dict[Argument, tuple[str, str]] = {
    "number": ("reads a number x", "x = int(input())"),
    "text": ("reads a line of text s", "s = input()"),
    "numbers": (
        "reads a line with the numbers of a list xs, separated by blanks",
        "xs = [int(part) for part in input().split()]",
    ),
}

SHOWN: tuple[Message, ...] = (
    {"role": "user", "content": "Write f(x) that returns x plus 4.\nf(1) == 5\nf(6) == 10"},
    {"role": "assistant", "content": "```python\ndef f(x):\n    return x + 4\n```"},
)
"""The one-shot example: a small model that was not taught to fence its code does so at once when it has seen it."""


def code_tasks(
    seed: int = 0,
    size: int = 4096,
    levels: Sequence[int] = (1, 2, 3, 4),
    kind: str = "function",
    prompt: str = "plain",
) -> TaskSource:
    """A source that rises through `levels`. `prompt`: "one_shot" puts a short example in front, "plain" does not.

    Raises:
        ValueError: unknown levels, kind or prompt.
    """
    chosen = tuple(levels)
    if not chosen or any(level not in LEVELS for level in chosen):
        raise ValueError(f"levels must be some of {LEVELS}, got {chosen}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if prompt not in PROMPTS:
        raise ValueError(f"prompt must be one of {PROMPTS}, got {prompt!r}")
    if prompt == "one_shot" and kind != "function":
        raise ValueError("prompt one_shot shows a function; it goes with kind function")
    before = SHOWN if prompt == "one_shot" else ()

    def make(index: int) -> Task:
        level = level_at(chosen, index, size)
        rng = random.Random(f"code/{seed}/{index}/{level}")
        made = _function(rng, sketch(rng, level)) if kind == "function" else _program(rng, sketch(rng, level))
        question, solution, meta = made
        messages = (*before, {"role": "user", "content": question})
        name = "code" if kind == "function" else "program"
        return Task(messages, solution, f"{name}/{seed}/{index}", {"level": level, **meta})

    return GeneratedTasks(size, make)


def _function(rng: random.Random, wanted: Sketch) -> tuple[str, str, dict[str, Any]]:
    name = NAMES[wanted.argument]
    solution = f"def f({name}):\n{textwrap.indent(wanted.body, '    ')}\n"
    rows = [[[value], run(solution, value)] for value in _drawn(rng, wanted)]
    examples, cases = rows[:EXAMPLES], rows[EXAMPLES:]
    shown = "\n".join(f"f({given[0]!r}) == {expected!r}" for given, expected in examples)
    question = f"Write f({name}) that returns {wanted.says}.\n{shown}"
    return question, solution, {"kind": "function", "entry": "f", "examples": examples, "cases": cases}


def _program(rng: random.Random, wanted: Sketch) -> tuple[str, str, dict[str, Any]]:
    name = NAMES[wanted.argument]
    reads, line = _READS[wanted.argument]
    function = f"def f({name}):\n{textwrap.indent(wanted.body, '    ')}\n"
    rows = [[f"{_written(value)}\n", f"{run(function, value)}\n"] for value in _drawn(rng, wanted)]
    examples, cases = rows[:EXAMPLES], rows[EXAMPLES:]
    shown = "\n".join(f"Input {given.rstrip()!r}, output {expected.rstrip()!r}." for given, expected in examples)
    question = f"Write a Python program that {reads} and prints {wanted.says}.\n{shown}"
    solution = f"{function}\n\n{line}\nprint(f({name}))\n"
    return question, solution, {"kind": "program", "entry": "", "examples": examples, "cases": cases}


def _drawn(rng: random.Random, wanted: Sketch) -> list[object]:
    """Inputs, the visible ones first: two plain ones, so that what the odd ones give has to be thought of."""
    values = inputs(rng, wanted.argument, EXAMPLES + HIDDEN)
    return [*values[-EXAMPLES:], *values[:-EXAMPLES]]


def _written(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@functools.lru_cache(maxsize=256)
def _loaded(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"]


def run(source: str, value: object) -> Any:
    """What the function `f` of a reference gives. Only ever called with texts that `families` made."""
    return _loaded(source)(list(value) if isinstance(value, list) else value)
