"""What a function is given as its `data_buffer`: the words of it, and the one of an evaluation, whose tasks are given.

In: assignments. Out: prompts, and the samples that a function put or returned. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol, overload

from palestra.agents.plans.desk import FunctionDesk
from palestra.agents.plans.prompts import Prompt
from palestra.agents.plans.types import NoMoreWorkError, PlanError, Sample
from palestra.agents.types import GroupAssignment


class DataBuffer(Protocol):
    """What a function is given."""

    def get_samples(self, n: int) -> Prompts:
        """Up to `n` prompts, also to be awaited."""

    def put(self, samples: Any) -> None:
        """Keeps samples before the function returns: give all that you keep of a prompt at once."""

    def drop(self, prompt: Prompt | Sample, reason: str = "") -> None:
        """Refuses a prompt with all of its rollouts; its place in the schedule is free again."""


class Source(Protocol):
    """Where `Prompts` has them from."""

    def take_now(self, n: int) -> list[Prompt]:
        """What can be had at once."""

    async def take(self, n: int) -> list[Prompt]:
        """What comes while one waits."""


class Prompts(Sequence[Prompt]):
    """What `get_samples` gives. Used as it is: what can be had at once, asked for at the first look. Awaited: a list, waited for."""

    def __init__(self, source: Source, n: int) -> None:
        self._source, self._n = source, n
        self._got: list[Prompt] | None = None

    def _now(self) -> list[Prompt]:
        if self._got is None:
            self._got = self._source.take_now(self._n)
        return self._got

    async def _later(self) -> list[Prompt]:
        if self._got is None:
            self._got = await self._source.take(self._n)
        return self._got

    def __await__(self) -> Generator[Any, None, list[Prompt]]:
        return self._later().__await__()

    def __len__(self) -> int:
        return len(self._now())

    @overload
    def __getitem__(self, index: int, /) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice, /) -> Prompt | list[Prompt]:
        return self._now()[index]


class EvaluationBuffer:
    """A `DataBuffer` of given tasks. What becomes of the samples is for its caller: nothing is trained on."""

    def __init__(self, assignments: Iterable[GroupAssignment], desk: FunctionDesk) -> None:
        self._waiting = deque(Prompt(assignment, desk) for assignment in assignments)
        self.put_samples: list[Sample] = []

    def get_samples(self, n: int) -> Prompts:
        """See `DataBuffer.get_samples`."""
        return Prompts(self, n)

    def put(self, samples: Any) -> None:
        """See `DataBuffer.put`."""
        self.put_samples += flat(samples)

    def drop(self, prompt: Prompt | Sample, reason: str = "") -> None:
        """Changes nothing: its samples are not returned."""

    def take_now(self, n: int) -> list[Prompt]:
        """The next ones.

        Raises:
            NoMoreWorkError: all were given.
        """
        if not self._waiting:
            raise NoMoreWorkError("all tasks of this evaluation were given")
        return [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]

    async def take(self, n: int) -> list[Prompt]:
        """The same."""
        return self.take_now(n)


def flat(returned: Any) -> list[Sample]:
    """The samples of what a function returned: a sample, None, any nesting of them, or something with `samples`.

    Raises:
        PlanError: something else.
    """
    if returned is None:
        return []
    if isinstance(returned, Sample):
        return [returned]
    if hasattr(returned, "samples") and not isinstance(returned, Prompt):
        return flat(returned.samples)
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | dict):
        return [sample for part in returned for sample in flat(part)]
    raise PlanError(
        f"{type(returned).__name__} was returned or put for a sample: give what `await rollout.sample(...)` gives, in lists or not"
    )
