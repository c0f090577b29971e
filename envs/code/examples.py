"""Tries a problem's visible cases in a box, for the policy to read. No verdict comes from here: the work runs in the same process and could
say what it likes, to its own disadvantage.

In: a box that has the work in it. Out: whether all passed, and a report. Waits for the box.
"""

from __future__ import annotations

from palestra.envs.code.judging import PROGRAM
from palestra.envs.code.types import WORK, Case, Problem
from palestra.envs.episodebox import EpisodeBox
from palestra.sandbox.checks import same_lines
from palestra.sandbox.types import ExecResult

MOST_REPORT = 4096
"""Bytes of a report, and of what a program printed."""

_TRIAL = """
import sys
path, entry, cases = {path!r}, {entry!r}, {cases!r}
names = {{"__name__": "solution"}}
with open(path, encoding="utf-8") as file:
    exec(compile(file.read(), path, "exec"), names)
if entry not in names:
    sys.exit(f"{{path}} defines no {{entry}}")
passed = 0
for arguments, expected in cases:
    shown = f"{{entry}}({{', '.join(map(repr, arguments))}})"
    try:
        found = names[entry](*arguments)
    except Exception as error:
        print(f"FAILED {{shown}}: raised {{type(error).__name__}}: {{error}}"[:400])
        continue
    right = found == expected
    passed += right
    print(f"passed {{shown}}" if right else f"FAILED {{shown}}: expected {{expected!r}}, got {{found!r}}"[:400])
print(f"{{passed}} of {{len(cases)}} examples passed")
sys.exit(0 if passed == len(cases) else 1)
"""


def try_examples(box: EpisodeBox, problem: Problem, timeout_s: float) -> tuple[bool, str]:
    """Whether the work in `box` passes the examples, and what happened, in at most a few thousand characters.

    Raises:
        EnvError: the box was lost.
    """
    if not problem.examples:
        return True, "There are no examples."
    if problem.kind == "function":
        cases = [(list(case.given), case.expected) for case in problem.examples]
        code = _TRIAL.format(path=WORK, entry=problem.entry, cases=cases)
        result = box.run_python(code, timeout_s=timeout_s, max_output=MOST_REPORT)
        return result.status == "ok", outcome_text(box, result)
    lines, passed = [], 0
    for number, case in enumerate(problem.examples, 1):
        result = box.exec(PROGRAM, stdin=case.given.encode(), timeout_s=timeout_s, max_output=MOST_REPORT)
        right = result.status == "ok" and same_lines(case.expected.encode(), result.stdout)
        passed += right
        lines.append(f"passed example {number}" if right else _failed(box, number, case, result))
        if box.broken:
            break
    lines.append(f"{passed} of {len(problem.examples)} examples passed")
    return passed == len(problem.examples), "\n".join(lines)


def _failed(box: EpisodeBox, number: int, case: Case, result: ExecResult) -> str:
    got = outcome_text(box, result)
    return f"FAILED example {number}: for the input {case.given!r} expected {case.expected!r}, got {got[:400]!r}"


def outcome_text(box: EpisodeBox, result: ExecResult) -> str:
    """What code printed, and how it ended where that was not well."""
    text = box.text(result).rstrip("\n")
    if result.truncated:
        text += f"\n[output cut; {result.bytes_total} bytes in all]"
    if result.status == "nonzero":
        ended = f"[exit {result.exit_code}]" if result.exit_code is not None else f"[ended by signal {result.signal}]"
        text += f"\n{ended}" if not result.message else f"\n{ended} {result.message}"
    elif result.status != "ok":
        text += f"\n[{result.status}: {result.message}]"
    if box.broken:
        text += "\n[the box is gone, with its files; the next call has a new one]"
    return text.strip("\n") or "(no output)"
