"""Reads tool calls in the form that a chat template writes them, for families that have no code of their own.

In: the text that a template gives to a turn with one call and to one with two. Out: a `CallForm`, which finds calls in a completion.
Special tokens are matched by id; markers that are plain text by their text. Nothing here waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.server.renderer.text import call_of, make_call
from palestra.server.renderer.tokens import Piece, TokenCodec
from palestra.server.renderer.veil import shared_beginning

_BETWEEN = " \t\r\n,;[]"
"""What may stand between the JSON objects of one block."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written: blocks from `start` to `end`, each holding JSON objects or a name and arguments."""

    start: int | str
    """What opens a block: a special id, or text; "" where a reply that is JSON and nothing else is the call."""
    end: int | str
    """What closes it; "" where it goes on to the next block or the end of the turn."""
    frame: frozenset[int] = frozenset()
    """Special ids around the blocks, which say nothing themselves."""
    lead: str | None = None
    """Text between `start` and the name, where the block is a name and then arguments; None where it is JSON."""
    middle: str = ""
    """Text between the name and the arguments."""

    def read(self, ids: Sequence[int], codec: TokenCodec) -> tuple[str, list[dict[str, Any]], str | None]:
        """The text outside of calls, the calls in order, and what was wrong with one; a block that is no call stays text. One scan."""
        if self.start == "":
            return _bare(codec.decode(ids))
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        wrong: str | None = None
        for outside, block, whole in (
            self._by_id(ids, codec) if isinstance(self.start, int) else self._by_text(ids, codec)
        ):
            text.append(outside)
            if block is None:
                continue
            found, fault = _objects(block) if self.lead is None else self._named(block)
            wrong = wrong or fault
            calls += found
            if not found:
                text.append(whole)
        return "".join(text), calls, wrong

    def _by_id(self, ids: Sequence[int], codec: TokenCodec) -> list[tuple[str, str | None, str]]:
        """(text before, the block's inside, the block as it stands) for each block, and the text after the last."""
        out: list[tuple[str, str | None, str]] = []
        held: list[int] = []
        at = 0
        while at < len(ids):
            if ids[at] != self.start:
                if ids[at] not in self.frame:
                    held.append(ids[at])
                at += 1
                continue
            stop = at + 1
            while stop < len(ids) and ids[stop] not in (self.start, self.end):
                stop += 1
            after = stop + 1 if stop < len(ids) and ids[stop] == self.end else stop
            inside = [token for token in ids[at + 1 : stop] if token not in self.frame]
            out.append((codec.decode(held), codec.decode(inside), codec.decode(ids[at:after])))
            held, at = [], after
        return [*out, (codec.decode(held), None, "")]

    def _by_text(self, ids: Sequence[int], codec: TokenCodec) -> list[tuple[str, str | None, str]]:
        start, end = str(self.start), str(self.end)
        first, *blocks = codec.decode([token for token in ids if token not in self.frame]).split(start)
        out: list[tuple[str, str | None, str]] = []
        for block in blocks:
            inside, _, after = block.partition(end) if end else (block, "", "")
            out.append((first, inside, start + block[: len(block) - len(after)]))
            first = after
        return [*out, (first, None, "")]

    def _named(self, block: str) -> tuple[list[dict[str, Any]], str | None]:
        name, middle, rest = block.removeprefix(self.lead or "").partition(self.middle)
        if not name.strip() or not middle:
            return [], "a call without a name"
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(rest.lstrip())
        except (ValueError, RecursionError):
            return [make_call(name.strip(), rest.strip())], "a call whose arguments are no JSON"
        return [make_call(name.strip(), json.dumps(value, ensure_ascii=False))], None


def learn_form(one: Sequence[Piece], two: Sequence[Piece] | None, name: str, codec: TokenCodec) -> CallForm | None:
    """The form of calls, from a turn with one call of tool `name` and a turn with two (None where the template refuses two), both without
    the token that ends the turn. None where calls are written in no way that is known here."""
    words = _spelled(one, codec)
    whole = next((found for found in _json_objects(words) if found[2].get("name") == name), None)
    if whole is not None:
        before, after = words[: whole[0]], words[whole[1] :]
        start = _first_special(before, codec)
        if start is None:
            return CallForm(before.strip(), after.strip())
        frame = frozenset(_specials(before + after, codec)) - {start}
        end = _first_special(after, codec)
        return CallForm(start, "" if end is None else end, frame - {end} if end is not None else frame)
    at = words.find(name)
    brace = words.find("{", at)
    if at < 0 or brace < 0:
        return None
    lead, middle = words[:at], words[at + len(name) : brace]
    _, end_at = json.JSONDecoder().raw_decode(words, brace)
    tail = words[end_at:]
    outer_lead, outer_tail = lead, tail
    if two is not None:
        between = _between(_spelled(two, codec), name)
        lead = shared_beginning(lead[::-1], between[::-1])[::-1]
        tail = shared_beginning(tail, between)
    start = _first_special(lead, codec)
    if start is None or not middle.strip():
        return None
    end = _first_special(tail, codec)
    frame = frozenset(_specials(outer_lead + outer_tail, codec)) - frozenset(_specials(lead + tail, codec))
    opened = lead[lead.index(codec.token_text(start)) + len(codec.token_text(start)) :]
    return CallForm(start, "" if end is None else end, frame, opened, middle)


def _spelled(pieces: Sequence[Piece], codec: TokenCodec) -> str:
    return "".join(codec.token_text(p) if isinstance(p, int) else p for p in pieces if isinstance(p, int | str))


def _specials(text: str, codec: TokenCodec) -> list[int]:
    """Ids of the special tokens in a text, in order."""
    found = [(text.find(name), -len(name), token) for name, token in codec.special.items() if name in text]
    return [token for _, _, token in sorted(found)]


def _first_special(text: str, codec: TokenCodec) -> int | None:
    return next(iter(_specials(text, codec)), None)


def _between(words: str, name: str) -> str:
    """What stands between the arguments of the first call and the name of the second."""
    at = words.find("{", words.find(name))
    _, end = json.JSONDecoder().raw_decode(words, at)
    return words[end : words.find(name, end)]


def _json_objects(text: str) -> list[tuple[int, int, dict[str, Any]]]:
    """JSON objects in a text that start at any brace: (start, end, value), the outer before the inner."""
    out: list[tuple[int, int, dict[str, Any]]] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
            out.append((at, end, value))
        except ValueError:
            end = at
        at = text.find("{", at + 1)
    return out


def _objects(block: str) -> tuple[list[dict[str, Any]], str | None]:
    """The calls of one block of JSON: one object, a list of them, or one after the other."""
    calls: list[dict[str, Any]] = []
    decoder = json.JSONDecoder(strict=False)
    at, wrong = _skip(block, 0), None
    while at < len(block):
        try:
            _, end = decoder.raw_decode(block, at)
        except (ValueError, RecursionError):
            end = len(block)
        call, fault = call_of(block[at:end])
        wrong = wrong or fault
        if call is None:
            break
        calls.append(call)
        at = _skip(block, end)
    return calls, wrong if block.strip() else "an empty call"


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BETWEEN:
        at += 1
    return at


def _bare(text: str) -> tuple[str, list[dict[str, Any]], str | None]:
    """Calls, where the whole text is JSON objects with a name and arguments; else the text."""
    if not text.lstrip(_BETWEEN).startswith("{"):
        return text, [], None
    decoder = json.JSONDecoder(strict=False)
    calls: list[dict[str, Any]] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return text, [], "a call that is no JSON" if text.lstrip().startswith('{"name":') else None
        if not isinstance(value, dict) or not value.keys() & {"arguments", "parameters"}:
            return text, [], None
        call, _ = call_of(json.dumps(value, ensure_ascii=False))
        if call is None:
            return text, [], None
        calls.append(call)
        at = _skip(text, at)
    return "", calls, None
