"""Whether two pieces of LaTeX mean the same: math-verify (extra `maths`) in a process that is killed at its deadline.

Texts go in, a bool comes out. math-verify's own deadlines are signals, which work in a main thread alone and are swallowed in callbacks:
they are off.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

from palestra.envs.types import EnvError

MAX_CHARACTERS = 300
"""Of an answer."""
MAX_DEPTH = 6
"""Of brackets within brackets: the parser's time grows with each level by more than its share, to a minute at 20."""


def same(gold: str, answer: str) -> bool:
    """Whether `answer` means what `gold` does: 1/2 is 0.5, (x-1)(x+1) is x^2-1, and the order in a list does not matter. Numbers count
    as equal to six digits after the point.

    Raises:
        ValueError: `gold` is no maths.
    """
    from math_verify import verify

    known = _read(gold)
    if not known:
        raise ValueError(f"the task's answer {gold[:100]!r} cannot be read as LaTeX")
    return bool(verify(known, _read(answer), timeout_seconds=None))


def warm() -> None:
    """Loads the parser, and builds what it builds at its first use."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each expression that it cannot read
    for gold, answer in ((r"\frac{1}{2}", "0.5"), (r"\{2, 3\}", "3, x=2"), ("x^2-1", "(x-1)(x+1)")):
        same(gold, answer)


@functools.cache
def require() -> None:
    """Checks that math-verify is there, without loading it.

    Raises:
        EnvError: it is not; says how to have it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise EnvError("answers are compared by math-verify, which is not installed: pip install 'palestra[maths]'")


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{...}` of a text holds; None where there is none, or where the last one is not closed. Takes time in
    proportion to the text.
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth, index = 1, start
    while index < len(text):
        match text[index]:
            case "\\":
                index += 1  # an escaped brace is a sign, not a bracket
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth == 0:
            return text[start:index].strip()
        index += 1
    return None


def too_much(answer: str) -> str | None:
    """Why an answer is not even looked at; None where it is."""
    if not answer:
        return "it is empty"
    if len(answer) > MAX_CHARACTERS:
        return f"it has {len(answer)} characters, over the cap of {MAX_CHARACTERS}"
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "{([") - (letter in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"it has {deepest} brackets within each other, over the cap of {MAX_DEPTH}"
    return None


def _read(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    read: list[Any] = parse(
        rf"\boxed{{{latex}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None
    )
    return read
