"""OpenAI's text completions on the wire. Pure; nothing waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import msgspec

from palestra.server.gateway.dialects.asking import (
    Count,
    Replies,
    Sampled,
    StopText,
    StopTexts,
    StreamOptions,
    TokenId,
    Top,
    sampling_of,
    stops_of,
)
from palestra.server.gateway.dialects.reading import decode
from palestra.server.gateway.dialects.shapes import OpenAIErrors, finite, usage_of
from palestra.server.gateway.dialects.sse import DONE, TokenDealer, event, pieces
from palestra.server.gateway.types import Choice, ModelCall, ModelReply, Recall, TokenLogprob
from palestra.server.types import SessionError


class CompletionsRequest(Sampled, kw_only=True):
    """What of `/v1/completions` is understood; other fields are accepted and have no effect."""

    prompt: str | list[TokenId | str | list[TokenId]]
    n: Replies | None = None
    best_of: Replies | None = None
    stop: StopText | StopTexts | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    logprobs: Top | None = None
    echo: bool | None = None
    suffix: str | None = None


_decode = msgspec.json.Decoder(CompletionsRequest).decode


class CompletionsDialect(OpenAIErrors):
    """`/v1/completions`."""

    name = "completions"

    def read(self, body: bytes, recall: Recall) -> ModelCall:
        """A checked call. See `Dialect.read`."""
        asked = decode(_decode, body)
        prompt = _prompt_of(asked.prompt)
        if asked.suffix:
            raise SessionError("suffix: this model writes at the end of a prompt only")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise SessionError(
                f"best_of is {asked.best_of}: every reply that is drawn is given, so it can only equal n"
            )
        if asked.echo and not isinstance(prompt, str):
            raise SessionError("echo needs a prompt in text")
        if asked.echo and asked.logprobs is not None:
            raise SessionError("echo: there are no logprobs of a prompt; ask for one of echo and logprobs")
        options = asked.stream_options
        return ModelCall(
            messages=b"",
            prompt=prompt,
            echo=bool(asked.echo),
            model=asked.model or "",
            n=asked.n or 1,
            stream=bool(asked.stream),
            include_usage=options is not None and bool(options.include_usage),
            max_tokens=asked.max_tokens,
            stop=stops_of(asked.stop),
            sampling=sampling_of(asked),
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
            forced_ids=tuple(asked.forced_ids or ()),
        )

    def reply(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """A `text_completion` object."""
        choices = [
            _entry(index, _text_of(call, choice), _finish(choice), _logprobs(choice.tokens) if call.logprobs else None)
            for index, choice in enumerate(reply.choices)
        ]
        return {**_about(reply), "choices": choices, "usage": usage_of(reply.usage)}

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[bytes]:
        """`text_completion` events, the choices in turn, then the usage where it was asked for, then the end."""
        about = {**_about(reply), "usage": None} if call.include_usage else _about(reply)
        entries = [_entries(call, index, choice) for index, choice in enumerate(reply.choices)]
        for together in zip_longest(*entries):
            for entry in together:
                if entry is not None:
                    yield event({**about, "choices": [entry]})
        if call.include_usage:
            yield event({**about, "choices": [], "usage": usage_of(reply.usage)})
        yield DONE


def _prompt_of(prompt: str | Sequence[Any]) -> str | tuple[int, ...]:
    """The one prompt of a request, whichever of the four forms it came in."""
    if not prompt:
        raise SessionError("prompt is empty")
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(part, int) for part in prompt):
        return tuple(prompt)
    if any(isinstance(part, int) for part in prompt):
        raise SessionError("prompt mixes token ids with texts or lists")
    if len(prompt) > 1:
        raise SessionError(f"prompt holds {len(prompt)} prompts: one call answers one")
    return _prompt_of(prompt[0])


def _text_of(call: ModelCall, choice: Choice) -> str:
    """What was sampled before its stop text, behind the prompt where that is to be echoed."""
    text = choice.text
    if choice.stop_text and (end := text.find(choice.stop_text)) >= 0:
        text = text[:end]
    return f"{call.prompt}{text}" if call.echo else text


def _finish(choice: Choice) -> str:
    """A completion knows no tool calls: what looks like one is text."""
    return "length" if choice.finish_reason == "length" else "stop"


def _about(reply: ModelReply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{reply.reply_id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
    }


def _entry(index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _entries(call: ModelCall, index: int, choice: Choice) -> Iterator[dict[str, Any]]:
    dealer, shown = TokenDealer(choice.tokens), 0
    for piece in pieces(_text_of(call, choice)):
        logprobs = None
        if call.logprobs:
            tokens = dealer.take(piece)
            logprobs = _logprobs(tokens, shown)
            shown += sum(len(token.text) for token in tokens)
        yield _entry(index, piece, None, logprobs)
    left = _logprobs(dealer.rest(), shown) if call.logprobs else None
    yield _entry(index, "", _finish(choice), left)


def _logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """Four lists, one entry per token; `offset` is the place of the first one in the reply's text, in characters."""
    ends = list(accumulate((len(token.text) for token in tokens), initial=offset))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [{text: finite(logprob) for text, logprob in token.top} for token in tokens],
        "text_offset": ends[:-1],
    }
