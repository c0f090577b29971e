"""Runs `rollout.function`: an `async def generate_rollout(args, rollout_id, data_buffer, evaluation=False)` of the user's.

In: a function, the run's service, and the run's environment. Out: samples, which the function returns and the service keeps. All calls run
on one event loop in a daemon thread, so that clients which a function keeps stay usable. It waits for the service to have something to be
played, and for the function; an exception of the function's own ends the runner.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from palestra.agents.config import GroupsConfig
from palestra.agents.plans.buffers import EvaluationBuffer, flat
from palestra.agents.plans.databuffer import TrainingBuffer
from palestra.agents.plans.desk import FunctionDesk
from palestra.agents.plans.loading import Generate
from palestra.agents.plans.types import Masks, PlanError, PlanService, Sample, SessionRow
from palestra.agents.play import Env
from palestra.agents.types import GroupAssignment, SessionHandle, SessionHost
from palestra.envs.config import EnvConfig
from palestra.envs.tasks import TaskSource
from palestra.envs.types import Episode, Message, Task

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""How long one call waits for work."""
LOOK_S = 0.5
"""How soon a wish to stop is heeded."""
LEAVE_S = 3.0
"""How long a function that is cancelled may take to end."""


class Ask(Protocol):
    """Asks the service for work, and bears with it while it is away."""

    def __call__(self, wait_s: float) -> Any:
        """What is to be done next, or None."""


def arguments(algo: GroupsConfig, env: EnvConfig, base_url: str) -> SimpleNamespace:
    """The `args` of a function: every field of `[algo]`, the tables `algo` and `env` themselves, the service's `base_url`, and the names
    that such functions use elsewhere."""
    return SimpleNamespace(
        **algo.model_dump(),
        algo=algo,
        env=env,
        base_url=base_url,
        rollout_batch_size=algo.groups_per_step,
        over_sampling_batch_size=math.ceil(algo.groups_per_step * algo.oversample),
        n_samples_per_prompt=algo.group_size,
        rollout_temperature=algo.temperature,
        rollout_max_response_len=algo.max_response,
        rollout_max_context_len=algo.max_context,
    )


class FunctionRunner:
    """Calls one function, again and again."""

    def __init__(
        self,
        function: Generate,
        args: SimpleNamespace,
        make_env: Callable[[], Env],
        source: TaskSource,
        *,
        request_timeout_s: float = 300.0,
        deadline_s: float = 900.0,
    ) -> None:
        """`source`: tasks by index. `request_timeout_s`: of one model call; `deadline_s`: of a wait for work inside the function."""
        self._function, self._args = function, args
        self._make_env, self._source = make_env, source
        self._request_timeout_s, self._deadline_s = request_timeout_s, deadline_s
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="rollout-function").start()
        self.calls = 0
        """Calls for training so far."""

    def train(self, service: PlanService, ask: Ask, stopping: threading.Event) -> None:
        """Calls the function whenever there is something to be played, until `stopping` is set.

        Raises:
            PlanError: it returned no samples, or every rollout of a call ended by an exception of its own code.
            Exception: whatever the function raised.
        """
        self._wait(self._train(service, ask), stopping)

    def evaluate(
        self,
        tasks: Sequence[tuple[int, Task]],
        host: SessionHost,
        *,
        rollout_id: int = 0,
        repeats: int = 1,
        seed: int = 0,
        stopping: threading.Event | None = None,
    ) -> list[Sample]:
        """Calls the function with `evaluation=True` on these tasks (by index), each to be played `repeats` times; its samples. Sessions are
        opened at `host`, as group `eval-INDEX`; nothing is kept for training.

        Raises:
            Exception: whatever the function raised.
        """
        desk = FunctionDesk(
            _EvaluationHost(host), self._make_env, self._source, request_timeout_s=self._request_timeout_s
        )
        owed = [GroupAssignment(f"eval-{index}", repeats, 0, task, seed + index) for index, task in tasks]

        async def call() -> list[Sample]:
            buffer = EvaluationBuffer(owed, desk)
            try:
                returned = await self._function(self._args, rollout_id, buffer, evaluation=True)
            finally:
                await desk.close()
            return list({sample.rollout_id: sample for sample in [*buffer.put_samples, *flat(returned)]}.values())

        return self._wait(call(), stopping or threading.Event()) or []

    def close(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, Any], stopping: threading.Event) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not future.done() and not stopping.is_set():
            concurrent.futures.wait([future], LOOK_S)
        if future.done():
            return future.result()
        future.cancel()
        concurrent.futures.wait([future], LEAVE_S)
        return None

    async def _train(self, service: PlanService, ask: Ask) -> None:
        desk = FunctionDesk(service, self._make_env, self._source, request_timeout_s=self._request_timeout_s)
        buffer = TrainingBuffer(service, desk, self._deadline_s)
        try:
            while True:
                buffer.offer(await desk.call(partial(ask, LOOK_S if buffer.busy else POLL_S)))
                if buffer.busy:
                    await self._call(service, desk, buffer)
        finally:
            await desk.close()

    async def _call(self, service: PlanService, desk: FunctionDesk, buffer: TrainingBuffer) -> None:
        if self.calls == 0:  # a resumed run goes on counting
            self.calls = await desk.call(service.committed_step)
        desk.watch()
        returned = await self._function(self._args, self.calls, buffer, evaluation=False)
        await buffer.end_call(returned)
        logger.info(
            "call %d of the rollout function: %d samples; groups so far: %s",
            self.calls,
            desk.samples,
            dict(buffer.counts),
        )
        self.calls += 1
        if desk.faults and not desk.samples:
            raise PlanError(
                f"every rollout of a call ended by an exception of the function's own code ({len(desk.faults)} of them; one is above)"
            ) from desk.faults[-1]


class _EvaluationHost:
    """Any host of sessions as one that a function can use: nothing is trained, so masks do not count; rows are there if it has some."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        return self._host.open_session(assignment, index, task_id)

    def close_session(self, handle: SessionHandle, episode: Episode, masks: Masks | None = None) -> None:
        self._host.close_session(handle, episode)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        return self._host.conversation(handle)

    def rows(self, handle: SessionHandle) -> tuple[SessionRow, ...]:
        rows = getattr(self._host, "rows", None)
        return () if rows is None else tuple(rows(handle))
