"""Words of searching: what is searched, what is found, and who finds it.

A query goes into a `Retriever`, `Hit`s come out, best first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Floats: TypeAlias = Any
"""A numpy array of floats. Named so that importing these words does not import numpy."""

MOST_HITS = 100
"""Most hits of one search, whatever was asked for."""


class RetrieverError(Exception):
    """A retriever that cannot search: its server does not answer, a package or its weights are missing. Never the fault of a query."""


class CorpusError(ValueError):
    """A corpus that cannot be used: says which file, which line and why."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One text that can be found."""

    id: str
    """Unique within its corpus; without brackets and line ends, since answers cite it as [id]."""
    title: str
    text: str
    keywords: str = ""
    """Further words that it can be found by, such as other names of what it is about. Never shown."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage that was found."""

    id: str
    title: str
    text: str
    score: float | None = None
    """Higher is better; comparable within one search only. None where the server of an HTTP retriever gives none."""


class Retriever(Protocol):
    """Finds passages. Thread-safe."""

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """The best `k` passages (1 to MOST_HITS, moved into that range), best first, ties by the order of the corpus. Any text is a query;
        one without a word that can be searched for finds nothing.

        Raises:
            RetrieverError: the search could not be done.
        """


class Encoder(Protocol):
    """Turns texts into vectors."""

    @property
    def name(self) -> str:
        """Names the encoder and its weights: an index that another one built is not used."""

    def encode(self, texts: list[str]) -> Floats:
        """One row per text, float32, of length 1 (or 0 where a text has nothing that it knows)."""
