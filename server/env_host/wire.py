"""JSON of the environment host: what clients send, read with bounds, and what an environment says, written as OpenEnv's clients read it.

Waits for nothing.

| message of a client | answer |
| --- | --- |
| `{"type": "reset", "data": {"seed", "episode_id", "task"}}` | `observation` |
| `{"type": "step", "data": {"message": TEXT or ASSISTANT MESSAGE}}` | `observation` |
| `{"type": "state"}` | `state` |
| `{"type": "close"}` | none |
| `{"type": "finish", "data": {"reason"}}` (ours): a limit of the client's cut the episode | `observation` |
| `{"type": "grade", "data": {"transcript", "reason"}}` (ours): an agent played by itself | `observation` |

An `observation` carries `{"observation": {"messages", "text", "tools"}, "reward", "done", "metadata"}`; a reward that is not known is null.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from palestra.envs.tasks import task_from_json
from palestra.envs.types import Message, Reward, StepInfo, StopReason, Task, TaskError, ToolSpec
from palestra.server.env_host.types import INVALID_JSON, VALIDATION_ERROR, EnvRefusal

RESET_KEYS = frozenset({"seed", "episode_id", "task"})


def read_json(raw: bytes | str) -> Any:
    """The value that a client wrote.

    Raises:
        EnvRefusal: it is no JSON.
    """
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(raw)
    try:  # half of a surrogate pair is JSON to Python's reader and to most clients, and models do write it
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EnvRefusal(f"Invalid JSON: {error}", 400, INVALID_JSON) from None


def write_json(value: Any) -> bytes:
    """The value in JSON; what is not a finite number becomes null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, or a container of another kind inside of a message
        return json.dumps(value, default=str).encode()


def invalid(message: str) -> EnvRefusal:
    """A request that says what it must not."""
    return EnvRefusal(message, 422, VALIDATION_ERROR)


def read_message(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Type and data of a client's message.

    Raises:
        EnvRefusal: it is none.
    """
    value = read_json(raw)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid("a message is an object with 'type' and 'data'")
    data = value.get("data", {})
    if not isinstance(data, dict):
        raise invalid(f"'data' must be an object, got {type(data).__name__}")
    return value["type"], data


def read_reset(data: Mapping[str, Any]) -> tuple[int | None, dict[str, Any], str | None]:
    """Seed, options and episode id of a reset.

    Raises:
        EnvRefusal: a key is unknown or its value wrong.
    """
    if unknown := sorted(data.keys() - RESET_KEYS):
        raise invalid(f"unknown key {unknown[0]!r} of a reset; known: {', '.join(sorted(RESET_KEYS))}")
    seed, episode, task = data.get("seed"), data.get("episode_id"), data.get("task")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise invalid(f"'seed' must be a whole number that is not negative, got {str(seed)[:100]!r}")
    if episode is not None and not isinstance(episode, str):
        raise invalid(f"'episode_id' must be a text, got {type(episode).__name__}")
    return seed, {} if task is None else {"task": _task(task)}, episode


def _task(task: Any) -> Task | int:
    if isinstance(task, int) and not isinstance(task, bool):
        return task
    try:
        return task_from_json(task)
    except TaskError as error:
        raise invalid(f"'task' must be an index or a task: {error}") from None


def read_action(data: Mapping[str, Any]) -> Message:
    """The assistant message of a step: `{"message": ...}` as OpenEnv's actions are written, or the message itself.

    Raises:
        EnvRefusal: it is none.
    """
    said = data if "role" in data else data.get("message")
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    if not isinstance(said, Mapping):
        raise invalid("an action is {'message': ...}, with a text or an assistant message")
    return {"role": "assistant", **said}


def read_reason(data: Mapping[str, Any], usual: StopReason) -> StopReason:
    """Why a client ends an episode.

    Raises:
        EnvRefusal: that is no reason.
    """
    try:
        return StopReason(data.get("reason", usual))
    except ValueError:
        raise invalid(
            f"'reason' must be one of {', '.join(StopReason)}, got {str(data.get('reason'))[:100]!r}"
        ) from None


def observation(
    messages: Sequence[Message],
    reward: float | None,
    ended: tuple[bool, bool],
    info: StepInfo,
    tools: Sequence[ToolSpec] | None = None,
) -> dict[str, Any]:
    """An answer to a reset or a step. `ended`: terminated and truncated; `tools`: after a reset, what is on offer."""
    last = messages[-1].get("content") if messages else ""
    seen: dict[str, Any] = {"messages": messages, "text": last if isinstance(last, str) else ""}
    if tools is not None:
        seen["tools"] = tools
    return {
        "type": "observation",
        "data": {
            "observation": seen,
            "reward": reward if reward is not None and math.isfinite(reward) else None,
            "done": ended[0] or ended[1],
            "metadata": {"terminated": ended[0], "truncated": ended[1], **info_to_json(info)},
        },
    }


def info_to_json(info: StepInfo) -> dict[str, Any]:
    """What is known of an episode's course."""
    return {
        "task_id": info.task_id, "turn": info.turn, "stop_reason": info.stop_reason, "reward": _reward(info.reward),
        "tool_calls": info.tool_calls, "tool_errors": info.tool_errors, "tool_seconds": info.tool_seconds,
        "step_reward": info.step_reward,
    }  # fmt: skip


def _reward(reward: Reward | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    said = {"value": reward.value, "components": dict(reward.components), "note": reward.note}
    return {**said, "errors": dict(reward.errors)} if reward.errors else said


def failed(refusal: EnvRefusal) -> dict[str, Any]:
    """An answer that says why there is none."""
    return {"type": "error", "data": refusal.data}


def schemas(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """JSON schemas of actions, observations and state, as OpenEnv's `/schema` gives them."""
    message = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": ["string", "array", "null"]},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
        },
    }
    action = {
        "type": "object",
        "title": "AssistantMessage",
        "properties": {"message": {"anyOf": [{"type": "string"}, message]}, "metadata": {"type": "object"}},
        "required": ["message"],
        "tools": list(tools),
    }
    seen = {
        "type": "object",
        "title": "Messages",
        "properties": {
            "messages": {"type": "array", "items": {"type": "object"}},
            "text": {"type": "string"},
            "tools": {"type": "array", "items": {"type": "object"}},
            "done": {"type": "boolean"},
            "reward": {"type": ["number", "null"]},
            "metadata": {"type": "object"},
        },
    }
    state = {
        "type": "object",
        "title": "State",
        "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
    }
    return {"action": action, "observation": seen, "reset_observation": seen, "state": state}
