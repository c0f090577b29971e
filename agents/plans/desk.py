"""What all prompts of a function's runner share: its event loop's side of blocking calls, one model client, and the run's environment.

In: blocking calls of the service and of environments. Out: their results, awaited on the function's loop, each in a daemon thread of its
own: a call that hangs holds up neither the loop nor the process's end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from palestra.agents.plans.types import RolloutHost
from palestra.agents.play import Env, message_env
from palestra.agents.types import AgentError
from palestra.envs.clients import SharedClient
from palestra.envs.spaces import fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.types import EnvError, Message, Task, ToolSpec

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
CLOSE_S = 5.0
"""Longest wait for the sessions of cancelled rollouts to be closed, seconds."""
RETRIES = 2
"""Of a model call whose connection failed. The service knows a call that comes back, and does not play it twice."""
LIBRARIES = frozenset({"openai", "anthropic", "httpx", "httpx2", "aiohttp"})
"""Whose exceptions speak of the way to the model, and not of the user's own code."""


class FunctionDesk:
    """See the module. Used from one event loop."""

    def __init__(
        self, host: RolloutHost, make_env: Callable[[], Env], source: TaskSource, *, request_timeout_s: float = 300.0
    ) -> None:
        """`request_timeout_s`: of one model call."""
        self.host, self.make_env, self.source = host, make_env, source
        self._request_timeout_s = request_timeout_s
        self._client = SharedClient(trust_env=False)
        self._later: set[asyncio.Task[None]] = set()
        env = make_env()
        try:
            inner = message_env(env)
            self._system, self.tools = inner.system, inner.tool_specs()
        finally:
            env.close()
        self.samples = 0
        """Samples that were made since `watch`."""
        self.faults: list[Exception] = []
        """What ended rollouts since `watch`, and was the user's own code's."""

    def watch(self) -> None:
        """Counts from here on."""
        self.samples, self.faults = 0, []

    def note_fault(self, error: Exception) -> None:
        """Remembers what ended a rollout, unless it speaks of the way to the model."""
        foreign = any(kind.__module__.partition(".")[0] in LIBRARIES for kind in type(error).__mro__)
        if not foreign and not isinstance(error, OSError | EnvError | AgentError):
            self.faults.append(error)

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Begins a blocking call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever waits for it judges it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="rollout-call").start()
        return future

    async def call(self, work: Callable[[], T]) -> T:
        """A blocking call's result. Where its waiter is cancelled it goes on by itself."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Has something done that nobody waits for but `close`: a task that nobody holds can be collected before it is done."""
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def close(self) -> None:
        """Waits for what is left to be done, and closes the connections."""
        if self._later:
            await asyncio.wait(self._later, timeout=CLOSE_S)
        await self._client.get().close()

    def client(self, base_url: str, api_key: str) -> openai.AsyncOpenAI:
        """The official client for one session; all of them share their connections."""
        return self._client.get().with_options(
            base_url=base_url, api_key=api_key, timeout=self._request_timeout_s, max_retries=RETRIES
        )

    def messages(self, task: Task) -> list[Message]:
        """What an episode of the task begins with."""
        prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else fresh(task.prompt)
        if self._system is not None and prompt[0].get("role") != "system":
            return [{"role": "system", "content": self._system}, *prompt]
        return list(prompt)

    def tool_specs(self) -> list[ToolSpec]:
        """Fresh copies of the environment's tools."""
        return list(fresh(self.tools))
