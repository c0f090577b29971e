"""`palestra/OpenEnv-v0`: an environment behind a URL that speaks OpenEnv's protocol, over a session of its `/ws`.

Two kinds of servers:

- **`palestra env serve`**: assistant messages travel whole, with their tool calls, and so do rewards with their components, tools, and
  stop reasons. An episode is what it would be if it were played here. Tasks are the server's.
- **any other**: the text of the assistant message is the action's field `action_key`; with `action_key=None` the text is the action itself,
  written as a JSON object. The observation's field `observation_key` is the next user message; with None the whole observation, as JSON.
  A task is a seed; `meta.reset` of a task of yours holds what else its reset is to be told.

| reward | is |
| ------ | -- |
| of a step | the server's own; null before the end counts as nothing |
| of an episode whose rewards were all null | unknown |

The environment waits for the server, `timeout_s` at most for each answer; a server that cannot be reached is a fault, never a reward of 0.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from palestra.envs.adapters.connection import Connection, ServerSaidNoError, session_url
from palestra.envs.adapters.foreign import ForeignEnv, Move, seed_of, seeded_tasks, user
from palestra.envs.rubrics.types import text_of
from palestra.envs.spaces import fresh, is_message
from palestra.envs.tasks import GeneratedTasks, TaskSource, task_to_json
from palestra.envs.types import EnvError, Message, Reward, StepInfo, StopReason, Task, ToolSpec


@dataclass(frozen=True, slots=True)
class Described:
    """What a server says of itself before the first episode."""

    ours: bool
    """It is Palestra's, and knows messages."""
    tasks: int = 0
    tools: tuple[ToolSpec, ...] = ()


@functools.cache
def describe(url: str, token: str | None, timeout_s: float) -> Described:
    """Asks a server once per process.

    Raises:
        EnvError: it cannot be reached.
    """
    connection = Connection(url, token, timeout_s)
    try:
        about = connection.ask("state").get("palestra")
    except ServerSaidNoError:  # some have no state before the first reset
        about = None
    finally:
        connection.close()
    if not isinstance(about, Mapping):
        return Described(ours=False)
    return Described(True, int(about.get("tasks", 0)), tuple(about.get("tools") or ()))


class OpenEnv(ForeignEnv):
    """An environment of an OpenEnv server."""

    def __init__(
        self,
        url: str,
        action_key: str | None = "message",
        observation_key: str | None = None,
        size: int = 4096,
        token: str | None = None,
        timeout_s: float = 60.0,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`url`: the server's; `size`: how many seeds are tasks, where the server has none of its own; `token`: what it wants as bearer.

        Raises:
            EnvError: the server cannot be reached.
            ValueError: `url` is none.
        """
        self._connection = Connection(url, token, timeout_s)
        self._about = describe(session_url(url), token, timeout_s)
        self._tools = self._about.tools
        self._action_key, self._observation_key = action_key, observation_key
        super().__init__(render_mode, self._own_tasks(url, size) if tasks is None else tasks)

    def _own_tasks(self, url: str, size: int) -> TaskSource:
        if not self._about.ours:
            return seeded_tasks(url, size)
        if not self._about.tasks:
            return ()
        return GeneratedTasks(self._about.tasks, lambda index: Task("", id=f"{url}/{index}", meta={"index": index}))

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(fresh(self._tools))

    def begin(self, task: Task, seed: int) -> Sequence[Message]:
        self._record: Mapping[str, Any] = {}
        self._rewarded = False
        if not self._about.ours:
            more = task.meta.get("reset", {})
            seen = self._connection.ask("reset", {"seed": seed_of(task, seed), **more})
            return [user(self._shown(seen))]
        index = task.meta.get("index")
        wanted = index if isinstance(index, int) and not task.prompt else task_to_json(task)
        seen = self._connection.ask("reset", {"seed": seed, "task": wanted})["observation"]
        self._tools = tuple(seen.get("tools") or ())
        return _messages(seen)

    def move(self, action: Message) -> Move:
        if self._about.ours:
            return self._kept(self._connection.ask("step", {"message": action}))
        try:
            data = self._connection.ask("step", self._action(action))
        except (ServerSaidNoError, ValueError) as error:
            # What the model wrote does not fit the server's action: its own mistake, which it is told.
            if isinstance(error, ServerSaidNoError) and error.code != "VALIDATION_ERROR":
                raise
            return Move([user(f"Error: {error}")])
        reward, done = data.get("reward"), bool(data.get("done"))
        self._rewarded = self._rewarded or reward is not None
        known = float(reward) if reward is not None else None if done and not self._rewarded else 0.0
        cut = done and (data.get("metadata") or {}).get("truncated") is True
        stop = (StopReason.MAX_TURNS if cut else StopReason.ENV_DONE) if done else None
        return Move([user(self._shown(data))], known, stop, cut)

    def _action(self, action: Message) -> dict[str, Any]:
        text = text_of(action.get("content"))
        if self._action_key is not None:
            return {self._action_key: text}
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError("the reply must be a JSON object, and is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the reply must be a JSON object: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"the reply must be a JSON object, got {type(value).__name__}")
        return value

    def _shown(self, data: Mapping[str, Any]) -> str:
        """The text of another server's observation."""
        seen = data.get("observation")
        if not isinstance(seen, Mapping):
            raise EnvError(f"{self._connection.url}: an answer has no observation: {str(data)[:200]}")
        if self._observation_key is not None:
            if self._observation_key not in seen:
                known = ", ".join(sorted(seen))
                raise EnvError(
                    f"observation_key: the server's observations have no {self._observation_key!r}, but {known}"
                )
            value = seen[self._observation_key]
            return value if isinstance(value, str) else orjson.dumps(value).decode()
        return orjson.dumps({key: value for key, value in seen.items() if key != "metadata"}).decode()

    # Palestra's own servers.

    def _kept(self, data: Mapping[str, Any]) -> Move:
        """Takes in what a Palestra server says of the episode."""
        record = data.get("metadata") or {}
        self._record = record
        self.tool_calls, self.tool_errors = int(record.get("tool_calls", 0)), int(record.get("tool_errors", 0))
        self.tool_seconds = float(record.get("tool_seconds", 0.0))
        stop = StopReason(record["stop_reason"]) if data.get("done") else None
        return Move(_messages(data["observation"]), record.get("step_reward"), stop, record.get("truncated") is True)

    def finish(self, reason: StopReason) -> tuple[float, dict[str, Any]]:
        """See `MessageEnv.finish`; a Palestra server scores what there is."""
        if self._about.ours and not self.done:
            self._kept(self._connection.ask("finish", {"reason": reason}))
        return super().finish(reason)

    def grade(
        self,
        transcript: Sequence[Message],
        workspace: Path | None = None,
        reason: StopReason = StopReason.ANSWER,
    ) -> StepInfo:
        """See `MessageEnv.grade`; a Palestra server is told the conversation. The workspace stays here."""
        if self._about.ours and not self.done:
            self._kept(self._connection.ask("grade", {"transcript": list(transcript), "reason": reason}))
        return super().grade(transcript, workspace, reason)

    def replay(self, transcript: Sequence[Message]) -> None:
        if self._about.ours:  # the server has it whole
            self.tool_errors = int(self._record.get("tool_errors", 0))
        else:
            super().replay(transcript)

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        if not self._about.ours:
            return super().score(task, transcript)
        said = self._record.get("reward")
        if not isinstance(said, Mapping):
            raise EnvError(f"{self._connection.url}: the episode has ended and has no reward record")
        total = said.get("value")
        if total is not None:
            # The record has the sum; the steps' part of it is known here already.
            total -= math.fsum(reward for reward in self._step_rewards if reward is not None)
        return Reward(
            total, dict(said.get("components") or {}), str(said.get("note", "")), dict(said.get("errors") or {})
        )

    def close(self) -> None:
        """Ends the session."""
        self._connection.close()
        super().close()


def _messages(seen: Mapping[str, Any]) -> list[Message]:
    """The messages of a Palestra server's observation.

    Raises:
        EnvError: they are none.
    """
    messages = seen.get("messages")
    if not isinstance(messages, list) or not all(is_message(message) for message in messages):
        raise EnvError(f"an observation of a Palestra server has no messages: {str(seen)[:200]}")
    return messages
