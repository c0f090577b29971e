"""What adapters to others' environments share: the prompt comes with the reset, rewards come with the steps, and the other side decides
when an episode is over.

A task goes into `begin`, an assistant message into `move`; nothing is waited for but the other side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.envs.core import MessageEnv, Response
from palestra.envs.spaces import Observation, fresh
from palestra.envs.tasks import GeneratedTasks
from palestra.envs.types import Message, Reward, StopReason, Task


@dataclass(frozen=True, slots=True)
class Move:
    """What the other side makes of one assistant message."""

    messages: Sequence[Message] = ()
    reward: float | None = 0.0
    """Of this step; None where the other side could not tell."""
    stop: StopReason | None = None
    """Set where the episode is over."""
    truncated: bool = False
    """A limit of the other side's ended it."""


class ForeignEnv(MessageEnv):
    """Subclasses give `tasks`, `begin` and `move`.

    The reward of an episode is the sum of its steps' rewards. An agent that played by itself is scored by playing its messages again.
    """

    _seed: int | None = None
    _opening: Sequence[Message] = ()
    _cut = False
    _over = False
    _replayed: Sequence[float | None] = ()

    @abstractmethod
    def begin(self, task: Task, seed: int) -> Sequence[Message]:
        """Starts an episode and gives its first messages. `seed` is the caller's; a task can have one of its own."""

    @abstractmethod
    def move(self, action: Message) -> Move:
        """Plays one assistant message."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `MessageEnv.reset`. The prompt is what the other side says, not what stands in the task."""
        self._seed = seed
        _, info = super().reset(seed=seed, options=options)
        self._prompt[:] = fresh(self._opening)
        return tuple(fresh(self._opening)), info

    def setup(self, task: Task) -> None:
        self._cut, self._over, self._replayed = False, False, ()
        seed = int(self.np_random.integers(1 << 31)) if self._seed is None else self._seed
        self._opening = fresh(self.begin(task, seed))

    def respond(self, action: Message) -> Response:
        move = self._play(action)
        return Response(move.messages, move.stop, move.reward)

    def _play(self, action: Message) -> Move:
        move = self.move(action)
        self._cut, self._over = move.truncated, move.stop is not None
        return move

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `MessageEnv.step`; what a limit of the other side's ended is truncated."""
        observation, reward, ended, truncated, info = super().step(action)
        if ended and self._cut:
            ended, truncated = False, True
        return observation, reward, ended, truncated, info

    def replay(self, transcript: Sequence[Message]) -> None:
        given: list[float | None] = []
        for message in transcript:
            if message.get("role") == "assistant" and not self._over:
                given.append(self._play(fresh(message)).reward)
        self._replayed = given

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        if None in self._replayed:
            return Reward(None, note="a step of the episode has no known reward")
        return math.fsum(reward for reward in self._replayed if reward is not None)


def seeded_tasks(name: str, size: int) -> GeneratedTasks:
    """Tasks that differ by the seed that the other side is reset with. Their prompts are empty: it comes with the reset."""
    return GeneratedTasks(size, lambda index: Task("", id=f"{name}/{index}", meta={"seed": index}))


def seed_of(task: Task, usual: int) -> int:
    """The task's own seed, where it has one."""
    seed = task.meta.get("seed", usual)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"task {task.id!r}: meta.seed must be a whole number that is not negative, got {seed!r}")
    return seed


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}
