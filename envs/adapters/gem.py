"""`palestra/Gem-v0`: environments of gem (`gem-llm`): text in, text out, a reward per step.

A task is a seed. gem draws from the process's global generators: each environment here has states of its own, which are put in for the
length of a call and taken out again, under one lock for the process. So equal seeds give equal episodes, whatever else goes on; but gem's
environments of one process step one at a time.

| reward | is |
| ------ | -- |
| of a step | gem's own, as it is: it can be negative, and games give part of it for a lost game |

gem says both that an episode ended and that a limit cut it: that counts as ended.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from palestra.envs.adapters.foreign import ForeignEnv, Move, seed_of, seeded_tasks, user
from palestra.envs.rubrics.types import text_of
from palestra.envs.tasks import TaskSource
from palestra.envs.types import EnvError, Message, StopReason, Task

_GLOBAL = threading.RLock()
"""Held while the process's generators are one environment's."""


class Gem(ForeignEnv):
    """One environment of gem's registry."""

    def __init__(
        self,
        env_id: str = "game:GuessTheNumber-v0-easy",
        args: Mapping[str, Any] | None = None,
        size: int = 4096,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`env_id`: gem's name; `args`: for its constructor; `size`: how many seeds are tasks.

        Raises:
            EnvError: gem is not installed.
            ValueError: gem has no such environment.
        """
        self._states: tuple[Any, Any] | None = None
        with self._generators():
            self._gem = _load().make(env_id, **(args or {}))
        super().__init__(render_mode, seeded_tasks(env_id, size) if tasks is None else tasks)

    def begin(self, task: Task, seed: int) -> list[Message]:
        with self._generators():
            text, info = self._gem.reset(seed=seed_of(task, seed) % (1 << 32))
        return [user(_with_suffix(text, info))]

    def move(self, action: Message) -> Move:
        with self._generators():
            text, reward, ended, cut, info = self._gem.step(text_of(action.get("content")))
        if ended:
            return Move([user(str(text))], float(reward), StopReason.ENV_DONE)
        if cut:
            return Move([user(str(text))], float(reward), StopReason.MAX_TURNS, truncated=True)
        return Move([user(_with_suffix(text, info))], float(reward))

    @contextmanager
    def _generators(self) -> Iterator[None]:
        """While this is open, the process's global generators are in this environment's states."""
        with _GLOBAL:
            before = random.getstate(), np.random.get_state()
            try:
                if self._states is not None:
                    random.setstate(self._states[0])
                    np.random.set_state(self._states[1])
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


def _with_suffix(text: Any, info: Mapping[str, Any]) -> str:
    """gem's observation, and what it wants to be said after it."""
    suffix = info.get("suffix")
    return f"{text}\n{suffix}" if suffix else str(text)


def _load() -> Any:
    try:
        return importlib.import_module("gem")
    except ImportError as error:
        how = "its pins clash with ours: pip install --no-deps gem-llm, and pip install 'palestra[reasoning]'"
        raise EnvError(f"palestra/Gem-v0 needs gem ({error}); {how}") from error
