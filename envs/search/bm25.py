"""Searching by words in memory, with the package bm25s: quicker than SQLite, at the price of an index per process.

A corpus goes in and is indexed at construction (seconds for tens of thousands of passages); queries are answered by any thread.
"""

from __future__ import annotations

import importlib
from typing import Any

from palestra.envs.search.corpus import Corpus
from palestra.envs.search.fts import bounded
from palestra.envs.search.text import query_words, words
from palestra.envs.search.types import Hit, RetrieverError

TITLE_WEIGHT = 3
KEYWORD_WEIGHT = 3
"""How often titles and keywords are counted: the package knows one text per passage."""


class Bm25Retriever:
    """BM25 over words, without stemming but for a plural's s."""

    def __init__(self, corpus: Corpus, title_weight: int = TITLE_WEIGHT, keyword_weight: int = KEYWORD_WEIGHT) -> None:
        """Indexes the corpus.

        Raises:
            RetrieverError: the package is not installed.
            ValueError: a weight is no whole number of at least 0.
        """
        if any(
            isinstance(weight, bool) or not isinstance(weight, int) or weight < 0
            for weight in (title_weight, keyword_weight)
        ):
            raise ValueError("the weights of titles and keywords are whole numbers of at least 0")
        try:
            bm25s: Any = importlib.import_module("bm25s")
        except ImportError as error:
            raise RetrieverError("retriever 'bm25' needs a package: pip install 'palestra[search]'") from error
        self._passages = corpus.passages
        known: dict[str, int] = {}
        indexed = [
            [
                known.setdefault(_stem(word), len(known))
                for word in words(
                    " ".join((*[passage.title] * title_weight, passage.text, *[passage.keywords] * keyword_weight))
                )
            ]
            for passage in self._passages
        ]
        self._known = known
        self._index: Any = bm25s.BM25()
        self._index.index((indexed, known), show_progress=False)

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """See `Retriever`."""
        import numpy

        wanted = list(
            dict.fromkeys(self._known[stem] for word in query_words(query) if (stem := _stem(word)) in self._known)
        )
        if not wanted:
            return []
        scores = self._index.get_scores_from_ids(wanted)
        found = numpy.flatnonzero(scores > 0)
        best = found[numpy.argsort(-scores[found], kind="stable")[: bounded(k)]]
        hits = ((self._passages[place], float(scores[place])) for place in best)
        return [Hit(passage.id, passage.title, passage.text, score) for passage, score in hits]


def _stem(word: str) -> str:
    """Without a plural's s, so that `language` finds `Languages`."""
    if len(word) > 4 and word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
