"""Verdicts on what was seen. In: `Seen`. Out: `Judged`, with words that do not change from run to run. Waits for nothing."""

from __future__ import annotations

import signal

from palestra.sandbox.attacks.types import Judge, Judged, Seen
from palestra.sandbox.types import Status

REFUSALS = frozenset(("EPERM", "EACCES", "ENOSYS"))
"""What a call that is not to be had answers; other errors say that the kernel looked at its arguments."""
ENDED: dict[Status, str] = {
    "oom": "killed for memory",
    "timeout": "stopped at its deadline",
    "pids": "refused more processes",
    "output_limit": "killed for its output",
}


def finished(seen: Seen) -> bool:
    """Whether the probe came to its end, or was killed for a call by seccomp."""
    return "END" in seen.said or seen.result.signal == signal.SIGSYS


def untried(seen: Seen) -> Judged:
    """For a probe that did not do its work."""
    result = seen.result
    words = f"{result.status} {result.exit_code} {result.message} {result.text[-300:]!r}"
    return Judged("untried", "the probe failed", words)


def fails(seen: Seen) -> Judged:
    """Every attempt must fail, by whatever error."""
    return _attempts(seen, lambda word: word != "DONE")


def refused(seen: Seen) -> Judged:
    """Every call must be refused before the kernel looks at its arguments."""
    return _attempts(seen, REFUSALS.__contains__)


def _attempts(seen: Seen, good: object) -> Judged:
    assert callable(good)
    made = {name: word for name, word in seen.said.items() if name != "END"}
    detail = " ".join(f"{name}={word}" for name, word in made.items())
    through = [name for name, word in made.items() if not good(word)]
    if through:
        return Judged("ESCAPED", f"got through: {', '.join(through)}", detail)
    if not finished(seen) or not (made or seen.result.signal):
        return untried(seen)
    if not seen.usable:
        return Judged("ESCAPED", "the box was lost", detail)
    return Judged("contained", "refused", detail)


def bounded(name: str, bound: str, slack: float = 1.0, *, unit: int = 1) -> Judge:
    """The number that is told as `name`, times `unit`, may reach this field of the limits; being stopped for it is as good."""

    def judge(seen: Seen) -> Judged:
        most = getattr(seen.limits, bound) * slack
        reached = int(seen.said.get(name, "-1"))
        detail = f"{name}={reached} of {most:g}; {seen.result.status} {seen.result.message}"
        if reached * unit > most:
            return Judged("ESCAPED", f"more than {bound}", detail)
        if not seen.usable:
            return Judged("ESCAPED", "the box was lost", detail)
        if not seen.survivors and (reached >= 0 or seen.result.status in ENDED):
            return Judged("contained", f"stopped at {bound}", detail)
        return Judged("ESCAPED", "processes survived", detail) if seen.survivors else untried(seen)

    return judge


def stopped(*statuses: Status) -> Judge:
    """The run must have been ended in one of these ways, with nothing of it left and the box as good as before."""

    def judge(seen: Seen) -> Judged:
        result = seen.result
        detail = f"{result.status} {result.message}; {seen.survivors} left; box {'usable' if seen.usable else 'lost'}"
        if seen.survivors:
            return Judged("ESCAPED", "processes survived", detail)
        if not seen.usable:
            return Judged("ESCAPED", "the box was lost", detail)
        if result.status not in statuses:
            return Judged("ESCAPED", f"not stopped ({result.status})", detail + result.text[-200:])
        return Judged("contained", ENDED.get(statuses[0], "ended"), detail)

    return judge


def leaves_nothing(seen: Seen) -> Judged:
    """What the run left running must be dead when its answer is there."""
    detail = f"{seen.result.status}; {seen.survivors} left"
    if seen.survivors:
        return Judged("ESCAPED", "processes survived", detail)
    if "STARTED" not in seen.said:
        return untried(seen)
    return Judged("contained", "killed at the end of the run", detail) if seen.usable else _lost(detail)


def unseen(seen: Seen) -> Judged:
    """The secret must be in nothing that came out."""
    detail = seen.result.stdout[-200:].decode("utf-8", "replace")
    if seen.scene.tell_tale(seen.result.stdout + seen.result.stderr + seen.fetched):
        return Judged("ESCAPED", "the secret came out", detail)
    if not finished(seen):
        return untried(seen)
    return Judged("contained", "not to be seen", detail) if seen.usable else _lost(detail)


def unreached(*listeners: str) -> Judge:
    """Nobody may have come to these listeners."""

    def judge(seen: Seen) -> Judged:
        came = [name for name in listeners if seen.scene.arrived(name)]
        detail = " ".join(f"{name}={word}" for name, word in seen.said.items())
        if came:
            return Judged("ESCAPED", f"reached {', '.join(came)}", detail)
        return Judged("contained", "unreachable", detail) if finished(seen) else untried(seen)

    return judge


def _lost(detail: str) -> Judged:
    return Judged("ESCAPED", "the box was lost", detail)
