"""A bash that stays: how it is started, and what is typed to it.

In: a cell's text. Out: lines for the standard input of an interactive bash. Waits for nothing.

An interactive bash is the one that drops what it runs at Ctrl-C and keeps its state. A cell is typed as one quoted word behind `eval`, so
whatever it holds (an open quote, half a heredoc) ends with its line. The line behind it reports the status on a descriptor that
the cell does not have: `eval` runs without it, and without the shell's own standard input.
"""

from __future__ import annotations

import os

STATUS = 9
"""Descriptor for reports. A single digit: larger ones bash uses itself, to keep what a redirection hides."""
PLACES = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
OPENING = b"set +mH +o history; shopt -u checkwinsize; unset MAILCHECK; export -n PS1 PS2; PS1=; PS2=\n"
_QUOTED = {ord("\\"): "\\\\", ord("'"): "\\'", ord("\n"): "\\n", ord("\r"): "\\r"}


class Bash:
    """What `sessions.Session` has to know of bash."""

    def __init__(self) -> None:
        """Finds it.

        Raises:
            RuntimeError: there is none in this box.
        """
        found = [path for path in PLACES if os.access(path, os.X_OK)]
        if not found:
            raise RuntimeError(f"no bash in this box (looked for {', '.join(PLACES)}); a session of kind bash needs it")
        self.path = found[0]

    def become(self) -> None:
        """In the child: becomes the shell, with its standard input and descriptor 3 for reports."""
        os.dup2(3, STATUS)
        os.close(3)
        environment = {**os.environ, "PS1": "", "PS2": ""}
        os.execve(self.path, ["bash", "--noprofile", "--norc", "--noediting", "-i"], environment)

    def opening(self, token: bytes) -> bytes:
        """The first lines: no job control, no history, no prompt; then a report."""
        return OPENING + _report(token)

    def cell(self, token: bytes, code: str) -> bytes:
        """Runs a cell.

        Raises:
            ValueError: a NUL in it, which no shell can hold.
        """
        if "\0" in code:
            raise ValueError("a NUL character in a cell of bash")
        quoted = code.translate(_QUOTED).encode("utf-8", "surrogateescape")
        begun = b"PS1= PS2=; builtin echo %s begun >&%d; " % (token, STATUS)
        return begun + b"eval $'" + quoted + b"' </dev/null %d>&-\n" % STATUS + _report(token)

    def sync(self, token: bytes) -> bytes:
        """After Ctrl-C, which may take the rest of a line that is just read with it: empty lines, and another report."""
        return b"\n\n" + _report(token)


def _report(token: bytes) -> bytes:
    # Without a quote: Ctrl-C may take any part of it, and what is left must be a line that does nothing.
    return b"builtin echo %s $? >&%d\n" % (token, STATUS)
