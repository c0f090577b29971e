"""From a request to prompt ids: which turn it continues, and what has to be encoded after that one.

In: a session and a `ModelCall`. Out: a `Place`: the stored turn, the new ids, the whole prompt on the engine's wire. Only what is new is
rendered and encoded. It waits for the encoder of long texts, in a thread; short ones are encoded on the spot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.server.engine_wire import Prompt
from palestra.server.gateway.sampling import instructed
from palestra.server.gateway.session import Session
from palestra.server.gateway.tree import RAW_TOOLS, Match, Node, canonical_tools
from palestra.server.gateway.types import Message, ModelCall
from palestra.server.renderer.text import text_of
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import ExtendRefused, Rendered, Renderer, RenderOptions, Snapshot
from palestra.server.types import SessionError

INLINE_BYTES = 4096
"""Text that is encoded on the event loop; a longer one would hold up the others."""
REMEMBERED_BYTES = 65_536
"""Longer requests are not remembered: 256 of them would be gigabytes."""
TOOL_LISTS = 256
FIRST_PROMPTS = 256
"""First prompts that are remembered: the sessions of a group begin with the same one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands and what it is in ids."""

    base: Node | None
    new: tuple[Message, ...]
    """The messages that are filed with the turn: without a prefill."""
    tools_key: str
    delta: Sequence[int]
    """Ids after the base's completion."""
    opened: Sequence[int]
    """The trailing ids of delta that belong to the assistant's turn."""
    close_tokens: int
    fork_reason: str | None
    prompt: Prompt
    length: int
    """Ids of the whole prompt."""
    raw: bytes | None = None
    """The request's messages without the closing bracket, where a next request may begin with these bytes."""
    prefill: str = ""
    text: str | None = None
    """The prompt as text, of /v1/completions."""


class PromptMaker:
    """Places requests."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._tools: OrderedDict[bytes, tuple[str, list[dict[str, Any]]]] = OrderedDict()
        self._first: OrderedDict[tuple[bytes, bytes, RenderOptions], Rendered] = OrderedDict()

    async def place(self, session: Session, call: ModelCall) -> Place:
        """Finds the turn that a request continues, and renders what comes after it.

        Raises:
            SessionError: 400, what cannot be read.
            RenderError: what the family cannot express.
        """
        if call.prompt is not None:
            return await self._raw(session, call.prompt)
        tools_key, tools = self._tools_of(call.tools)
        match = session.tree.match(call.messages, tools_key)
        new, prefill = _without_prefill(match.new)
        if match.base is None and not new:
            raise SessionError("messages holds nothing but the beginning of a reply")
        options = RenderOptions(session.date, call.thinking, call.effort, _forced(call, tools), prefill)
        base, reason = match.base, match.fork_reason
        if base is not None:
            last = Snapshot(base.completion, base.reply, base.delta[len(base.delta) - base.opened :], tools)
            say = instructed(new, call)
            try:
                done = await _encode(lambda: self.renderer.extend(last, say, options), say)
                return _place(base, new, tools_key, done, None, call, prefill)
            except ExtendRefused as refused:
                reason = refused.reason
                new = _all_messages(base, match)
                new, prefill = _without_prefill(new)
        done = await self._render_first(call, instructed(new, call), tools, options)
        return _place(None, new, tools_key, done, reason, call, prefill)

    def _tools_of(self, raw: bytes) -> tuple[str, list[dict[str, Any]]]:
        """Canonical text and value of a request's tools; most requests list what another one did."""
        if (known := self._tools.get(raw)) is None:
            known = canonical_tools(raw)
            if len(raw) <= REMEMBERED_BYTES:
                self._tools[raw] = known
                if len(self._tools) > TOOL_LISTS:
                    self._tools.popitem(last=False)
        return known

    async def _render_first(
        self, call: ModelCall, messages: Sequence[Message], tools: Sequence[Message], options: RenderOptions
    ) -> Rendered:
        plain = call.response_schema is None and call.tool_choice in (None, "auto")
        plain = plain and len(call.messages) + len(call.tools) <= REMEMBERED_BYTES
        key = (call.messages, call.tools, options)
        if plain and (known := self._first.get(key)) is not None:
            self._first.move_to_end(key)
            return known
        done = await _encode(lambda: self.renderer.render(messages, tools, options), messages)
        if plain:
            self._first[key] = done
            if len(self._first) > FIRST_PROMPTS:
                self._first.popitem(last=False)
        return done

    async def _encode_raw(self, text: str) -> list[int]:
        codec = self.renderer.codec
        if len(text) > INLINE_BYTES:
            return await asyncio.to_thread(_encode_wording, codec, text)
        return _encode_wording(codec, text)

    async def _raw(self, session: Session, asked: str | tuple[int, ...]) -> Place:
        """A prompt of /v1/completions: it continues the turn whose prompt and reply it begins with."""
        if not asked:
            raise SessionError("prompt is empty")
        codec = self.renderer.codec
        if isinstance(asked, str):
            base = session.tree.longest_raw(lambda node: node.text is not None and asked.startswith(node.text))
            rest = asked[len(base.text or "") :] if base is not None else asked
            delta: Sequence[int] = await self._encode_raw(rest)
        else:
            if bad := next((i for i in asked if not 0 <= i < codec.vocab_size), None):
                raise SessionError(f"prompt: {bad} is no id of the vocabulary of {codec.vocab_size}")
            wire = Prompt.of(asked).json + b","
            base = session.tree.longest_raw(lambda node: wire.startswith(node.prompt().json + b","))
            delta = asked[base.length :] if base is not None else asked
        if base is not None and not delta:
            base, delta = None, await self._encode_raw(asked) if isinstance(asked, str) else asked
        reason = "new_prompt" if base is None and session.tree.has_raw else None
        done = Rendered(delta)
        place = _place(base, (), RAW_TOOLS, done, reason, None, "")
        return replace(place, text=asked) if isinstance(asked, str) else place


def _encode_wording(codec: TokenCodec, text: str) -> list[int]:
    return codec.encode(codec.wording(text))


def _place(
    base: Node | None,
    new: tuple[Message, ...],
    tools_key: str,
    done: Rendered,
    reason: str | None,
    call: ModelCall | None,
    prefill: str,
) -> Place:
    ids = done.ids
    before = Prompt(b"", 0) if base is None else base.prompt()
    raw = None
    if call is not None and not prefill:
        raw = call.messages.rstrip()[:-1].rstrip()
    return Place(
        base=base,
        new=new,
        tools_key=tools_key,
        delta=ids,
        opened=ids[len(ids) - done.opened :],
        close_tokens=done.close_tokens,
        fork_reason=reason,
        prompt=before.extended(ids),
        length=before.length + len(ids),
        raw=raw,
        prefill=prefill,
    )


def _forced(call: ModelCall, tools: Sequence[Message]) -> str | None:
    """The call that the reply must begin with; see `RenderOptions.call`.

    Raises:
        SessionError: 400, there is no such tool.
    """
    choice = call.tool_choice
    if choice in (None, "auto", "none"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required":
        if not names:
            raise SessionError('tool_choice is "required", but the request lists no tools')
        return names[0] if len(names) == 1 else ""
    name = str(choice).removeprefix("=")
    if name not in names:
        raise SessionError(
            f"tool_choice names {name!r}, which is none of the request's tools: {', '.join(names) or 'none'}"
        )
    return name


def _without_prefill(new: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """An assistant message at the very end is the beginning of the reply."""
    if new and new[-1]["role"] == "assistant" and not new[-1].get("tool_calls"):
        return new[:-1], text_of(new[-1])
    return new, ""


def _all_messages(base: Node, match: Match) -> tuple[Message, ...]:
    return (*base.conversation(), *match.new)


async def _encode(work: Callable[[], Rendered], messages: Sequence[Message]) -> Rendered:
    """Long texts in a thread: the encoder lets go of the interpreter."""
    size = 0
    for message in messages:
        content = message.get("content")
        size += len(content) if isinstance(content, str) else 256
        if size > INLINE_BYTES:
            return await asyncio.to_thread(work)
    return work()
