"""From a problem to a verdict: the cases run out here, the work in a fresh box, and literals or texts cross between them.

In: a problem and the work. Out: how many cases it passes. Waits for the grader's box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.envs.code.types import WORK, Case, Problem
from palestra.sandbox import checks
from palestra.sandbox.calls import Calls, Candidate
from palestra.sandbox.grading import Check, Grade

PROGRAM = ("python3", WORK)


@dataclass(slots=True)
class CaseJudge:
    """Calls the function with each case's arguments. `passed` counts the right ones of the last run."""

    entry: str
    cases: Sequence[Case]
    stop_early: bool
    passed: int = field(default=0, init=False)

    def __call__(self, call: Candidate) -> bool:
        self.passed = 0  # a check that met a fault of ours is run again
        for case in self.cases:
            if self._right(call, case):
                self.passed += 1
            elif self.stop_early:
                return False
        return self.passed == len(self.cases)

    def _right(self, call: Candidate, case: Case) -> bool:
        try:
            found = call(self.entry, *case.given)
        except Exception:  # noqa: BLE001 - whatever the function raises is a wrong value
            return False
        return same_value(found, case.expected)


def same_value(found: Any, expected: Any) -> bool:
    """Equal as JSON values: truth values and numbers are not the same, a tuple stands for a list, and fractions may differ in their last
    digits.
    """
    if isinstance(expected, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(expected)
        return alike and all(map(same_value, found, expected))
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and found.keys() == expected.keys()
        return alike and all(same_value(found[key], value) for key, value in expected.items())
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, float) and isinstance(found, int | float):
        try:
            return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:  # an integer that no float can hold
            return False
    if isinstance(expected, int) and isinstance(found, int | float):
        return found == expected
    return type(found) is type(expected) and bool(found == expected)


class Examination:
    """One look at one work: the check to run, and afterwards the share of cases that passed."""

    def __init__(self, problem: Problem, *, whole: bool, case_s: float) -> None:
        """`whole`: nothing but all cases counts, so the first failure ends it. `case_s`: most seconds for a program's case."""
        self._total, self._whole = len(problem.cases), whole
        self._judge = CaseJudge(problem.entry, problem.cases, whole)
        self.check: Check
        if problem.kind == "function":
            self.check = Calls(WORK, self._judge)
        else:
            cases = [checks.Case(case.given.encode(), case.expected.encode()) for case in problem.cases]
            self.check = checks.Cases(PROGRAM, cases, case_timeout=case_s, stop_early=whole)

    def share(self, grade: Grade) -> float:
        """From 0 to 1; 0 or 1 where the whole counts."""
        if grade.verdict:
            return 1.0
        if self._whole:
            return 0.0
        passed = self._judge.passed if isinstance(self.check, Calls) else grade.passed
        return min(passed, self._total - 1) / self._total


def note_of(grade: Grade) -> str:
    """Why, in one line for people."""
    lines = grade.reason.strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""
