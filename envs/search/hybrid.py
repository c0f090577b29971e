"""Several retrievers as one: their rankings are fused, weighed (reciprocal rank fusion, Cormack et al. 2009).

Fusing is not safe by itself: a list of near misses from the right country can outvote the right answer of another list. Weights should be
measured on questions of one's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.envs.search.fts import bounded
from palestra.envs.search.types import Hit, Retriever

DEPTH = 50
"""Hits of each list that are looked at."""
CONSTANT = 60.0
"""How little the first place counts more than the next ones; the value of the paper."""


class HybridRetriever:
    """Scores a passage by the sum of weight / (constant + rank) over the lists that it is in."""

    def __init__(
        self, parts: Sequence[tuple[Retriever, float]], depth: int = DEPTH, constant: float = CONSTANT
    ) -> None:
        """`parts`: retrievers of one corpus with their weights.

        Raises:
            ValueError: there is none, or a weight, the depth or the constant is not above 0.
        """
        if not parts or any(not weight > 0 for _, weight in parts) or depth < 1 or not constant > 0:
            raise ValueError(
                "a hybrid needs retrievers with weights above 0, a depth of at least 1 and a constant above 0"
            )
        self._parts, self._depth, self._constant = tuple(parts), depth, constant

    def search(self, query: str, k: int = 5) -> list[Hit]:
        """See `Retriever`; a passage that only one list has is found too."""
        scores: dict[str, float] = {}
        found: dict[str, Hit] = {}
        for retriever, weight in self._parts:
            for rank, hit in enumerate(retriever.search(query, max(self._depth, bounded(k))), 1):
                scores[hit.id] = scores.get(hit.id, 0.0) + weight / (self._constant + rank)
                found.setdefault(hit.id, hit)
        best = sorted(found, key=lambda identity: -scores[identity])[: bounded(k)]
        return [Hit(identity, found[identity].title, found[identity].text, scores[identity]) for identity in best]
