"""Plays an agent that runs by itself, as `play` plays a policy: the environment gives the task and the score, the agent does the rest.

A task and a seed go in. The agent gets the session's URL and a folder of its own; when it has ended, or was cut, the conversation is read
back from the session, the environment scores it, and an `Episode` comes out, whatever happened. It waits for the agent, at most until the
episode's deadline and a little longer, and for the service.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.agents.play import Env, describe, infra_episode, message_env
from palestra.agents.session import playing
from palestra.agents.stops import stop_in
from palestra.agents.transcript import after_prompt, count_turns, main_branch, text_of
from palestra.agents.types import (
    Agent,
    AgentContext,
    AgentError,
    Limits,
    Outcome,
    SessionHandle,
    SessionHost,
)
from palestra.agents.workspace import Workspaces
from palestra.envs.core import MessageEnv
from palestra.envs.types import Episode, Message, Reward, StepInfo, StopReason, Task

logger = logging.getLogger(__name__)

OVERTIME_S = 12.0
"""How long after the deadline an agent may still take to end by itself: it has to end processes, or a loop of coroutines. Less than the
grace that a group gives its episodes."""
POLL_S = 0.25
"""How often a session is asked for its first reply."""
INFO_CHARACTERS = 4000
"""Of what an agent says of its run."""


def play_agent(
    env: Env,
    agent: Agent,
    host: SessionHost,
    handle: SessionHandle,
    limits: Limits,
    *,
    task: Task | int,
    seed: int,
    workspaces: Workspaces | None = None,
    replied: Callable[[], None] | None = None,
) -> Episode:
    """Plays `task` in the session `handle`, which stays open. `replied` is called once the session has its first reply, or none will
    come.

    - The agent returns: terminated, and scored, by the environment or by the agent's own harness (`Outcome.reward`).
    - It is cut (deadline, window, budget): truncated, and scored with what there is.
    - Anything else that is raised: neither; `reward.value` is None, `stop_reason` INFRA, `error` says what and where.

    Raises:
        TypeError: `env` is no `MessageEnv`.
    """
    inner = message_env(env)
    started = time.monotonic()
    try:
        with (workspaces or Workspaces()).open(handle) as workspace:
            run = _Run(env, inner, agent, host, handle, workspace, started + limits.deadline_s, replied)
            return run.episode(task, seed, started)
    except Exception as fault:  # noqa: BLE001 - whatever user code raises, the episode is data
        task_id = inner.task.id if inner.task is not None else task.id if isinstance(task, Task) else str(task)
        logger.warning("an agent's episode of task %r ended by a fault: %s", task_id, describe(fault))
        return infra_episode(task_id, fault, seconds=time.monotonic() - started)


@dataclass(slots=True)
class _Run:
    """One episode of an agent."""

    env: Env
    inner: MessageEnv
    agent: Agent
    host: SessionHost
    handle: SessionHandle
    workspace: Path
    deadline: float
    replied: Callable[[], None] | None

    def episode(self, task: Task | int, seed: int, started: float) -> Episode:
        """Raises whatever makes it a fault."""
        prompt, _ = self.env.reset(seed=seed, options={"task": task})
        assert self.inner.task is not None, "reset sets the task"
        context = AgentContext(
            task=self.inner.task,
            messages=tuple(prompt),
            tools=self.inner.tool_specs(),
            session=self.handle,
            workspace=self.workspace,
            deadline=self.deadline,
        )
        outcome, stop = self._play(context)
        branches = self.host.conversation(self.handle)
        before, transcript = _conversation(branches, prompt, outcome.answer)
        info = self._score(transcript, outcome, stop or StopReason.ANSWER)
        turns = count_turns(branches, prompt)
        return Episode(
            task_id=context.task.id,
            messages=(*before, *transcript),
            tools=context.tools,
            reward=_reward(info, outcome),
            step_rewards=self._step_rewards(turns, outcome),
            stop_reason=stop or StopReason.ANSWER,
            terminated=stop is None,
            truncated=stop is not None,
            turns=turns,
            tool_calls=info.tool_calls,
            tool_errors=info.tool_errors,
            seconds=time.monotonic() - started,
        )

    def _play(self, context: AgentContext) -> tuple[Outcome, StopReason | None]:
        """Runs the agent in a thread of its own, which is left behind where it does not end. What it says, and what cut it."""
        future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

        def work() -> None:
            try:
                with playing(context):
                    url = context.session.session_url or context.session.base_url
                    future.set_result(self.agent.run(context.task, url, context.workspace))
            except BaseException as error:  # noqa: BLE001 - it is judged in the episode's thread
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name=f"agent-{self.handle.rollout_id}").start()
        self._wait(future)
        late = time.monotonic() > self.deadline
        if not future.done():
            logger.warning("the agent of %s goes on after its deadline; it is left behind", self.handle.rollout_id)
            return Outcome(), StopReason.DEADLINE
        error = future.exception()
        if error is None:
            return future.result(), StopReason.DEADLINE if late else None
        if (stop := stop_in(error)) is not None:
            return Outcome(info={"stopped": str(stop)}), stop.reason
        if isinstance(error, Exception):
            raise error
        raise AgentError(f"the agent left by {type(error).__name__}: {error}") from error

    def _wait(self, future: concurrent.futures.Future[Outcome]) -> None:
        give_up = self.deadline + OVERTIME_S
        while not future.done() and (left := give_up - time.monotonic()) > 0:
            concurrent.futures.wait([future], left if self.replied is None else min(left, POLL_S))
            if self.replied is not None and (future.done() or self._has_reply()):
                self.replied()
                self.replied = None

    def _has_reply(self) -> bool:
        """Also where the service cannot say: then the end of the episode will tell why."""
        try:
            return bool(self.host.conversation(self.handle))
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("session %s: %s", self.handle.rollout_id, describe(error))
            return True

    def _step_rewards(self, turns: int, outcome: Outcome) -> tuple[float | None, ...]:
        """What the rubric gave for single turns, where each model call is one of the transcript; else all counts as the final score."""
        given = self.inner.step_rewards if outcome.reward is None else ()
        return given if len(given) == turns else (0.0,) * turns

    def _score(self, transcript: Sequence[Message], outcome: Outcome, reason: StopReason) -> StepInfo:
        if outcome.reward is None:
            return self.inner.grade(transcript, self.workspace, reason)
        calls = sum(len(message.get("tool_calls") or ()) for message in transcript)
        return StepInfo("", 0, reason, Reward(float(outcome.reward)), calls)


def _conversation(
    branches: Sequence[Sequence[Message]], prompt: Sequence[Message], answer: str | None
) -> tuple[list[Message], list[Message]]:
    """What stood before the first reply, and the transcript. It ends with the agent's answer, also where the model did not say that."""
    branch = list(main_branch(branches)) or list(prompt)
    transcript = after_prompt(branch, prompt)
    before = branch[: len(branch) - len(transcript)]
    last = transcript[-1] if transcript else {}
    if answer is not None and (last.get("role") != "assistant" or text_of(last).strip() != answer.strip()):
        transcript.append({"role": "assistant", "content": answer})
    return before, transcript


def _reward(info: StepInfo, outcome: Outcome) -> Reward:
    """The environment's score or the agent's own, with what the agent said of its run."""
    scored = info.reward or Reward(None, note="never scored")
    notes = [scored.note] if scored.note else []
    value = scored.value
    if value is not None and not math.isfinite(value):
        notes.append(f"the agent's reward is {value}")
        value = None
    if outcome.info:
        said = json.dumps(dict(outcome.info), ensure_ascii=False, default=str)
        notes.append(f"agent: {said[:INFO_CHARACTERS]}")
    return Reward(value, {**scored.components, **outcome.components}, "; ".join(notes), scored.errors)
