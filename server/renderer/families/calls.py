"""Calls and results, below what a family writes around them: cutting ids at marks, JSON calls that follow each other, results in order.

Pure; every function is one scan of what it is given, and none raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from palestra.server.renderer.text import is_name, json_text, make_call, text_of
from palestra.server.renderer.types import Message

NO_JSON = "a call whose arguments are no JSON"
NO_OBJECT = "a call whose arguments are no object"
_GAP = re.compile(r"[\s;,]*")


def split(ids: Sequence[int], marks: Collection[int]) -> list[tuple[int | None, list[int]]]:
    """Ids cut at some special ids: each mark with what follows it up to the next. The first part has no mark."""
    parts: list[tuple[int | None, list[int]]] = [(None, [])]
    for token in ids:
        if token in marks:
            parts.append((token, []))
        else:
            parts[-1][1].append(token)
    return parts


def called(name: str, arguments: str, call_id: str | None = None) -> tuple[dict[str, Any], str | None]:
    """A call whose name and arguments stand apart, and what is wrong with it. The arguments stay as they were written; where nothing was,
    they become "{", which no reader takes for a whole object."""
    raw = arguments.strip()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return make_call(name, raw or "{", call_id), NO_JSON
    return make_call(name, raw, call_id), None if isinstance(value, dict) else NO_OBJECT


def objects(text: str, at: int = 0) -> tuple[list[Any], int]:
    """The JSON values that follow each other from `at` on, with white space, commas or semicolons between them, and where they end."""
    decoder = json.JSONDecoder(strict=False)
    found: list[Any] = []
    while True:
        gap = _GAP.match(text, at)
        at = at if gap is None else gap.end()
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found, at
        found.append(value)


def object_call(value: Any, call_id: str | None = None) -> dict[str, Any] | None:
    """A call in the form {"name": ..., "parameters" or "arguments": ...}; None where a value is none."""
    if not isinstance(value, dict) or not is_name(value.get("name")):
        return None
    for key in ("parameters", "arguments"):
        if isinstance(value.get(key), dict):
            try:
                return make_call(value["name"], json_text(value[key]), call_id)
            except RecursionError:
                return None
    return None


def in_call_order(results: Sequence[Message], calls: Sequence[Message]) -> list[tuple[Message, Message | None]]:
    """Results with the calls that they answer, in the order of the calls: formats without call ids tell results apart by place. A result
    that names no known call takes the call at its own place; where some name calls and others do not, the order stays as it came."""
    places = {call.get("id"): place for place, call in enumerate(calls)}
    known = [places.get(result.get("tool_call_id")) for result in results]
    if None in known:
        return [
            (result, calls[place if place is not None else at] if (place is not None or at < len(calls)) else None)
            for at, (result, place) in enumerate(zip(results, known, strict=True))
        ]
    ordered = sorted(zip(known, range(len(results)), strict=True))
    return [(results[at], calls[place]) for place, at in ordered if place is not None]


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """The system message at the beginning, if there is one, and the rest."""
    if messages and messages[0]["role"] in ("system", "developer"):
        return text_of(messages[0]), list(messages[1:])
    return None, list(messages)


def gather_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """All system messages, wherever they stand, as one text, and the rest: for families that know a system text only at the beginning."""
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    texts = [text_of(m) for m in messages if m["role"] in ("system", "developer")]
    return ("\n\n".join(texts) if texts else None), rest
