"""The base of every environment: gymnasium's contract over messages.

A task goes into `reset`, its first messages come out; an assistant message goes into `step`, the new messages, a float
reward and a `StepInfo` come out. Or an agent plays by itself, and its whole conversation goes into `grade` at the end.
Nothing here waits; hooks of subclasses run in the caller's thread.

Contract, beyond gymnasium's:
- Every returned message is a fresh object.
- The sum of the rewards of an episode's steps is `info["step"].reward.value` of its last step; NaN where that is None.
- A grader that raises or gives no finite number leaves the reward unknown, never 0. Any other fault raises `EnvError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym

from palestra.envs.rubrics import Rubric, Scoring
from palestra.envs.spaces import AssistantSpace, MessagesSpace, Observation, fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.types import EnvError, Message, Reward, StepInfo, StopReason, Task, ToolSpec

if TYPE_CHECKING:
    from palestra.envs.tools import Call

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    """What an environment makes of one assistant message."""

    messages: Sequence[Message] = ()
    """Its answer: tool results, or the next user message."""
    stop: StopReason | None = None
    """Set where this ends the episode: ANSWER, or ENV_DONE for a reason of the environment's own."""
    reward: float | None = 0.0
    """Of this step alone, before the final score; None where unknown."""


class MessageEnv(gym.Env[Observation, Message]):
    """An environment whose observations are messages. Subclasses give `tasks`, override `respond`, and give a `rubric` or override
    `score`.

    One instance plays one episode at a time.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - gymnasium's own attribute
    system: ClassVar[str | None] = None
    """A system message that is put before prompts which have none."""
    deterministic: bool = False
    """Of the class or of one instance: the same task, seed and actions give the same observations, in any process, so that an episode which
    was interrupted can be played again up to where it stood."""
    tasks: TaskSource | Sequence[Task] = ()
    """The environment's own tasks."""
    rubric: Rubric | None = None
    """What `score` judges an episode with, of the class or of one instance. Its `per_turn` components add to the rewards of steps."""
    calls: Sequence[Call] = ()
    """The tool calls of this episode, in order; environments with tools keep them."""

    def __init__(self, render_mode: str | None = None, tasks: TaskSource | Sequence[Task] | None = None) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode must be None or 'ansi', got {render_mode!r}")
        self.render_mode = render_mode
        if tasks is not None:
            self.tasks = tasks
        self.observation_space = MessagesSpace()
        self.action_space = AssistantSpace(self.tool_specs())
        self.task: Task | None = None
        self.workspace: Path | None = None
        """The folder of an agent that played by itself, while its episode is scored; None in other episodes."""
        self.done = True
        self._restart()

    # What subclasses override.

    def setup(self, task: Task) -> None:
        """Prepares an episode: opens what it needs. Whatever is still open from the last one is closed here too."""

    def respond(self, action: Message) -> Response:
        """The environment's answer to one assistant message. By default any message is the final answer."""
        return Response(stop=StopReason.ANSWER)

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        """The final score, by default the rubric's. `transcript`: what came after the prompt; it can be empty when a limit cut the
        episode.
        """
        return 0.0 if self.rubric is None else self.rubric.score(self.scoring(task, transcript))

    def scoring(self, task: Task, transcript: Sequence[Message]) -> Scoring:
        """What the components of a rubric are shown."""
        return Scoring(task, tuple(transcript), tuple(self.calls), self.workspace)

    def replay(self, transcript: Sequence[Message]) -> None:
        """Takes in the conversation of an agent that played by itself: what `score` looks at and `respond` would have
        kept. `respond` is not called for such an agent. Where a rubric judges turns it is called after each, with all until then.
        """

    def oracle(self, task: Task) -> list[Message]:
        """Assistant messages that solve `task`, for checks. Optional."""
        raise NotImplementedError(f"{type(self).__name__} has no oracle")

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools on offer, in OpenAI's form."""
        return ()

    # gymnasium's side.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode. `options={"task": Task | index}` chooses the task; otherwise the seeded generator draws
        one.

        Raises:
            ValueError: unknown options, or a task that does not exist.
            EnvError: `setup` failed.
        """
        super().reset(seed=seed)
        task = self._pick(options or {})
        self._restart()
        self.task, self.done = task, False
        with self._hook("setup"):
            self.setup(task)
        prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else fresh(task.prompt)
        if self.system is not None and not (prompt and prompt[0].get("role") == "system"):
            prompt = [{"role": "system", "content": self.system}, *prompt]
        self._prompt += prompt
        return tuple(fresh(prompt)), self._info()

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Plays one assistant message.

        Raises:
            gymnasium.error.ResetNeeded: no episode is going on.
            ValueError: `action` is no assistant message.
            EnvError: a fault of the environment; the episode has no reward.
        """
        if self.done:
            raise gym.error.ResetNeeded("no episode is going on: call reset() first")
        if action not in self.action_space:
            raise ValueError(f"an action is one assistant message, got {str(action)[:200]!r}")
        self.turn += 1
        action = name_calls(action, self.turn)
        self.transcript.append(action)
        response = self._answered(action)
        self.transcript += fresh(response.messages)
        self._step_rewards.append(self._judge_turn(_number(response.reward)))
        reward = math.nan if self._step_rewards[-1] is None else self._step_rewards[-1]
        if response.stop is None:
            return tuple(fresh(response.messages)), reward, False, False, self._info()
        score, info = self._end(response.stop)
        return tuple(fresh(response.messages)), reward + score, True, False, info

    def finish(self, reason: StopReason) -> tuple[float, dict[str, Any]]:
        """Ends the episode for a limit from outside and scores what there is.

        Returns:
            What the score adds to the last step's reward (NaN where unknown), and the info of the end.
        """
        if self.done:
            raise gym.error.ResetNeeded("no episode is going on: there is nothing to finish")
        return self._end(reason)

    def grade(
        self,
        transcript: Sequence[Message],
        workspace: Path | None = None,
        reason: StopReason = StopReason.ANSWER,
    ) -> StepInfo:
        """Ends an episode that an agent played by itself, and scores it. `transcript`: what came after the prompt, tool
        results included; `workspace`: the agent's folder.

        Raises:
            gymnasium.error.ResetNeeded: no episode is going on.
            EnvError: `replay` failed; the episode has no reward.
        """
        if self.done:
            raise gym.error.ResetNeeded("no episode is going on: there is nothing to grade")
        self.transcript[:], self.workspace = fresh(transcript), workspace
        self.turn = sum(message.get("role") == "assistant" for message in transcript)
        self.tool_calls = sum(len(message.get("tool_calls") or ()) for message in transcript)
        if self.rubric is not None and self.rubric.per_turn:
            self._judge_turns(transcript)
        with self._hook("replay"):
            self.replay(fresh(transcript))
        info: StepInfo = self._end(reason)[1]["step"]
        return info

    @property
    def step_rewards(self) -> tuple[float | None, ...]:
        """What each assistant message earned by itself, before the final score; None where unknown."""
        return tuple(self._step_rewards)

    def render(self) -> str:
        """The conversation so far, one message a line."""
        messages = [*self._prompt, *self.transcript]
        return "\n".join(f"[{item['role']}] {item.get('content') or item.get('tool_calls') or ''}" for item in messages)

    def task_of(self, task: Task | int) -> Task:
        """The task itself, or the one with that index.

        Raises:
            ValueError: there is no such task.
        """
        if isinstance(task, Task):
            return task
        if isinstance(task, bool) or not hasattr(task, "__index__"):
            raise ValueError(f"a task is a Task or an index, got {type(task).__name__}")
        index = task.__index__()
        if not 0 <= index < len(self.tasks):
            raise ValueError(f"{type(self).__name__} has {len(self.tasks)} tasks; there is no task {index}")
        return self.tasks[index]

    # Inside.

    def _answered(self, action: Message) -> Response:
        # As `_hook` does, without the generator that it makes: this is a good part of a small step.
        try:
            return self.respond(action)
        except EnvError:
            self.done = True
            raise
        except Exception as error:
            self.done = True
            raise EnvError(f"respond: {type(error).__name__}: {error}") from error

    @contextmanager
    def _hook(self, name: str) -> Iterator[None]:
        try:
            yield
        except EnvError:
            self.done = True
            raise
        except Exception as error:
            self.done = True
            raise EnvError(f"{name}: {type(error).__name__}: {error}") from error

    def _pick(self, options: Mapping[str, Any]) -> Task:
        if unknown := sorted(options.keys() - {"task"}):
            raise ValueError(f"unknown reset options {unknown}; known: ['task']")
        if options.get("task") is not None:
            return self.task_of(options["task"])
        if not len(self.tasks):
            raise ValueError(f"{type(self).__name__} has no tasks of its own; pass options={{'task': Task(...)}}")
        return self.tasks[int(self.np_random.integers(len(self.tasks)))]

    def _restart(self) -> None:
        self._prompt: list[Message] = []
        self.transcript: list[Message] = []
        self.turn = 0
        self.tool_calls, self.tool_errors, self.tool_seconds = 0, 0, 0.0
        self._step_rewards: list[float | None] = []
        self._turns = Reward(0.0)
        self.workspace = None

    def _end(self, reason: StopReason) -> tuple[float, dict[str, Any]]:
        self.done = True
        scored = self._grade()
        score = _number(scored.value)
        parts = [*self._step_rewards, score]
        total = None if None in parts else math.fsum(part for part in parts if part is not None)
        reward = merged(total, self._turns, scored)
        return math.nan if score is None else score, self._info(reason, reward)

    def _judge_turn(self, given: float | None) -> float | None:
        """The reward of the transcript's last turn: what `respond` gave, and what the rubric says of it."""
        if self.rubric is None or not self.rubric.per_turn or self.task is None:
            return given
        said = self.rubric.score_turn(self.scoring(self.task, fresh(self.transcript)))
        if not said.errors or self._turns.errors:  # the note has the first fault, not what is said of every turn
            said = Reward(said.value, said.components, errors=said.errors)
        self._turns = merged(None, self._turns, said)
        return None if given is None or said.value is None else given + said.value

    def _judge_turns(self, transcript: Sequence[Message]) -> None:
        """Judges each turn of an agent that played by itself, as if it had just been played."""
        starts = [index for index, message in enumerate(transcript) if message.get("role") == "assistant"]
        for end in [*starts[1:], len(transcript)] if starts else []:
            self.transcript[:] = fresh(transcript[:end])
            with self._hook("replay"):
                self.replay(fresh(transcript[:end]))
            self._step_rewards.append(self._judge_turn(0.0))

    def _grade(self) -> Reward:
        if self.task is None:
            raise EnvError("an episode ended without a task")
        try:
            scored = self.score(self.task, fresh(self.transcript))
            reward = scored if isinstance(scored, Reward) else Reward(float(scored))
        except Exception as error:
            logger.exception("the grader of %s failed on task %r", type(self).__name__, self.task.id)
            return Reward(None, note=f"grader: {type(error).__name__}: {error}"[:500])
        if reward.value is not None and not math.isfinite(reward.value):
            return Reward(None, reward.components, f"grader: the score is {reward.value}", reward.errors)
        return reward

    def _info(self, stop: StopReason | None = None, reward: Reward | None = None) -> dict[str, Any]:
        task_id = self.task.id if self.task is not None else ""
        step_reward = self._step_rewards[-1] if self._step_rewards else 0.0
        counts = self.tool_calls, self.tool_errors, self.tool_seconds
        return {"step": StepInfo(task_id, self.turn, stop, reward, *counts, step_reward)}


def merged(value: float | None, turns: Reward, scored: Reward) -> Reward:
    """A reward of `value` that keeps the parts of both: those of a name are added up, the first fault of a name stays."""
    components = dict(turns.components)
    for name, part in scored.components.items():
        components[name] = components.get(name, 0.0) + part
    note = "; ".join(text for text in (turns.note, scored.note) if text)
    return Reward(value, components, note, {**scored.errors, **turns.errors})


def name_calls(message: Message, turn: int) -> Message:
    """A fresh copy of an assistant message whose tool calls all have ids; those without get
    `call_{turn}_{position}`.
    """
    copy: Message = fresh(message)
    for position, call in enumerate(copy.get("tool_calls") or ()):
        if not call.get("id"):
            call["id"] = f"call_{turn}_{position}"
    return copy


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
