"""A recorded completion as the caller sees it: text without stop text and prefill, finish reason, logprobs, usage. Pure; nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.server.gateway.prompts import Place
from palestra.server.gateway.types import Choice, ModelCall, TokenLogprob, Usage
from palestra.server.renderer.text import strip_end
from palestra.server.renderer.types import ParsedReply, Renderer
from palestra.server.types import Completion


def choice_of(renderer: Renderer, call: ModelCall, place: Place, done: Completion, parsed: ParsedReply) -> Choice:
    """One reply. `parsed.message` becomes what the caller will echo: without a stop text, and without calls that it did not want."""
    message = parsed.message
    content = message.get("content")
    if done.stop_text and isinstance(content, str) and (at := content.find(done.stop_text)) >= 0:
        message["content"] = content = content[:at]
    shown: dict[str, Any] = dict(message)
    if call.tool_choice == "none" and parsed.has_calls:
        shown = {"role": "assistant", "content": renderer.codec.decode(strip_end(done.token_ids, renderer.stop_ids))}
        message.clear()
        message.update(shown)
    elif place.prefill and isinstance(content, str) and content.startswith(place.prefill):
        shown["content"] = content[len(place.prefill) :]
    reason = {"stop": "stop", "length": "length"}.get(done.finish_reason, "length")
    text = renderer.codec.decode(strip_end(done.token_ids, renderer.stop_ids)) if call.prompt is not None else ""
    if text and done.stop_text and (at := text.find(done.stop_text)) >= 0:
        text = text[:at]
    return Choice(
        message=shown,
        text=text,
        finish_reason="tool_calls" if shown.get("tool_calls") and reason == "stop" else reason,
        stop_text=done.stop_text,
        tokens=_tokens(renderer, call, done) if call.logprobs else (),
    )


def _tokens(renderer: Renderer, call: ModelCall, done: Completion) -> tuple[TokenLogprob, ...]:
    text, raw = renderer.codec.token_text, renderer.codec.token_bytes
    tops: Sequence[tuple[tuple[float, int], ...]] = done.top_logprobs or ((),) * len(done.token_ids)
    return tuple(
        TokenLogprob(text(i), raw(i), lp, tuple((text(other), olp) for olp, other in top[: call.top_logprobs]))
        for i, lp, top in zip(done.token_ids, done.logprobs, tops, strict=True)
    )


def usage_of(renderer: Renderer, prompt: int, completions: Sequence[Completion]) -> Usage:
    """Token counts of all choices together."""
    return Usage(
        prompt=prompt,
        completion=sum(len(done.token_ids) for done in completions),
        cached=max((done.cached_tokens for done in completions), default=0),
        reasoning=sum(_reasoning(renderer, done) for done in completions),
    )


def _reasoning(renderer: Renderer, done: Completion) -> int:
    """Tokens up to the end of reasoning; 0 where the family has no such token or the reply none."""
    end = getattr(renderer, "think_end", None)
    return done.token_ids.index(end) + 1 if end is not None and end in done.token_ids else 0
