"""Searching by meaning: passages and queries become vectors, and the nearest ones are found.

A corpus and an `Encoder` go in. The vectors are computed once into the cache, as float16 (25 MB for 33,000 passages of 384 numbers), and
read from there by any number of processes. That first time takes as long as the encoder does; it says how far it is in the log.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy

from palestra.envs.search.corpus import Corpus, cached_file, digest_of
from palestra.envs.search.fts import bounded
from palestra.envs.search.text import MOST_CHARACTERS
from palestra.envs.search.types import Encoder, Floats, Hit, RetrieverError

logger = logging.getLogger(__name__)

FORM = 1
"""Of the file; another one gets another name."""
BATCH = 32
"""Texts that are encoded at a time."""
BLOCK = 8_192
"""Rows that are multiplied at a time: bounds the memory that float16 takes when it is widened."""


class DenseRetriever:
    """Scores a passage by the cosine between its vector and the query's."""

    def __init__(self, corpus: Corpus, encoder: Encoder, folder: Path | None = None) -> None:
        """Computes the vectors where the cache (or `folder`) has none.

        Raises:
            RetrieverError: the cached file is broken.
        """
        self._passages, self._encoder = corpus.passages, encoder
        name = f"dense-{digest_of(FORM, corpus.digest, encoder.name)}.npy"
        path = cached_file(name, lambda aside: _build(aside, corpus, encoder), folder)
        try:
            self._rows: Floats = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise RetrieverError(f"{path}: {error}; remove the file to have it built again") from error
        if self._rows.ndim != 2 or len(self._rows) != len(corpus):
            raise RetrieverError(
                f"{path}: it does not hold a vector per passage; remove the file to have it built again"
            )

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """See `Retriever`."""
        if not query.strip():
            return []
        (wanted,) = self._encoder.encode([query[:MOST_CHARACTERS]])
        if not wanted.any():
            return []
        blocks = (self._rows[start : start + BLOCK] for start in range(0, len(self._rows), BLOCK))
        scores = numpy.concatenate([block.astype(numpy.float32) @ wanted for block in blocks])
        best = numpy.argsort(-scores, kind="stable")[: bounded(k)]
        hits = ((self._passages[place], float(scores[place])) for place in best)
        return [Hit(passage.id, passage.title, passage.text, score) for passage, score in hits]


def _build(path: Path, corpus: Corpus, encoder: Encoder) -> None:
    texts = [f"{passage.title}\n{passage.text}" for passage in corpus]
    # Texts of like length share a batch: a batch costs what its longest text does.
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    rows: Floats = None
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        vectors = encoder.encode([texts[place] for place in places])
        if rows is None:
            rows = numpy.zeros((len(texts), vectors.shape[1]), numpy.float16)
        rows[places] = vectors
        if start % (BATCH * 64) == 0:
            logger.info("%s: %d of %d passages have vectors", corpus.name, start, len(texts))
    with path.open("wb") as file:
        numpy.save(file, rows, allow_pickle=False)
