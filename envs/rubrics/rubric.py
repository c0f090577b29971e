"""A rubric: components with weights, run side by side, each with a deadline, combined into one reward.

A `Scoring` goes in, a `Reward` comes out, whatever the components do: one that raises, is late, or gives no number within the bounds
leaves the whole reward unknown, with its text in `Reward.errors`. It waits for the slowest component, at most `timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from palestra.envs import background
from palestra.envs.rubrics.types import Score, Scoring
from palestra.envs.types import Reward

logger = logging.getLogger(__name__)

Verdict: TypeAlias = Score | float | None
Component: TypeAlias = Callable[[Scoring], Verdict | Awaitable[Verdict]]
"""Judges one episode: a plain function, a coroutine function, or an object that is called like one."""
Combine: TypeAlias = Literal["sum", "product", "min"]
ERROR_CHARACTERS = 500
"""Of what a failing component says."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """One component of a rubric."""

    component: Component
    weight: float
    """0 makes it a metric."""


class Rubric:
    """Combines named components.

    - `sum`: of weight times value. `product` and `min`: of the values as they are; of a weight only 0 counts there.
    - `per_turn` components are called after each of the policy's turns; what they give, times their weight, is added to that turn's reward.
    - A plain function runs in a daemon thread of its own, since hung ones would fill a pool. It cannot be stopped at its deadline, only
      left behind: what may hang on a model's text belongs in `processes.killable`.
    - A component whose weight is 0 is a metric: it is on record, and its failure costs nothing.

    One rubric serves any number of episodes at a time.
    """

    def __init__(
        self,
        components: Mapping[str, Component | tuple[Component, float]],
        *,
        combine: Combine = "sum",
        timeout_s: float = 60.0,
        bounds: tuple[float, float] = (-1.0, 1.0),
        per_turn: Mapping[str, Component | tuple[Component, float]] | None = None,
    ) -> None:
        """`timeout_s`: seconds that each component has. `bounds`: what a component may give, both ends included.

        Raises:
            ValueError: components, weights or bounds that make no sense; says which.
        """
        if combine not in get_args(Combine):
            raise ValueError(f"combine must be one of {get_args(Combine)}, got {combine!r}")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
        if not (all(map(math.isfinite, bounds)) and bounds[0] < bounds[1]):
            raise ValueError(f"bounds must be two finite numbers, the lower one first, got {bounds!r}")
        self.components = {name: _weighted(name, entry) for name, entry in components.items()}
        self.per_turn = {name: _weighted(name, entry) for name, entry in (per_turn or {}).items()}
        if twice := sorted(self.components.keys() & self.per_turn.keys()):
            raise ValueError(f"{twice[0]!r} is a component and a per_turn one: give them different names")
        if combine != "sum" and not any(part.weight for part in self.components.values()):
            raise ValueError(f"combine={combine!r} needs a component whose weight is not 0")
        self.combine, self.timeout_s, self.bounds = combine, timeout_s, bounds

    def score(self, scoring: Scoring) -> Reward:
        """Judges an ended episode and waits for it."""
        return self._wait(self.components, self.combine, scoring)

    async def judge(self, scoring: Scoring) -> Reward:
        """Judges an ended episode."""
        return await self._judge(self.components, self.combine, scoring)

    def score_turn(self, scoring: Scoring) -> Reward:
        """What the `per_turn` components give for the transcript's last turn; waits for them."""
        return self._wait(self.per_turn, "sum", scoring)

    def _wait(self, parts: Mapping[str, Weighted], combine: Combine, scoring: Scoring) -> Reward:
        if not parts:
            return Reward(0.0)
        try:
            return background.call(self._judge(parts, combine, scoring), self.timeout_s + background.GRACE_S)
        except background.DeadlineError:
            text = f"the process's loop was blocked, so nothing was judged after {self.timeout_s:g} s"
            return Reward(None, {}, text, dict.fromkeys(parts, text))

    async def _judge(self, parts: Mapping[str, Weighted], combine: Combine, scoring: Scoring) -> Reward:
        running = [asyncio.create_task(self._one(name, part.component, scoring)) for name, part in parts.items()]
        try:
            scores = dict(zip(parts, [await task for task in running], strict=True))
        finally:
            for task in running:
                task.cancel()
        return combined(parts, scores, combine)

    async def _one(self, name: str, component: Component, scoring: Scoring) -> Score:
        """What a component says, or the text of its fault. Never raises, but for its own cancellation."""
        is_async = inspect.iscoroutinefunction(component) or inspect.iscoroutinefunction(
            getattr(type(component), "__call__", None)  # noqa: B004 - whether the call is a coroutine function
        )
        work = _guarded(component, scoring) if is_async else _in_thread(name, component, scoring)
        task = asyncio.create_task(work)
        try:
            # Not wait_for: it would wait for a component that does not give in to its cancellation.
            done, _ = await asyncio.wait([task], timeout=self.timeout_s)
        finally:
            task.cancel()
        if not done:
            return Score(None, error=f"not done after {self.timeout_s:g} s")
        if task.cancelled():
            return Score(None, error="it was cancelled from inside")
        if (fault := task.exception()) is not None:
            return Score(None, error=f"{type(fault).__name__}: {fault}")
        return self._checked(task.result())

    def _checked(self, said: Any) -> Score:
        if isinstance(said, Score):
            value, reason, error = said.value, said.reason, said.error
        else:
            value, reason, error = said, "", None
        if error is not None:
            return Score(None, reason, error)
        if value is None:
            return Score(None, reason, reason or "it gave no value")
        if not hasattr(type(value), "__float__"):  # a text has none, though float() reads it
            return Score(None, error=f"it gave {type(value).__name__}, which is no number")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as fault:
            return Score(None, error=f"it gave {type(value).__name__}, which is no number: {fault}")
        if not self.bounds[0] <= number <= self.bounds[1]:  # false for NaN too
            return Score(None, error=f"it gave {number}, outside of {self.bounds[0]:g} to {self.bounds[1]:g}")
        return Score(number, reason)


def combined(parts: Mapping[str, Weighted], scores: Mapping[str, Score], combine: Combine) -> Reward:
    """The reward that scores make, one per part."""
    errors = {name: str(score.error) for name, score in scores.items() if score.value is None}
    values = {name: score.value for name, score in scores.items() if score.value is not None}
    said = {name: score.error if score.value is None else score.reason for name, score in scores.items()}
    note = "; ".join(f"{name}: {text}" for name, text in said.items() if text)
    judged = [name for name, part in parts.items() if part.weight]
    if any(name in errors for name in judged):
        return Reward(None, values, note, errors)
    match combine:
        case "sum":
            total = math.fsum(parts[name].weight * values[name] for name in judged)
        case "product":
            total = math.prod(values[name] for name in judged)
        case "min":
            total = min(values[name] for name in judged)
    return Reward(total, values, note, errors)


def _weighted(name: str, entry: Component | tuple[Component, float]) -> Weighted:
    component, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
    if not callable(component):
        raise ValueError(f"component {name!r}: {component!r} cannot be called")
    if not math.isfinite(weight):
        raise ValueError(f"component {name!r}: its weight is {weight}")
    return Weighted(component, float(weight))


async def _guarded(component: Component, scoring: Scoring) -> Any:
    try:
        return await component(scoring)  # type: ignore[misc]  # a coroutine function, as its caller found out
    except asyncio.CancelledError:
        raise
    except BaseException as fault:  # noqa: BLE001 - SystemExit in a task would end the process's loop
        return _fault(component, fault)


async def _in_thread(name: str, component: Component, scoring: Scoring) -> Any:
    """Calls a plain function in a daemon thread, and awaits what it gives where that is a coroutine."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            said: Any = context.run(component, scoring)
        except BaseException as fault:  # noqa: BLE001 - whatever a grader raises is its fault
            said = _fault(component, fault)
        if not loop.is_closed():
            loop.call_soon_threadsafe(_set, answered, said)

    threading.Thread(target=work, daemon=True, name=f"rubric-{name}").start()
    said = await answered
    if not inspect.isawaitable(said):
        return said
    return await _guarded(lambda _: said, scoring)


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # cancelled at its deadline: a late result is dropped
        future.set_result(value)


def _fault(component: Component, fault: BaseException) -> Score:
    logger.warning("component %r failed", component, exc_info=fault)
    return Score(None, error=f"{type(fault).__name__}: {fault}"[:ERROR_CHARACTERS])
