"""Checks of programs and by test commands. See `grading` for which is how strong.

In: a box with the work in it. Out: grades. Waits for what runs in the box.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.sandbox.artifacts import TESTS
from palestra.sandbox.grading import Grade
from palestra.sandbox.types import MAX_OUTPUT_BYTES, Box, ExecResult, SandboxError

Harness = Literal["script", "unittest", "pytest", "none"]


def same_lines(expected: bytes, found: bytes) -> bool:
    """Equal line by line, but for blanks at the ends of lines and empty lines at the end."""
    return _lines(expected) == _lines(found)


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


@dataclass(frozen=True, slots=True)
class Case:
    """What a program is given, and what it should answer."""

    stdin: bytes
    expected: bytes


@dataclass(frozen=True, slots=True)
class Cases:
    """Runs the work once per case and compares out here: no expected output is ever in the box, so there is nothing to find or forge."""

    argv: Sequence[str] | str
    """The program, such as ["python3", "solution.py"]; a text is a line of shell."""
    cases: Sequence[Case]
    case_timeout: float = 10.0
    """Most seconds for one case."""
    same: Callable[[bytes, bytes], bool] = same_lines
    """Whether what was found is what was expected."""
    stop_early: bool = True
    """Whether the first failure ends it; else all cases run, and `Grade.passed` counts."""

    async def run(self, box: Box, timeout: float) -> Grade:
        if not self.cases:
            raise ValueError("no cases: there is nothing that could fail")
        end = time.monotonic() + timeout
        passed, reason = 0, ""
        result: ExecResult | None = None
        for number, case in enumerate(self.cases, 1):
            left = min(self.case_timeout, end - time.monotonic())
            if left <= 0:
                reason = reason or f"case {number}: no time was left of {timeout:g} s"
                break
            result = await box.exec(self.argv, stdin=case.stdin, timeout=left, max_output=_room(case.expected))
            fault_of(result)
            if wrong := self._wrong(case, result):
                reason = reason or f"case {number}: {wrong}"
                if self.stop_early or not box.alive:
                    break
            else:
                passed += 1
        verdict = passed == len(self.cases)
        return Grade(verdict, reason or "all cases passed", passed, len(self.cases), result=result)

    def _wrong(self, case: Case, result: ExecResult) -> str:
        if result.status != "ok":
            return f"{result.status} {result.message or result.text[-200:]}".strip()
        if result.truncated or not self.same(case.expected, result.stdout):
            return "another output than was expected"
        return ""


def _room(expected: bytes) -> int:
    """How much output is kept: enough to know that it is not what was expected."""
    return min(MAX_OUTPUT_BYTES, 2 * len(expected) + 4096)


def fault_of(result: ExecResult) -> None:
    """A run that failed by a fault of ours is no verdict.

    Raises:
        SandboxError: it did.
    """
    if result.status == "infra_error":
        raise SandboxError(result.message or "the box was lost")


@dataclass(frozen=True, slots=True)
class Command:
    """Runs tests in the box. Weaker than the others: work that the tests import shares their process, and can lie to them by patching what
    they compare with, or read what the harness remembers. Held against it: Python runs isolated, tests and the standard library are found
    before the work, the work may have no name that steers a runner, tests that changed while they ran do not count, and success is a
    number that only a harness which came to its end says, once: neither an exit status, nor a printed line, nor a file passes.

    With harness "none" any program is run and its exit status decides. That is for programs that do not load the work into themselves.
    """

    argv: Sequence[str] = ()
    """script: the test file, below the folder of the tests, and its arguments. unittest: files; none: all test*.py. pytest: its arguments.
    none: the program."""
    harness: Harness = "script"
    """script: a file that raises (an AssertionError, say) where something is wrong, and runs to its last line; ending early by `sys.exit`
    is no success. unittest, pytest: at least one test must have run, and none may have failed. pytest must be in `BoxSpec.packages`; its
    plugins are loaded by name only (`-p`)."""

    def __post_init__(self) -> None:
        if self.harness in ("script", "none") and not self.argv:
            raise ValueError(f"a command of harness {self.harness!r} needs argv")
        program = self.argv[0].rpartition("/")[2] if self.argv else ""
        if self.harness == "none" and program.startswith(("python", "pytest", "pypy")):
            raise ValueError(
                f"{program} by its exit status: work that it imports could end it with 0. Use harness script, unittest or pytest"
            )

    async def run(self, box: Box, timeout: float) -> Grade:
        if self.harness == "none":
            result = await box.exec(list(self.argv), timeout=timeout)
            fault_of(result)
            return Grade(result.status == "ok", _says(result), result=result)
        begun, done = secrets.token_hex(16).encode(), secrets.token_hex(16).encode()
        wish = {"style": self.harness, "argv": list(self.argv), "tests": TESTS}
        code = f"{harness_text()}\nmain({wish!r})\n"
        result = await box.run_python(code, stdin=begun + b" " + done, timeout=timeout)
        fault_of(result)
        if begun not in result.stdout:
            # Nothing of the work had run yet: a file that is missing, a pytest that is not there.
            raise SandboxError(f"the tests could not begin: {result.status} {_says(result)}")
        if result.status == "ok" and result.stdout == begun + done:
            return Grade(True, "the tests passed", result=result)
        return Grade(False, _says(result), result=result)


def _says(result: ExecResult) -> str:
    """The end of what it printed, for people."""
    return (result.message or result.text.strip()[-400:] or result.status).strip()


@functools.cache
def harness_text() -> str:
    """The source of `inside.harness`, which runs in the box."""
    return (Path(__file__).parent / "inside" / "harness.py").read_text()
