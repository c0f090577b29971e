"""Families of small functions: each draws its constants and says, in words and in Python, what has to be written.

A seeded generator goes in, a `Sketch` comes out. Levels rise: 1 one sum, 2 one step of another kind, 3 a loop or a condition, 4 several
steps after each other. Waits for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Argument = Literal["number", "text", "numbers"]
LEVELS = (1, 2, 3, 4)
NAMES: dict[Argument, str] = {"number": "x", "text": "s", "numbers": "xs"}
"""What the one argument is called in the words and in the code."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """One thing to write."""

    argument: Argument
    says: str
    """What comes back, to follow "returns" or "prints"."""
    body: str
    """Lines of the reference, the last one a return."""


Family = Callable[[random.Random], Sketch]


def _sums(rng: random.Random) -> Sketch:
    n = rng.randint(1, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    return Sketch("number", f"x {word} {n}", f"return x {sign} {n}")


def _two_sums(rng: random.Random) -> Sketch:
    a, b = rng.randint(2, 12), rng.randint(1, 50)
    word, sign = rng.choice((("plus", "+"), ("minus", "-")))
    return Sketch("number", f"{a} times x {word} {b}", f"return {a} * x {sign} {b}")


def _remainder(rng: random.Random) -> Sketch:
    n = rng.randint(3, 30)
    return Sketch("number", f"the remainder of x divided by {n}", f"return x % {n}")


def _distance(rng: random.Random) -> Sketch:
    n = rng.randint(2, 60)
    return Sketch("number", f"how far x is from {n}", f"return abs(x - {n})")


def _repeat(rng: random.Random) -> Sketch:
    n = rng.randint(2, 5)
    return Sketch("text", f"the text s repeated {n} times", f"return s * {n}")


def _affix(rng: random.Random) -> Sketch:
    mark = rng.choice("!?.#*+-") * rng.randint(1, 3)
    if rng.random() < 0.5:
        return Sketch("text", f"the text s with {mark!r} in front of it", f"return {mark!r} + s")
    return Sketch("text", f"the text s with {mark!r} behind it", f"return s + {mark!r}")


def _beginning(rng: random.Random) -> Sketch:
    n = rng.randint(1, 6)
    if rng.random() < 0.5:
        return Sketch(
            "text", f"the first {n} characters of the text s, or all where there are fewer", f"return s[:{n}]"
        )
    return Sketch("text", f"the text s without its first {n} characters", f"return s[{n}:]")


def _total(rng: random.Random) -> Sketch:
    n = rng.randint(2, 40)
    return Sketch("numbers", f"the sum of the list xs plus {n}", f"return sum(xs) + {n}")


def _count_above(rng: random.Random) -> Sketch:
    n, above = rng.randint(-10, 30), rng.random() < 0.5
    word, sign = ("greater", ">") if above else ("less", "<")
    return Sketch(
        "numbers", f"how many numbers of the list xs are {word} than {n}", f"return sum(1 for x in xs if x {sign} {n})"
    )


def _sum_of_multiples(rng: random.Random) -> Sketch:
    n = rng.randint(2, 9)
    return Sketch(
        "numbers",
        f"the sum of those numbers of the list xs that {n} divides",
        f"return sum(x for x in xs if x % {n} == 0)",
    )


def _replace_letter(rng: random.Random) -> Sketch:
    old, new = rng.sample("abcdefghij", 2)
    return Sketch("text", f"the text s with every {old!r} replaced by {new!r}", f"return s.replace({old!r}, {new!r})")


def _clip(rng: random.Random) -> Sketch:
    low = rng.randint(-20, 10)
    high = low + rng.randint(5, 30)
    return Sketch(
        "number",
        f"x, but {low} where x is less than {low} and {high} where x is greater than {high}",
        f"return max({low}, min({high}, x))",
    )


def _by_sign(rng: random.Random) -> Sketch:
    n, a, b = rng.randint(-5, 20), rng.randint(2, 9), rng.randint(1, 30)
    return Sketch(
        "number",
        f"x times {a} where x is greater than {n}, else x minus {b}",
        f"if x > {n}:\n    return x * {a}\nreturn x - {b}",
    )


def _words(rng: random.Random) -> Sketch:
    n = rng.randint(2, 5)
    return Sketch(
        "text",
        f"how many words of the text s have more than {n} letters; words are separated by blanks",
        f"return sum(1 for word in s.split() if len(word) > {n})",
    )


def _pipeline(rng: random.Random) -> Sketch:
    """Two or three steps over a list, then one number of it."""
    lines, words = [], []
    for kind in rng.sample(("keep", "scale", "shift"), rng.randint(2, 3)):
        n = rng.randint(2, 9)
        match kind:
            case "keep":
                words.append(f"keep the numbers that {n} does not divide")
                lines.append(f"xs = [x for x in xs if x % {n} != 0]")
            case "scale":
                words.append(f"multiply each by {n}")
                lines.append(f"xs = [x * {n} for x in xs]")
            case _:
                words.append(f"subtract {n} from each")
                lines.append(f"xs = [x - {n} for x in xs]")
    says, line = rng.choice(
        (("their sum", "return sum(xs)"), ("how many are positive", "return sum(1 for x in xs if x > 0)"),
         ("the largest, or 0 where none is left", "return max(xs, default=0)"))
    )  # fmt: skip
    steps = ", then ".join(words)
    return Sketch(
        "numbers", f"the outcome of these steps on the list xs: {steps}; then {says}", "\n".join((*lines, line))
    )


def _digits(rng: random.Random) -> Sketch:
    times, n = rng.randint(2, 9), rng.randint(2, 9)
    return Sketch(
        "number",
        f"the sum of the decimal digits of {times} times the absolute value of x, times {n}",
        f"return {n} * sum(int(digit) for digit in str({times} * abs(x)))",
    )


def _cipher(rng: random.Random) -> Sketch:
    n = rng.randint(1, 25)
    return Sketch(
        "text",
        f"the text s with each letter from a to z moved {n} places on in the alphabet (after z comes a), all else as it is",
        f'return "".join(chr((ord(c) - 97 + {n}) % 26 + 97) if "a" <= c <= "z" else c for c in s)',
    )


FAMILIES: dict[int, Sequence[Family]] = {
    1: (_sums,),
    2: (_two_sums, _remainder, _distance, _repeat, _affix, _beginning, _total),
    3: (_count_above, _sum_of_multiples, _replace_letter, _clip, _by_sign, _words),
    4: (_pipeline, _pipeline, _digits, _cipher),
}


def sketch(rng: random.Random, level: int) -> Sketch:
    """Something to write, of a level."""
    return rng.choice(FAMILIES[level])(rng)


def inputs(rng: random.Random, argument: Argument, n: int) -> list[object]:
    """`n` arguments, no two equal. The first ones are those where mistakes show: nothing, zero, negative ones."""
    odd: dict[Argument, list[object]] = {"number": [0, -3], "text": [""], "numbers": [[]]}
    made = odd[argument]
    while len(made) < n:
        if (value := _value(rng, argument)) not in made:
            made.append(value)
    return made


def _value(rng: random.Random, argument: Argument) -> object:
    if argument == "number":
        return rng.randint(-60, 120)
    if argument == "numbers":
        return [rng.randint(-30, 60) for _ in range(rng.randint(1, 7))]
    words = ("".join(rng.choices("abcdefghijz", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4)))
    return " ".join(words)
