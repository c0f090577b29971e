"""An evaluation whose episodes are made by the run's `rollout.function`, called with `evaluation=True`.

An evaluation and what it owes go in; each sample that the function makes becomes a row, like an episode that `run_group` plays. What the
function leaves out stays owed. It waits for the function, until the evaluation is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from palestra.agents.evaluation.pinned import pinned
from palestra.agents.evaluation.plan import env_seed
from palestra.agents.evaluation.run import TICK_S, Evaluation, Standing
from palestra.agents.evaluation.types import Key
from palestra.agents.plans.function import FunctionRunner, arguments
from palestra.agents.plans.loading import load_function
from palestra.agents.types import GroupAssignment, SessionHandle, SessionHost
from palestra.cli.config import RunConfig
from palestra.envs.registry import make_env
from palestra.envs.tasks import TaskSource
from palestra.envs.types import Episode, Message
from palestra.server.eval_client import EvalClient


class OwedHost:
    """The sessions of a function as episodes of an evaluation: under the tasks' own names, each checked for its version. Thread-safe."""

    def __init__(
        self,
        host: SessionHost,
        names: dict[str, str],
        owed: Iterable[Key],
        version: int,
        versions_of: Callable[[SessionHandle], frozenset[int]],
    ) -> None:
        """`names`: the function's name of a group -> the task's hash. `owed`: the episodes that count; others are played for nothing."""
        self._host, self._names, self._owed = host, names, frozenset(owed)
        self._version, self._versions_of = version, versions_of
        self._keys: dict[str, Key] = {}

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`."""
        task = self._names[assignment.group_id]
        handle = self._host.open_session(replace(assignment, group_id=task), index, task_id)
        self._keys[handle.rollout_id] = (task, index)
        return handle

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """See `SessionHost`."""
        if self._keys.pop(handle.rollout_id, None) in self._owed:
            self._host.close_session(handle, pinned(episode, handle, self._version, self._versions_of))

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `SessionHost`."""
        return self._host.conversation(handle)


def play_by_function(
    config: RunConfig,
    evaluation: Evaluation,
    source: TaskSource,
    keys: Sequence[Key],
    client: EvalClient,
    version: int,
    on_tick: Callable[[Standing], None],
) -> None:
    """Has these episodes played, one call of the function for all of them. Returns when it has returned, or once the evaluation is left.
    `client`: of the service.

    Raises:
        PlanError: the function cannot be loaded.
        Exception: whatever it raised.
    """
    spec, places = evaluation.header.spec, {task.hash: task.index for task in evaluation.header.tasks}
    tasks = list(dict.fromkeys(task for task, _ in keys))
    asked = {"temperature": spec.temperature, "max_response": spec.max_tokens, "max_turns": spec.max_turns}
    algo = config.algo.model_copy(update={**asked, "groups_per_step": len(tasks), "group_size": spec.k})
    env = config.env.model_copy(update={"id": spec.env, "args": dict(spec.args), "tasks": spec.tasks})
    assert config.rollout.function is not None, "asked for only where there is one"
    runner = FunctionRunner(
        load_function(config.rollout.function),
        arguments(algo, env, f"{client.url}/v1"),
        lambda: make_env(spec.env, spec.args),
        source,
        request_timeout_s=spec.request_timeout_s,
    )
    host = OwedHost(evaluation, {f"eval-{places[task]}": task for task in tasks}, keys, version, client.versions_of)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            runner.evaluate(
                [(places[task], source[places[task]]) for task in tasks],
                host,
                repeats=spec.k,
                seed=env_seed(spec.seed, spec.env),
                stopping=evaluation.leaving,
            )
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True, name="evaluation-function")
    thread.start()
    while thread.is_alive() and not evaluation.leaving.is_set():
        on_tick(evaluation.standing())
        thread.join(TICK_S)
    on_tick(evaluation.standing())
    runner.close()
    if failed:
        raise failed[0]
