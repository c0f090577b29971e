"""The box of an episode with tools: made at the first call, made anew when code broke it, given back at the end.

In: what a model wants run, written or read. Out: texts of bounded length. Waits for boxes, and for what runs in them.
"""

from __future__ import annotations

from palestra.envs import boxes
from palestra.envs.boxes import EpisodeBox
from palestra.envs.code.examples import outcome_text
from palestra.envs.episodebox import BoxSession
from palestra.envs.types import ToolError
from palestra.sandbox.types import SessionKind

MOST_OUTPUT = 8 * 1024
"""Bytes of each stream that a model sees."""
MOST_FILE = 64 * 1024
"""Bytes of a file that a model writes or reads at a time."""


class Toolbox:
    """One episode's box and its two sessions."""

    def __init__(self, run_s: float) -> None:
        """`run_s`: most seconds for what is run."""
        self._run_s = run_s
        self._box: EpisodeBox | None = None
        self._sessions: dict[SessionKind, BoxSession] = {}

    def box(self) -> EpisodeBox:
        """The episode's box.

        Raises:
            EnvError: none can be had.
        """
        if self._box is not None and self._box.broken:
            self.close()
        if self._box is None:
            self._box = boxes.shared().open()
        return self._box

    def run(self, kind: SessionKind, code: str) -> str:
        """What a cell prints, and how it ended.

        Raises:
            EnvError: the box was lost. ToolError: no session can be had.
        """
        box = self.box()
        session = self._sessions.get(kind)
        if session is None or not session.alive:
            session = self._sessions[kind] = box.session(kind)
        return outcome_text(box, session.run(code, self._run_s, MOST_OUTPUT))

    def write(self, path: str, content: str) -> str:
        """Writes a file.

        Raises:
            EnvError: the box was lost. ToolError: it cannot be written.
        """
        data = content.encode("utf-8", "replace")
        if len(data) > MOST_FILE:
            raise ToolError(f"the content has {len(data)} bytes; at most {MOST_FILE} can be written at a time")
        self.box().put(_path(path), data)
        return f"{len(data)} bytes written"

    def read(self, path: str) -> str:
        """A file's text.

        Raises:
            EnvError: the box was lost. ToolError: it cannot be read, or is too large.
        """
        return self.box().get(_path(path), MOST_FILE).decode("utf-8", "replace")

    def left(self, path: str, most: int) -> str:
        """What the model left in a file; "" where there is no box, or no such file of at most `most` bytes.

        Raises:
            EnvError: the box was lost.
        """
        if self._box is None or self._box.broken:
            return ""
        try:
            return self._box.get(path, most).decode("utf-8", "replace")
        except ToolError:
            return ""

    def close(self) -> None:
        """Gives the box back. Safe to call twice."""
        box, self._box = self._box, None
        self._sessions.clear()
        if box is not None:
            box.close()


def _path(path: str) -> str:
    if not path.strip("/. ") or "\0" in path or len(path) > 255:
        raise ToolError(f"{path[:80]!r} is no path of a file")
    return path
