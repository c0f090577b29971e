"""What an engine's log says, in a person's words. SGLang prints hundreds of lines while it starts; two things in them matter.

In: the end of a log. Out: what the engine is doing (`phase`), or why it ended (`failure`). Pure.
"""

from __future__ import annotations

import re

PHASES = (
    ("Load weight begin", "loads weights"),
    ("Load weight end", "makes its cache"),
    ("Memory pool end", "warms up"),
    ("Capture cuda graph begin", "captures graphs"),
    ("Capture cuda graph end", "warms up"),
    ("The server is fired up", "answers its first request"),
)
"""What SGLang prints, and what it does from then on; a text that stands later in the log counts."""
_CONSEQUENCES = ("EOFError", "BrokenPipeError", "ConnectionResetError", "KeyboardInterrupt", "SystemExit")
"""Exceptions of processes whose neighbour has died: the neighbour's own says why."""
_PERCENT = re.compile(r"(\d{1,3})% Completed")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?")
_TELLING = re.compile(r"\b(?:error|failed|fatal|cannot|killed|panicked)\b|out of memory|already in use", re.IGNORECASE)
_NOISE = ("Ignore import error", "Cannot detect CUDA architecture", "Fail to set RLIMIT")
"""What SGLang prints at every start on a machine without a GPU."""
_CHAIN = "the above exception"
TRACEBACK = "Traceback (most recent call last)"
MOST_LINES, MOST_CHARACTERS = 12, 400
"""Of an excerpt, and of each of its lines."""


def phase(log: str) -> str:
    """What an engine that is not ready yet does."""
    found, words = max((log.rfind(mark), words) for mark, words in PHASES)
    if found < 0:
        return "starts"
    if words == "loads weights" and (done := _PERCENT.findall(log, found)):
        return f"loads weights ({done[-1]}%)"
    return words


def failure(log: str) -> str:
    """The lines that say why it ended: the last exception that is no consequence of another, after the place where it was raised. Without
    one the last lines that sound like a fault, without those the last lines."""
    lines = _lines(log)
    if (found := _cause(lines)) is not None:
        return "\n".join([found[0], *found[1]])
    plain = [_STAMP.sub("", line) for line in lines]
    telling = [line for line in plain if _TELLING.search(line) and not any(mark in line for mark in _NOISE)]
    return "\n".join((telling or plain)[-5:]) or "(it printed nothing)"


def exception(log: str) -> str | None:
    """The first line of that exception; None where there is none."""
    found = _cause(_lines(log))
    return None if found is None else found[1][0]


def _lines(log: str) -> list[str]:
    """Its lines without colours, and of those that were written over what they showed last."""
    lines = [line.rpartition("\r")[2].rstrip() for line in _COLOURS.sub("", log).splitlines()]
    return [line[:MOST_CHARACTERS] for line in lines if line]


def _cause(lines: list[str]) -> tuple[str, list[str]] | None:
    found = _tracebacks(lines)
    causes = [(place, message) for place, message in found if not message[0].startswith(_CONSEQUENCES)]
    return next(reversed(causes or found), None)


def _tracebacks(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Per traceback the innermost place, and the exception with the lines that its text goes on over."""
    found = []
    for start, line in enumerate(lines):
        if TRACEBACK not in line:
            continue
        # Frames are indented; the first line that is not is the exception's.
        end = next((at for at in range(start + 1, len(lines)) if not lines[at].startswith(" ")), None)
        if end is not None:
            places = [frame.strip() for frame in lines[start + 1 : end] if frame.startswith("  File ")]
            found.append(("".join(places[-1:]), _message(lines[end : end + MOST_LINES])))
    return found


def _message(lines: list[str]) -> list[str]:
    """An exception's lines, of those that begin with it: until the next line of a logger, or of another traceback."""
    others = (at for at, line in enumerate(lines) if at and (_STAMP.match(line) or TRACEBACK in line or _CHAIN in line))
    return lines[: next(others, len(lines))]
