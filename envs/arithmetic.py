"""Seeded arithmetic of rising difficulty, and a bounded evaluator for it. Index in, expression out; expression in,
integer out.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence

MAX_CHARACTERS = 200
"""Of an expression: bounds nesting as well."""
MAX_DIGITS = 60
"""Of any intermediate value."""
LEVELS = (1, 2, 3, 4)
WORDS = {"+": "plus", "-": "minus", "*": "times"}

_ALLOWED = re.compile(r"[0-9+\-*() ]+")
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(expression: str) -> int:
    """The value of an expression of integers with + - * and parentheses. Nothing of it is executed.

    Raises:
        ValueError: one line that a model can act on.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("an expression has only integers, + - * and parentheses")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("the expression cannot be read") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _BINARY:
            return _bounded(_BINARY[type(kind)](_value(left), _value(right)))
    raise ValueError("an expression has only integers, + - * and parentheses")


def _bounded(value: int) -> int:
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"the value has more than {MAX_DIGITS} digits")
    return value


def spoken(expression: str) -> str:
    """The question's form: `12*3` is "12 times 3"."""
    spaced = re.sub(r"(?<=[0-9)])([+\-*])", lambda found: f" {WORDS[found[1]]} ", expression)
    return f"What is {spaced}?"


def make_expression(seed: int, index: int, level: int) -> str:
    """The expression of a task; equal arguments give equal expressions.

    Levels: 1 two numbers of 1..99; 2 two numbers of 100..9999; 3 three numbers with precedence; 4 parentheses, four
        numbers.
    """
    if level not in LEVELS:
        raise ValueError(f"levels are {LEVELS}, got {level!r}")
    rng = random.Random(f"{seed}/{index}/{level}")
    signs = [rng.choice("+-*") for _ in range(3)]
    if level == 1:
        return f"{rng.randint(1, 99)}{signs[0]}{rng.randint(1, 99)}"
    if level == 2:
        return f"{rng.randint(100, 9999)}{signs[0]}{rng.randint(100, 9999)}"
    a, b, c, d = (rng.randint(1, 99) for _ in range(4))
    if level == 3:
        return f"{a}{signs[0]}{b}{signs[1]}{c}"
    return f"({a}{signs[0]}{b}){signs[1]}({c}{signs[2]}{d})"


def level_at(levels: Sequence[int], index: int, size: int) -> int:
    """The level of a task: the sequence rises through `levels` in equal parts."""
    return levels[index * len(levels) // size]
