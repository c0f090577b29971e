"""What is searched: passages in memory, by their order and by their ids, and the folder where indexes of them are kept.

A JSONL file or a list of passages goes in. An index is built once for what its corpus holds, under a name that says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from palestra.envs.search.text import one_line
from palestra.envs.search.types import CorpusError, Passage

KEYS = frozenset({"id", "title", "text", "keywords"})


class Corpus:
    """Passages in a fixed order."""

    def __init__(self, passages: Iterable[Passage], name: str) -> None:
        """`name`: what people call it, for messages.

        Raises:
            CorpusError: there are none, two have one id, an id cannot be cited, or a text cannot be written as UTF-8.
        """
        self.name = name
        self.passages = tuple(passages)
        self._places: dict[str, int] = {}
        for place, passage in enumerate(self.passages):
            if not citable(passage.id):
                raise CorpusError(
                    f"{name}: id {passage.id!r} cannot be cited as [id]: no brackets, no line ends, 1 to 200 characters"
                )
            if not _writable(passage):
                raise CorpusError(
                    f"{name}: passage {passage.id!r} has half of a surrogate pair, which no index or reply can hold"
                )
            if self._places.setdefault(passage.id, place) != place:
                raise CorpusError(f"{name}: id {passage.id!r} is used twice")
        if not self.passages:
            raise CorpusError(f"{name}: no passages in it")

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self.passages)

    def get(self, identity: str) -> Passage | None:
        """The passage with that id."""
        place = self._places.get(identity)
        return None if place is None else self.passages[place]

    @cached_property
    def digest(self) -> str:
        """Of everything that it holds: equal corpora have equal ones."""
        whole = hashlib.blake2b(digest_size=16)
        for passage in self.passages:
            for part in (passage.id, passage.title, passage.text, passage.keywords):
                whole.update(f"{len(part)}:{part}".encode())
        return whole.hexdigest()


def _writable(passage: Passage) -> bool:
    try:
        f"{passage.id}{passage.title}{passage.text}{passage.keywords}".encode()
    except UnicodeEncodeError:
        return False
    return True


def citable(identity: str) -> bool:
    """Whether an answer can name it as [id]."""
    return 0 < len(identity) <= 200 and one_line(identity) == identity and not set("[]") & set(identity)


def read_corpus(path: str | Path) -> Corpus:
    """Reads a JSONL file: {"id", "title", "text"} a line, and "keywords" where there are further words to find a passage by.

    Records end at a line feed and at nothing else.

    Raises:
        CorpusError: the file is missing, empty or not UTF-8, or a line is broken: says which and why.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error
    return Corpus(
        (_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()), str(path)
    )


def _read_line(line: bytes, where: str) -> Passage:
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise CorpusError(f"{where}: a passage is a JSON object, got {type(value).__name__}")
    if unknown := sorted(value.keys() - KEYS):
        raise CorpusError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    if missing := [key for key in ("id", "title", "text") if not isinstance(value.get(key), str)]:
        raise CorpusError(f"{where}: {missing[0]!r} must be a text")
    if not isinstance(value.get("keywords", ""), str):
        raise CorpusError(f"{where}: 'keywords' must be a text")
    return Passage(**value)


def cache_folder() -> Path:
    """Where indexes are kept: `palestra/search` of the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palestra" / "search"


def cached_file(name: str, build: Callable[[Path], None], folder: Path | None = None) -> Path:
    """The file `name` of the cache; `build` writes it where it is not there yet.

    It is written beside its place and renamed: processes that build it at once do so twice, and each sees a whole one.
    """
    place = (cache_folder() if folder is None else folder) / name
    if place.is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=place.parent)
    os.close(handle)
    try:
        build(Path(aside))
        os.replace(aside, place)
    finally:
        Path(aside).unlink(missing_ok=True)
    return place


def digest_of(*parts: object) -> str:
    """A short name for whatever an index depends on."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=10).hexdigest()
