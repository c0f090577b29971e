"""Corpora and retrievers by name, opened once per process.

A name comes in, as it stands in a configuration or on a command line; the thing itself comes out. It waits while an index is built.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from palestra.envs.search.corpus import Corpus, read_corpus
from palestra.envs.search.factbook import load_factbook
from palestra.envs.search.types import Retriever

NAMES = ("fts", "bm25", "dense", "hybrid")
HYBRID = "fts:1+dense:3"
"""What the name `hybrid` stands for. Vectors count more: equal weights gave most of their advantage back."""


def open_corpus(name: str, countries: tuple[str, ...] | None = None, glossary: bool = True) -> Corpus:
    """`factbook`, or the passages of a JSONL file.

    Raises:
        CorpusError: the file is broken, or the Factbook's package is not installed.
        ValueError: `countries` of another corpus than the Factbook.
    """
    if name == "factbook":
        return load_factbook(countries, glossary).corpus
    if countries is not None:
        raise ValueError(f"countries are the Factbook's; corpus {name!r} has none")
    changed = Path(name).stat().st_mtime_ns if Path(name).is_file() else 0
    return _read(name, changed)


@cache
def _read(path: str, changed: int) -> Corpus:
    return read_corpus(path)


def open_retriever(
    spec: str, corpus: str = "factbook", countries: tuple[str, ...] | None = None, glossary: bool = True
) -> Retriever:
    """A retriever over a corpus.

    `spec` is fts, bm25, dense or hybrid; or several of the first three with weights, `fts:1+dense:3`; or the URL of a server in search-r1's
    form, which searches what it has.

    Raises:
        ValueError: no such retriever.
        RetrieverError: a package or weights are missing.
    """
    if spec.startswith(("http://", "https://")):
        return _open_url(spec)
    return _open(spec, open_corpus(corpus, countries, glossary))


@cache
def _open_url(url: str) -> Retriever:
    from palestra.envs.search.http import HttpRetriever

    return HttpRetriever(url)


@cache
def _open(spec: str, corpus: Corpus) -> Retriever:
    """Corpora are compared by identity here, which is right: they are opened once too."""
    parts = [_part(part, spec) for part in (HYBRID if spec == "hybrid" else spec).split("+")]
    if len(parts) > 1:
        from palestra.envs.search.hybrid import HybridRetriever

        return HybridRetriever([(_open(name, corpus), weight) for name, weight in parts])
    match parts[0][0]:
        case "fts":
            from palestra.envs.search.fts import FtsRetriever

            return FtsRetriever(corpus)
        case "bm25":
            from palestra.envs.search.bm25 import Bm25Retriever

            return Bm25Retriever(corpus)
        case _:
            from palestra.envs.search.bert import load_minilm
            from palestra.envs.search.dense import DenseRetriever

            return DenseRetriever(corpus, load_minilm())


def _part(text: str, spec: str) -> tuple[str, float]:
    name, _, weight = text.strip().partition(":")
    try:
        number = float(weight or 1)
    except ValueError:
        number = 0.0
    if name not in ("fts", "bm25", "dense") or not 0 < number < 1e6:
        raise ValueError(
            f"no retriever {spec!r}: {', '.join(NAMES)}, a sum of them such as {HYBRID!r}, or the URL of a /retrieve server"
        )
    return name, number
