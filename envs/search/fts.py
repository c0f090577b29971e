"""The default retriever: SQLite's full text search, one file, no package.

A corpus goes in; its index is built once into the cache and then only read, by any number of threads and processes. A query's words are
quoted one by one, so no text is ever taken for the syntax of FTS5.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from palestra.envs.search.corpus import Corpus, cached_file, digest_of
from palestra.envs.search.text import query_words
from palestra.envs.search.types import MOST_HITS, Hit, Passage, RetrieverError

FORM = 1
"""Of the file; another one gets another name."""
WEIGHTS = (8.0, 1.0, 8.0)
"""Of title, text and keywords. Texts are short and do not name what they are about, titles do."""
_SEARCH = "select rowid, bm25(found, ?, ?, ?) as cost from found where found match ? order by cost, rowid limit ?"
_SCHEMA = """
create table passages (place integer primary key, id text not null, title text not null, body text not null, keywords text not null);
create virtual table found using fts5(title, body, keywords, content='passages', content_rowid='place',
                                      tokenize='porter unicode61 remove_diacritics 2');
"""


class FtsRetriever:
    """Searches by words, stemmed, weighed by BM25. `weights`: of title, text and keywords."""

    def __init__(self, corpus: Corpus, weights: Sequence[float] = WEIGHTS, folder: Path | None = None) -> None:
        """Builds the index where the cache (or `folder`) has none.

        Raises:
            ValueError: `weights` are not three numbers of at least 0.
        """
        if len(weights) != 3 or any(not weight >= 0 for weight in weights):
            raise ValueError(f"weights are three numbers, of title, text and keywords, got {weights!r}")
        self._weights = tuple(float(weight) for weight in weights)
        name = f"fts-{digest_of(FORM, corpus.digest)}.db"
        self._path = cached_file(name, lambda path: _build(path, corpus.passages), folder)
        self._local = threading.local()

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """See `Retriever`."""
        wanted = " OR ".join(f'"{word}"' for word in query_words(query))
        if not wanted:
            return []
        try:
            ranked = self._connection().execute(_SEARCH, (*self._weights, wanted, bounded(k))).fetchall()
            return [self._hit(place, -cost) for place, cost in ranked]
        except sqlite3.Error as error:
            raise RetrieverError(f"{self._path}: {error}; remove the file to have it built again") from error

    def _hit(self, place: int, score: float) -> Hit:
        found = self._connection().execute("select id, title, body from passages where place = ?", (place,)).fetchone()
        identity, title, text = found
        return Hit(identity, title, text, score)

    def _connection(self) -> sqlite3.Connection:
        """The calling thread's own: a shared one would serve one search at a time. A forked child opens its own as well."""
        opened: tuple[int, sqlite3.Connection] | None = getattr(self._local, "opened", None)
        if opened is None or opened[0] != os.getpid():
            uri = f"{self._path.absolute().as_uri()}?mode=ro&immutable=1"
            opened = self._local.opened = (os.getpid(), sqlite3.connect(uri, uri=True))
        return opened[1]


def bounded(k: int) -> int:
    """A number of hits that there can be."""
    return max(1, min(int(k), MOST_HITS))


def _build(path: Path, passages: Sequence[Passage]) -> None:
    rows = (
        (place, passage.id, passage.title, passage.text, passage.keywords) for place, passage in enumerate(passages)
    )
    database = sqlite3.connect(path)
    try:
        database.executescript(f"pragma journal_mode = off; {_SCHEMA}")
        database.executemany("insert into passages values (?, ?, ?, ?, ?)", rows)
        database.execute("insert into found(found) values ('rebuild')")
        database.execute("insert into found(found) values ('optimize')")
        database.commit()
    finally:
        database.close()
