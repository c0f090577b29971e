"""Server-sent events: how one is written, and how a finished reply is cut into deltas. Pure.

A reply is on disk before its first byte leaves, so its stream is cut from the whole: pieces of about a word, which joined are the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from palestra.server.gateway.types import TokenLogprob

DONE = b"data: [DONE]\n\n"
"""How OpenAI's chat and completions end a stream."""
COMMENT_PING = b": ping\n\n"
"""A comment: every reader of server-sent events skips it."""

_pieces = re.compile(r"\s{0,32}\S{1,32}|\s{1,32}").findall


def event(data: Any, name: str | None = None) -> bytes:
    """One event with its blank line."""
    head = b"data: " if name is None else b"event: %s\ndata: " % name.encode()
    return head + orjson.dumps(data) + b"\n\n"


def pieces(text: str) -> list[str]:
    """The text in parts of about a word."""
    found: list[str] = _pieces(text)
    return found


class TokenDealer:
    """Deals a reply's tokens out over its deltas, in order: each delta gets the tokens whose text it has begun to show. Every token is
    dealt once, since `rest` hands out those that no delta shows (special tokens, the text of tool calls)."""

    def __init__(self, tokens: Sequence[TokenLogprob]) -> None:
        self._tokens, self._at, self._owed = tokens, 0, 0

    def take(self, text: str) -> Sequence[TokenLogprob]:
        """The tokens of the next delta."""
        self._owed += len(text)
        start = self._at
        while self._owed > 0 and self._at < len(self._tokens):
            self._owed -= len(self._tokens[self._at].text)
            self._at += 1
        return self._tokens[start : self._at]

    def rest(self) -> Sequence[TokenLogprob]:
        """The tokens that are left."""
        start, self._at = self._at, len(self._tokens)
        return self._tokens[start:]
