"""Keeps the texts of messages apart from the template that arranges them.

In: texts to hide, and a template's rendering that shows them as words. Out: pieces: the template's own words with special tokens by id,
and the hidden texts, which are never a special token. Pure; nothing here waits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import escape

from palestra.server.renderer.tokens import BREAK, Piece
from palestra.server.types import RenderError

PROBE = "\"'é"
"""What stands inside a hidden text's word: how it comes out tells how the template escaped the place."""
_NAME = re.compile(r"[\w.:\-]{1,128}")
_WORD = re.compile(r"zqVeil(\d+)b(.{1,64}?)zqEnd", re.DOTALL)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


_FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "json": _json,
    "ascii json": _ascii,
    "json in json": lambda text: _json(_json(text)),
    "ascii json in json": lambda text: _ascii(_ascii(text)),
    "html": lambda text: str(escape(text)),
}
_FORM_OF = {write(PROBE): name for name, write in _FORMS.items()}


def shared_beginning(one: str, other: str) -> str:
    """The longest text that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the texts are compared by halves: character by character is slow on long prompts
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


class SpecialText:
    """Finds the special tokens in a template's own words."""

    def __init__(self, special: Mapping[str, int], flags: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`flags`: by token, `lstrip` and `rstrip` of tokenizer_config.json: white space on that side belongs to the token."""
        longest_first = sorted((name for name in special if name), key=len, reverse=True)
        self._ids = dict(special)
        self._pattern = re.compile(
            "|".join(_with_space(name, (flags or {}).get(name, {})) for name in longest_first) or r"(?!)"
        )

    def __contains__(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def split(self, text: str) -> list[Piece]:
        """Text and special ids in order."""
        out: list[Piece] = []
        at = 0
        for found in self._pattern.finditer(text):
            out += [text[at : found.start()], self._id(found[0])]
            at = found.end()
        out.append(text[at:])
        return [piece for piece in out if piece != ""]

    def find(self, text: str, start: int, among: frozenset[str]) -> tuple[int, int, str] | None:
        """The first of these tokens from `start` on: where it starts and ends, and which it is."""
        for found in self._pattern.finditer(text, start):
            name = self._name(found[0])
            if name in among:
                return found.start(), found.end(), name
        return None

    def first(self, text: str, start: int = 0) -> str | None:
        """The first special token from `start` on."""
        found = self._pattern.search(text, start)
        return None if found is None else self._name(found[0])

    def last(self, text: str, start: int = 0) -> str | None:
        """The last special token from `start` on."""
        every = [self._name(found[0]) for found in self._pattern.finditer(text, start)]
        return every[-1] if every else None

    def before(self, text: str, at: int) -> int:
        """`at`, or the start of the special token that `at` would cut."""
        for found in self._pattern.finditer(text):
            if found.start() < at < found.end():
                return found.start()
        return at

    def _name(self, found: str) -> str:
        return found if found in self._ids else found.strip()

    def _id(self, found: str) -> int:
        return self._ids[self._name(found)]


def _with_space(name: str, flags: Mapping[str, Any]) -> str:
    before, after = (r"\s*" if flags.get(side) else "" for side in ("lstrip", "rstrip"))
    return f"{before}{re.escape(name)}{after}"


class Veil:
    """The texts of one rendering. Each stands in the messages as a word that no template takes apart; `pieces` puts the texts back as
    plain text. They are put in last and never searched, so nothing written in them can pass for a word or a special token."""

    def __init__(self, special: SpecialText | None = None) -> None:
        """`special`: what `plain` must not show."""
        self.texts: list[str] = []
        self.special = special

    def hide(self, text: str) -> str:
        """The word for a text; nothing for nothing, since templates ask whether there is any."""
        if not text:
            return ""
        self.texts.append(text)
        return f"zqVeil{len(self.texts) - 1:06d}b{PROBE}zqEnd"

    def plain(self, name: str) -> str:
        """A name or an id as it is, since templates compare and measure those; hidden where it is anything but a word."""
        free = _NAME.fullmatch(name) and "zqVeil" not in name and (self.special is None or name not in self.special)
        return name if free else self.hide(name)

    def hide_inner(self, text: str) -> str:
        """As `hide`, but white space around the text stays in sight: templates trim it where the model was trained so."""
        inner = text.strip()
        if not inner:
            return text
        at = text.index(inner)
        return text[:at] + self.hide(inner) + text[at + len(inner) :]

    def hide_in(self, value: Any) -> Any:
        """A JSON value with every string in it hidden, keys too."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            words = {key: self.hide(key) for key in sorted(map(str, value))}  # templates that sort keys sort these
            return {words[str(key)]: self.hide_in(entry) for key, entry in value.items()}
        return [self.hide_in(entry) for entry in value] if isinstance(value, list) else value

    @staticmethod
    def seen(text: str) -> set[int]:
        """Numbers of the hidden texts that a rendering shows."""
        return {int(found[1]) for found in _WORD.finditer(text)}

    @staticmethod
    def end_of_last(text: str, numbers: range) -> int | None:
        """Where the last word of these ends in a rendering; None where none is shown."""
        ends = [found.end() for found in _WORD.finditer(text) if int(found[1]) in numbers]
        return ends[-1] if ends else None

    @staticmethod
    def forms(text: str, number: int) -> list[str]:
        """How a rendering writes a hidden text, each time it shows it: plain, json, ...; "" for a way that is not known."""
        return [_FORM_OF.get(found[2], "") for found in _WORD.finditer(text) if int(found[1]) == number]

    @staticmethod
    def anonymous(text: str) -> str:
        """The rendering with words numbered as they come: equal for two that differ only in what was hidden before."""
        order: dict[str, int] = {}
        return _WORD.sub(lambda found: f"\0{order.setdefault(found[1], len(order))}:{found[2]}\0", text)

    def pieces(self, text: str, special: SpecialText, header: str = "") -> list[Piece]:
        """A rendering as pieces; after each `header` of the template there is a BREAK, because what follows there was sampled on its own.

        Raises:
            RenderError: the template writes a text in a form that cannot be undone.
        """
        out: list[Piece] = []
        at = 0
        for found in _WORD.finditer(text):
            out += _broken(text[at : found.start()], special, header)
            form = _FORM_OF.get(found[2])
            if form is None:
                raise RenderError(f"the chat template writes a message's text as {found[2]!r}: neither plain nor JSON")
            out.append(_FORMS[form](self.texts[int(found[1])]))
            at = found.end()
        return [*out, *_broken(text[at:], special, header)]


def _broken(text: str, special: SpecialText, header: str) -> list[Piece]:
    if not header:
        return special.split(text)
    out: list[Piece] = []
    for number, part in enumerate(text.split(header)):
        out += [*special.split(header), BREAK, *special.split(part)] if number else special.split(part)
    return out
