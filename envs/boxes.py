"""Boxes for environments: the plain, blocking face of the sandbox's pool.

In: the run's `[sandbox]` section, by `configure`. Out: a box per episode, and verdicts of graders in boxes of their own. The pool lives on
the process's loop thread, is made when the first box is asked for, and closed when the process ends. Waits for boxes and for what runs in
them, each time with a deadline.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping

from palestra.envs.episodebox import MARGIN_S, EpisodeBox, wait_for
from palestra.envs.sandboxes import SandboxConfig, make_backend, make_pool
from palestra.envs.types import EnvError
from palestra.sandbox import grading
from palestra.sandbox.grading import Check, Grade
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import Backend

__all__ = ["Boxes", "EpisodeBox", "close_all", "configure", "shared"]

logger = logging.getLogger(__name__)

START_S = 180.0
"""Most seconds for the backend and the first box to come up."""
WAIT_S = 300.0
"""Most seconds that an episode waits for a box: others are in the middle of theirs, and wait for the model."""
TRIES = 3
"""Boxes that a grader takes before it says that there is no verdict."""
FIXED = ("bubblewrap", "docker")
"""Backends whose boxes have a /workspace of that very name."""

Start = Callable[[SandboxConfig], Awaitable[tuple[Backend, Pool]]]


async def start_pool(section: SandboxConfig) -> tuple[Backend, Pool]:
    """The section's backend and pool, both started.

    Raises:
        SandboxError: it cannot be had here; the text says what is missing.
    """
    backend = await make_backend(section)
    try:
        pool = make_pool(section, backend)
        await pool.start()
    except BaseException:
        await backend.close()
        raise
    return backend, pool


class Boxes:
    """The boxes of one section in this process. Thread-safe."""

    def __init__(self, section: SandboxConfig, start: Start = start_pool) -> None:
        self.section, self._start = section, start
        self._lock = threading.Lock()
        self._running: tuple[Backend, Pool] | None = None

    def open(self, wait_s: float = WAIT_S) -> EpisodeBox:
        """A box that nothing ran in. Give it back: `with boxes.open() as box`, or `close`.

        Raises:
            EnvError: none within `wait_s` seconds, or none can be had here.
        """
        backend, pool = self._started()
        box = wait_for(pool.acquire(timeout=wait_s), wait_s + MARGIN_S, "taking a box")
        made = EpisodeBox(pool, box, self.grade)
        if backend.name not in FIXED:
            made.learn_home()
        return made

    def grade(
        self,
        artifacts: Mapping[str, bytes],
        check: Check,
        tests: Mapping[str, bytes] | None = None,
        timeout_s: float = 30.0,
    ) -> Grade:
        """The verdict on these files, from a box that nothing else ran in; it is never None. `timeout_s` is the check's own time.

        Raises:
            EnvError: there is no verdict, by a fault of ours.
            ValueError: a name that may not cross, or a check that was made wrongly.
        """
        _, pool = self._started()
        work = grading.grade(
            None, pool, artifacts=artifacts, check=check, tests=tests, timeout=timeout_s, wait=WAIT_S, tries=TRIES
        )
        found = wait_for(work, WAIT_S + TRIES * (timeout_s + MARGIN_S), "grading")
        if found.verdict is None:
            raise EnvError(f"sandbox: {found.reason}")
        return found

    def figures(self) -> dict[str, float]:
        """The pool's counts; empty before the first box."""
        return {} if self._running is None else self._running[1].figures()

    def close(self) -> None:
        """Destroys all boxes, those in use too. A box that is asked for later starts anew. Safe to call twice."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            wait_for(_close(*running), START_S, "closing")

    def _started(self) -> tuple[Backend, Pool]:
        with self._lock:
            if self._running is None:
                self._running = wait_for(self._bring_up(), START_S, "starting")
            return self._running

    async def _bring_up(self) -> tuple[Backend, Pool]:
        return await self._start(self.section)


async def _close(backend: Backend, pool: Pool) -> None:
    await pool.close()
    await backend.close()


_lock = threading.Lock()
_section = SandboxConfig()
_made: dict[str, Boxes] = {}


def configure(section: SandboxConfig) -> None:
    """Sets the section that `shared` goes by from here on, in this process."""
    global _section
    with _lock:
        _section = section


def shared() -> Boxes:
    """The process's boxes of the section in force: the same ones for each equal section. Nothing is started yet."""
    with _lock:
        key = _section.model_dump_json()
        if key not in _made:
            _made[key] = Boxes(_section)
        return _made[key]


def close_all() -> None:
    """Destroys all boxes of this process. Safe to call twice; it is called when the process ends."""
    with _lock:
        made = list(_made.values())
    for boxes in made:
        try:
            boxes.close()
        except EnvError as error:
            logger.warning("%s", error)


def _forget() -> None:
    """A forked child has the objects, but neither their loop's thread nor a right to their boxes."""
    global _lock
    _lock = threading.Lock()
    _made.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close_all)
