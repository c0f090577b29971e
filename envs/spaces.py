"""Spaces of messages: observations are tuples of new messages, actions are one assistant message.

gymnasium's `Text` has a charset and a length, which text of a model has not, so both spaces are plain subclasses of
`Space`. Vector environments need of them only equality, `contains`, `sample` and pickling: batches are tuples of single
values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from palestra.envs.types import Message, ToolSpec

Observation = tuple[Message, ...]
"""The messages that are new since the last step; empty after the final answer."""

ROLES = ("system", "user", "assistant", "tool")
_PLAIN = frozenset({str, int, float, bool, type(None)})


def is_message(value: Any, roles: Collection[str] = ROLES) -> bool:
    """Whether `value` is a chat message of one of `roles`. Extra keys are fine, and so is any text: a model may write
    anything.
    """
    if not isinstance(value, dict | Mapping) or value.get("role") not in roles:
        return False
    if not isinstance(value.get("content"), str | list | None):
        return False
    calls = value.get("tool_calls")
    return calls is None or (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls))


def fresh(value: Any) -> Any:
    """A copy that shares no container with `value`. For JSON-like data, and several times quicker than
    `copy.deepcopy`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    # Most of what is in a message is text: looking at it here saves a call for each.
    if kind is dict or isinstance(value, Mapping):
        return {key: item if type(item) is str else fresh(item) for key, item in value.items()}
    if kind is list or isinstance(value, list | tuple):
        return [item if type(item) is str else fresh(item) for item in value]
    return value


class MessagesSpace(Space[Observation]):
    """Observations. All four roles can occur: a one-shot example in a prompt has assistant and tool messages."""

    def __init__(self, roles: Iterable[str] = ROLES, seed: int | np.random.Generator | None = None) -> None:
        self.roles = tuple(roles)
        super().__init__(None, None, seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple | list) and all(is_message(message, self.roles) for message in x)

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        return ({"role": "user", "content": f"sample {self.np_random.integers(1 << 30)}"},)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace) and other.roles == self.roles

    __hash__ = None  # type: ignore[assignment]  # equal by value and mutable (its generator)

    def __repr__(self) -> str:
        return f"MessagesSpace({'|'.join(self.roles)})"


class AssistantSpace(Space[Message]):
    """Actions. The tools' schemas serve `sample` and equality only: an unknown tool or broken arguments are a valid
    action, which the environment answers with an error text."""

    def __init__(self, tools: Iterable[ToolSpec] = (), seed: int | np.random.Generator | None = None) -> None:
        self.tools = tuple(tools)
        super().__init__(None, None, seed)

    def contains(self, x: Any) -> bool:
        return is_message(x, ("assistant",))

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        rng = self.np_random
        if not self.tools or rng.random() < 0.3:
            return {"role": "assistant", "content": f"sample {rng.integers(1 << 30)}"}
        function = self.tools[rng.integers(len(self.tools))]["function"]
        arguments = sample_json(function["parameters"], rng)
        call = {"name": function["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        tool_calls = [{"id": f"call_{rng.integers(1 << 30):08x}", "type": "function", "function": call}]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AssistantSpace) and other.tools == self.tools

    __hash__ = None  # type: ignore[assignment]  # as above

    def __repr__(self) -> str:
        return f"AssistantSpace(tools={[tool['function']['name'] for tool in self.tools]})"


def sample_json(schema: Mapping[str, Any], rng: np.random.Generator, root: Mapping[str, Any] | None = None) -> Any:
    """A random value for a JSON schema; what it does not know becomes a short string."""
    root = schema if root is None else root
    if "$ref" in schema:
        return sample_json(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], rng, root)
    if "enum" in schema:
        return schema["enum"][rng.integers(len(schema["enum"]))]
    if "anyOf" in schema:
        return sample_json(schema["anyOf"][rng.integers(len(schema["anyOf"]))], rng, root)
    match schema.get("type"):
        case "object":
            return {name: sample_json(item, rng, root) for name, item in schema.get("properties", {}).items()}
        case "array":
            return [sample_json(schema.get("items", {}), rng, root) for _ in range(rng.integers(3))]
        case "integer":
            return int(rng.integers(-100, 100))
        case "number":
            return round(float(rng.normal()), 3)
        case "boolean":
            return bool(rng.integers(2))
        case "null":
            return None
    return f"{rng.integers(100)}+{rng.integers(100)}"
