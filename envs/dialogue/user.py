"""Who is on the other side of a dialogue: a customer that follows a script, or a second model that plays one.

What the agent said goes in, what the customer answers comes out, or None where it leaves. The scripted one waits for
nothing; a model is waited for, with a deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from palestra.envs import background
from palestra.envs.types import EnvError, Message

PATIENCE = 10
"""Answers that a customer gives before it leaves."""
LONGEST = 4000
"""Characters of one side's message that the other reads."""
END = "[END]"
"""A model that plays the customer writes this when it has no more to say."""
TOPICS: Mapping[str, Sequence[str]] = {
    "email": ("email", "e-mail", "mail address"),
    "order": ("order number", "order id", "which order", "order"),
    "name": ("your name", "full name"),
    "reason": ("reason", "why"),
    "item": ("item", "which product", "option", "size", "colour"),
    "address": ("new address", "street", "where should", "address"),
}
"""The words that a scripted customer understands as a question about something."""
_SENTENCES = {"email": "My email is {}.", "order": "The order number is {}.", "name": "My name is {}."}

_clients: dict[tuple[asyncio.AbstractEventLoop, str, str], Any] = {}


class User(Protocol):
    """One customer in one conversation."""

    def reply(self, said: str) -> str | None:
        """The answer to what the agent said; None where the customer leaves.

        Raises:
            EnvError: there is no answer because of a fault.
        """


@dataclass(slots=True)
class ScriptedUser:
    """Answers questions from what it knows, in fixed sentences. A message without a question mark closes the matter."""

    knows: Mapping[str, str]
    """By topic: its email, its order, and what it wants in particular."""
    told: set[str] = field(default_factory=set)
    answers: int = 0

    def reply(self, said: str) -> str | None:
        """See `User.reply`."""
        said = said[-LONGEST:].lower()
        if "?" not in said or self.answers >= PATIENCE:
            return None
        self.answers += 1
        topics = [
            topic for topic, words in TOPICS.items() if topic in self.knows and any(word in said for word in words)
        ]
        if not topics:  # a question that it does not understand: it says what it has not said yet, or agrees
            topics = [topic for topic in self.knows if topic not in self.told and topic != "name"][:1]
        self.told.update(topics)
        sentences = [_SENTENCES.get(topic, "{}").format(self.knows[topic]) for topic in topics]
        return " ".join(sentences) or "Yes, please go ahead."


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that plays the customer."""

    base_url: str
    """Any OpenAI-compatible URL, ending in /v1."""
    model: str
    api_key_env: str = ""
    """The variable that holds its key; empty where it wants none."""
    temperature: float = 0.0
    timeout_s: float = 60.0
    """For one answer, repetitions included."""

    def key(self) -> str:
        """Its key.

        Raises:
            EnvError: the variable is not set.
        """
        if not self.api_key_env:
            return "none"
        if not (key := os.environ.get(self.api_key_env)):
            raise EnvError(f"the user model's key: the variable {self.api_key_env} is not set")
        return key


def read_user(value: Any) -> ModelSpec | None:
    """Which customer is meant: "scripted" (None), or a table of `ModelSpec`'s fields.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, ModelSpec) or value == "scripted":
        return value if isinstance(value, ModelSpec) else None
    if not isinstance(value, Mapping):
        raise ValueError(f"user is 'scripted' or a table with base_url and model, got {value!r}")
    known = [item.name for item in fields(ModelSpec)]
    if unknown := sorted(value.keys() - set(known)):
        raise ValueError(f"user: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if missing := [name for name in ("base_url", "model") if not value.get(name)]:
        raise ValueError(f"user: {missing[0]} is missing")
    return ModelSpec(**value)


class ModelUser:
    """A model in the customer's place. Its own side of the conversation is kept here; the agent's tools it never sees."""

    def __init__(self, spec: ModelSpec, part: str, opening: str) -> None:
        """`part`: who it is and what it wants; `opening`: what it has said already."""
        self.spec, self.answers = spec, 0
        system = (
            f"{part}\n\nYou are a customer writing to a shop's service desk. Write only what the customer says, in one or "
            "two sentences. Give details when you are asked for them, and invent none. When your matter is settled, or "
            f"the desk says that it cannot be done, write {END} and nothing else."
        )
        self._messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": "Service desk, how can I help you?"},
            {"role": "assistant", "content": opening},
        ]

    def reply(self, said: str) -> str | None:
        """See `User.reply`."""
        if self.answers >= PATIENCE:
            return None
        self.answers += 1
        self._messages.append({"role": "user", "content": said[-LONGEST:] or "(silence)"})
        key = self.spec.key()
        try:
            text = background.call(self._ask(key), self.spec.timeout_s)
        except Exception as error:
            reason = f"{type(error).__name__}: {error.__cause__ or error}"
            raise EnvError(f"the user model {self.spec.model} at {self.spec.base_url}: {reason}") from error
        self._messages.append({"role": "assistant", "content": text})
        return None if END in text else text[:LONGEST]

    async def _ask(self, key: str) -> str:
        client = _client(self.spec, key)
        answer = await client.chat.completions.create(
            model=self.spec.model, messages=self._messages, temperature=self.spec.temperature, max_tokens=256
        )
        text = answer.choices[0].message.content if answer.choices else None
        if not text or not text.strip():
            raise EnvError("it said nothing")
        return str(text).strip()


def _client(spec: ModelSpec, key: str) -> Any:
    """One client per endpoint and loop; made on the loop's own thread."""
    import openai

    place = (asyncio.get_running_loop(), spec.base_url, key)
    if place not in _clients:
        _clients[place] = openai.AsyncOpenAI(base_url=spec.base_url, api_key=key, max_retries=2)
    return _clients[place]
