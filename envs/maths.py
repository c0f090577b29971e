r"""`palestra/Math-v0`: problems whose answer is a number or an expression, given in `\boxed{...}`.

| component | weight | earned when                                                                                      |
| --------- | ------ | ------------------------------------------------------------------------------------------------ |
| `right`   | 1.0    | the last `\boxed{...}` of the final message means the same as the task's answer, by math-verify  |
| `boxed`   | 0      | there is a closed `\boxed{...}` at all: a metric                                                  |

No box, an empty one, or a last one that is cut: 0. So is an answer over the caps (`symbolic.MAX_CHARACTERS`, `MAX_DEPTH`). An answer that
cannot be judged within `timeout_s` has no reward: that limit is ours. Generated problems want numbers that are worked out (`meta.form`),
since math-verify would take the question's own expression for its value.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv
from palestra.envs.rubrics import Rubric, Score, Scoring
from palestra.envs.rubrics.processes import MAX_CHARACTERS, START_S, killable
from palestra.envs.rubrics.symbolic import last_box, require, same, too_much, warm
from palestra.envs.tasks import GeneratedTasks, TaskSource, read_tasks
from palestra.envs.types import Message, Task, TaskError

SYSTEM = r"Solve the problem. Give the final answer in \boxed{...}, worked out, and nothing else in the box."

_NUMBER = (
    r"[+-]?\s?(?:[0-9]{1,15}/[0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{0,15}\.[0-9]{1,15}|[0-9]{1,15}"
    r"|\\[dt]?frac\s?\{[+-]?[0-9]{1,15}\}\s?\{[+-]?[0-9]{1,15}\}|\\[dt]?frac[0-9]{2})"
)
_NAMED = rf"(?:x(?:_\{{?[12]\}}?)?\s?=\s?)?{_NUMBER}"
_BETWEEN = r"\s?(?:,|\\text\{\s?(?:and|or)\s?\})\s?"
FORMS: dict[str, re.Pattern[str]] = {
    "number": re.compile(_NAMED),
    "numbers": re.compile(rf"(?:\\\{{\s?)?{_NAMED}(?:{_BETWEEN}{_NAMED}){{0,3}}(?:\s?\\\}})?"),
}
"""What the box of a task with `meta.form` may hold. A task without one takes any expression."""


def latex(value: Fraction) -> str:
    """A fraction in lowest terms."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _fractions(rng: random.Random) -> tuple[str, str, str]:
    a, b = (
        Fraction(whole * (bottom := rng.randint(2, 12)) + rng.randint(1, bottom - 1), bottom)
        for whole in (0, rng.randint(0, 1))
    )
    sign, value = rng.choice([("+", a + b), ("-", a - b), (r"\cdot", a * b), (r"\div", a / b)])
    return (
        f"Compute ${latex(a)} {sign} {latex(b)}$. Give a fraction in lowest terms or an integer.",
        latex(value),
        "number",
    )


def _linear(rng: random.Random) -> tuple[str, str, str]:
    a, c = rng.sample([n for n in range(-9, 10) if n], 2)
    b, d = rng.randint(-20, 20), rng.randint(-20, 20)
    return (
        f"Solve ${_sum((a, 'x'), (b, ''))} = {_sum((c, 'x'), (d, ''))}$ for $x$.",
        latex(Fraction(d - b, a - c)),
        "number",
    )


def _quadratic(rng: random.Random) -> tuple[str, str, str]:
    lead = rng.randint(1, 3)
    first, second = (Fraction(n, lead) for n in rng.sample(range(-9, 10), 2))
    b, c = -lead * (first + second), lead * first * second
    if c.denominator != 1:  # multiplied out, so that all coefficients are integers
        lead, b, c = lead * c.denominator, b * c.denominator, c * c.denominator
    low, high = sorted((first, second))
    question = (
        f"Solve ${_sum((lead, 'x^2'), (int(b), 'x'), (int(c), ''))} = 0$. Give both solutions, separated by a comma."
    )
    return question, f"{latex(low)}, {latex(high)}", "numbers"


def _percent(rng: random.Random) -> tuple[str, str, str]:
    share, whole = rng.randint(1, 19) * 5, rng.randint(2, 60) * 5
    part = Fraction(share * whole, 100)
    if rng.random() < 0.5:
        return f"What is {share}\\% of {whole}?", latex(part), "number"
    more = rng.random() < 0.5
    word, value = ("raised", whole + part) if more else ("lowered", whole - part)
    return f"A price of {whole} is {word} by {share}\\%. What is it then?", latex(value), "number"


def _powers(rng: random.Random) -> tuple[str, str, str]:
    base, first, second = rng.randint(2, 5), rng.randint(2, 5), rng.randint(1, 4)
    sign, exponent = rng.choice([(r"\cdot", first - second), (r"\div", first + second)])
    question = (
        f"Compute ${base}^{{{first}}} {sign} {base}^{{-{second}}}$. Give an integer or a fraction, without powers."
    )
    return question, latex(Fraction(base) ** exponent), "number"


_MAKERS: Mapping[str, Callable[[random.Random], tuple[str, str, str]]] = {
    "fractions": _fractions,
    "linear": _linear,
    "quadratic": _quadratic,
    "percent": _percent,
    "powers": _powers,
}
KINDS = tuple(_MAKERS)
"""Of generated problems."""


def _sum(*terms: tuple[int, str]) -> str:
    """`2x^2 - x + 3` of coefficients and what they stand before; zeros are left out."""
    text = ""
    for number, letters in terms:
        if number:
            size = "" if abs(number) == 1 and letters else str(abs(number))
            sign = ("- " if number < 0 else "+ ") if text else ("-" if number < 0 else "")
            text += f"{' ' if text else ''}{sign}{size}{letters}"
    return text or "0"


@functools.cache
def math_tasks(seed: int = 0, size: int = 4096, kinds: tuple[str, ...] = KINDS) -> TaskSource:
    """A deterministic source that takes the kinds in turn.

    Raises:
        ValueError: unknown kinds, or a size below 1.
    """
    if not kinds or (unknown := sorted(set(kinds) - set(KINDS))):
        raise ValueError(f"kinds must be some of {KINDS}, got {unknown if kinds else kinds}")

    def make(index: int) -> Task:
        kind = kinds[index % len(kinds)]
        question, answer, form = _MAKERS[kind](random.Random(f"math/{seed}/{index}/{kind}"))
        return Task(question, answer, f"math/{seed}/{index}", {"kind": kind, "form": form})

    return GeneratedTasks(size, make)


@functools.cache
def read_problems(path: str) -> TaskSource:
    """The problems of a JSONL file; each answer is LaTeX, or a number.

    Raises:
        TaskError: the file is broken, or an answer is of another kind: says which.
    """
    tasks = read_tasks(path)
    for task in tasks:
        if (
            isinstance(task.answer, bool)
            or not isinstance(task.answer, str | int | float)
            or not str(task.answer).strip()
        ):
            raise TaskError(f"{path}: the answer of {task.id!r} must be LaTeX or a number, got {task.answer!r}")
        if task.meta.get("form") not in (None, *FORMS):
            raise TaskError(
                f"{path}: meta.form of {task.id!r} must be one of {tuple(FORMS)}, got {task.meta['form']!r}"
            )
    return tasks


@functools.cache
def rubric(timeout_s: float) -> Rubric:
    """The reward, as the module's table says. `timeout_s`: of one comparison."""
    compare = killable(same, timeout_s=timeout_s, warm=warm)

    def right(scoring: Scoring) -> Score:
        if len(scoring.answer) > MAX_CHARACTERS:
            return Score(0.0, f"the message has {len(scoring.answer)} characters, over the cap of {MAX_CHARACTERS}")
        extracted = last_box(scoring.answer)
        if extracted is None:
            return Score(0.0, r"no closed \boxed{} at the end")
        why = too_much(extracted) or _formless(extracted, scoring.task.meta.get("form"))
        if why is not None:
            return Score(0.0, f"extracted {extracted[:100]}: {why}")
        said = compare(str(scoring.task.answer), extracted)
        return said if isinstance(said, Score) else Score(float(said), f"extracted {extracted}")

    def boxed(scoring: Scoring) -> bool:
        return len(scoring.answer) <= MAX_CHARACTERS and last_box(scoring.answer) is not None

    # A comparison may wait for a free process and for its start before its own deadline begins.
    return Rubric({"right": right, "boxed": (boxed, 0.0)}, timeout_s=2 * START_S + timeout_s)


def _formless(extracted: str, form: Any) -> str | None:
    if form is None or FORMS[form].fullmatch(extracted):
        return None
    return f"it is not of the form {form!r}"


class MathEnv(MessageEnv):
    """One problem, one message, one boxed answer."""

    deterministic = True
    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        size: int = 4096,
        kinds: Sequence[str] = KINDS,
        file: str | None = None,
        timeout_s: float = 10.0,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """Generated problems by `seed`, `size` and `kinds`, or those of a JSONL `file`. `timeout_s`: of one comparison.

        Raises:
            EnvError: math-verify is not installed. ValueError, TaskError: arguments or a file that cannot be used.
        """
        require()
        self.rubric = rubric(timeout_s)
        if tasks is None:
            tasks = math_tasks(seed, size, tuple(kinds)) if file is None else read_problems(file)
        super().__init__(render_mode, tasks)

    def oracle(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": f"The answer is $\\boxed{{{task.answer}}}$."}]
