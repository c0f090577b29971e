"""How replies of the families with marked blocks are read: a think block, text, and call blocks between special ids.

In: a completion's ids and the family's marks. Out: a `ParsedReply`. Everything is one scan, whatever the model wrote. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from palestra.server.renderer.text import json_text, literal, make_call
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import ParsedReply

NO_JSON = "a call that is no JSON"
NO_NAME = "a call without a name"
CUT = "a call that is cut or not of the family's form"

Found: TypeAlias = tuple[list[dict[str, Any]], str | None]
"""The calls of a block, and what is wrong with it. Without calls the block stays text."""
ReadBlock: TypeAlias = Callable[[list[int], bool], Found]
"""Reads what a call block holds between its marks; the second argument says whether its end mark is there."""
Marks: TypeAlias = tuple[int, int]
"""The ids that begin and end a block."""


def read_reply(codec: TokenCodec, ids: list[int], thinking: Marks | None, block: Marks, read: ReadBlock) -> ParsedReply:
    """A reply of such a family as a message. `ids`: without the end token, with what the prompt had opened."""
    reasoning, rest = split_thinking(ids, thinking)
    text, calls, wrong = split_blocks(codec, rest, block, read)
    message: dict[str, Any] = {"role": "assistant"}
    content = text if reasoning is None and not calls else text.strip("\n")
    message["content"] = content if content or not calls else None
    if reasoning is not None and (thought := codec.decode(reasoning).strip("\n")):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return ParsedReply(message, wrong)


def split_thinking(ids: list[int], thinking: Marks | None) -> tuple[list[int] | None, list[int]]:
    """The ids of the reasoning, None where there is no think block, and all others. A block whose beginning is missing began before the
    reply; one whose end is missing was cut."""
    if thinking is None:
        return None, ids
    begin, end = thinking
    if end in ids:
        stop = ids.index(end)
        start = ids.index(begin) if begin in ids[:stop] else -1
        return ids[start + 1 : stop], ids[: max(start, 0)] + ids[stop + 1 :]
    if begin in ids:
        start = ids.index(begin)
        return ids[start + 1 :], ids[:start]
    return None, ids


def split_blocks(
    codec: TokenCodec, ids: list[int], block: Marks, read: ReadBlock
) -> tuple[str, list[dict[str, Any]], str | None]:
    """Text outside the blocks, the calls inside, and the first thing that was wrong. A block that the reply's end cuts is read as it is;
    one that holds no call stays text."""
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    wrong: str | None = None
    begin, end = block
    at = 0
    while at < len(ids):
        start = _index(ids, begin, at)
        text.append(codec.decode(ids[at:start]))
        if start == len(ids):
            break
        stop = _index(ids, end, start)
        found, fault = read(ids[start + 1 : stop], stop < len(ids))
        wrong = wrong or fault
        if found:
            calls += found
        else:
            text.append(codec.decode(ids[start : stop + 1]))
        at = stop + 1
    return "".join(text), calls, wrong


def _index(ids: list[int], token: int, at: int) -> int:
    """Where the token is next, or the end."""
    try:
        return ids.index(token, at)
    except ValueError:
        return len(ids)


@dataclass(frozen=True, slots=True)
class XmlForm:
    """A call in XML's manner, whose tags are text: one pattern per tag. A closing tag counts where what follows fits, so that a value may
    spell it."""

    call: re.Pattern[str]
    """The opening tag; its group is the tool's name."""
    call_end: re.Pattern[str]
    key: re.Pattern[str]
    """The opening tag of an argument; its group is the argument's name."""
    key_end: re.Pattern[str]
    words: dict[str, Any] = field(default_factory=dict)
    """Further spellings of values, as `literal` takes them."""


def read_xml(form: XmlForm, text: str) -> Found:
    """The calls of one block, their arguments as JSON objects. A call that is cut or broken has its raw text as arguments."""
    calls: list[dict[str, Any]] = []
    wrong: str | None = None
    at = 0
    while opening := form.call.match(text, at):
        end = form.call_end.search(text, opening.end())
        inner = text[opening.end() : end.start() if end else len(text)]
        call, fault = call_with(opening[1], _arguments(form, inner) if end else None, inner)
        calls.append(call)
        wrong = wrong or fault
        at = end.end() if end else len(text)
    if text[at:].strip():
        wrong = wrong or (CUT if calls else NO_NAME)
    return calls, wrong


def _arguments(form: XmlForm, text: str) -> dict[str, Any] | None:
    """The arguments of one call; None where something else stands among them."""
    arguments: dict[str, Any] = {}
    at = 0
    while opening := form.key.match(text, at):
        end = form.key_end.search(text, opening.end())
        if end is None:
            return None
        arguments[opening[1]] = literal(text[opening.end() : end.start()], form.words)
        at = end.end()
    return None if text[at:].strip() else arguments


def call_with(name: str, arguments: dict[str, Any] | None, raw: str) -> tuple[dict[str, Any], str | None]:
    """A call with these arguments; with the raw text of them, and what is wrong, where there are none to read."""
    try:
        if arguments is not None:
            return make_call(name, json_text(arguments)), None
    except RecursionError:
        return make_call(name, raw), CUT
    return make_call(name, raw.strip() or "{"), CUT
