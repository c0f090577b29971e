"""Drawing tokens: logits and the requests' wishes in, ids and their log probabilities out. Waits for nothing.

A draw is the inverse of the cumulative distribution at one uniform number, which is a function of the request's seed
and the token's position. So draws are reproducible, and a request that is taken up again after a retract or an abort
draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Wish:
    """How one row is sampled."""

    temperature: float
    uniform: float
    """In [0, 1)."""
    forced: int = -1
    """An id to emit instead of a drawn one; -1: draw."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, wishes: Sequence[Wish]) -> tuple[list[int], list[float]]:
    """[rows, vocabulary] logits -> one id per row, and its log softmax(logits / temperature) in fp32 over the whole vocabulary.

    Raises:
        ValueError: the model gave a logprob that is not finite.
    """
    temperature = torch.tensor([wish.temperature or 1.0 for wish in wishes])
    logprobs = (logits.float() / temperature[:, None]).log_softmax(-1)
    # Cumulated in fp64: in fp32 the rounding of a large vocabulary swallows rare tokens.
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    at = torch.tensor([wish.uniform for wish in wishes], dtype=torch.float64)[:, None] * cumulated[:, -1:]
    ids = torch.searchsorted(cumulated, at, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if any(wish.temperature == 0 for wish in wishes):
        greedy = torch.tensor([wish.temperature == 0 for wish in wishes])
        ids = torch.where(greedy, logprobs.argmax(-1), ids)
    if any(wish.forced >= 0 for wish in wishes):
        forced = torch.tensor([wish.forced for wish in wishes])
        ids = torch.where(forced >= 0, forced, ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    if not torch.isfinite(chosen).all():
        raise ValueError("the model gave a logprob that is not finite")
    return ids.tolist(), chosen.tolist()
