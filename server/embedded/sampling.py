"""Drawing tokens: logits and the requests' wishes in, ids and their log probabilities out. Waits for nothing.

A draw is the inverse of the cumulative distribution at one uniform number, which is a function of the request's seed
and the token's position. So draws are reproducible, and a request that is taken up again after a retract or an abort
draws what it would have drawn.

Logprobs are always those of the model: log softmax(logits / temperature) in fp32 over the whole vocabulary, whatever filters, penalties or
bias the draw went through. Filters leave SGLang's logprobs alone as well; its penalties and bias show in them, here they do not, so that a
trainer can recompute every logprob from the ids and the temperature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from palestra.server.embedded.shaping import weights
from palestra.server.embedded.types import Shaping

Top = tuple[tuple[float, int], ...]
"""(logprob, id) of the likeliest tokens at one place, best first."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How one row is sampled."""

    temperature: float
    uniform: float
    """In [0, 1)."""
    forced: int = -1
    """An id to emit instead of a drawn one; -1: draw."""
    top: int = 0
    """Likeliest tokens to report."""
    shaping: Shaping | None = None
    """None: the model's own distribution."""
    sampled: Sequence[int] = ()
    """The completion so far, for shaping."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step's draws, a row each."""

    ids: list[int]
    logprobs: list[float]
    """Of the ids."""
    tops: list[Top]
    """Of the same distribution; () where none were asked for."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, wishes: Sequence[Wish]) -> Drawn:
    """[rows, vocabulary] logits -> one id per row, with its logprob.

    Raises:
        ValueError: the model gave a logprob that is not finite.
    """
    temperature = torch.tensor([wish.temperature or 1.0 for wish in wishes])
    logprobs = (logits.float() / temperature[:, None]).log_softmax(-1)
    mass = logprobs.exp()
    for row, wish in enumerate(wishes):
        if wish.shaping is not None:
            mass[row] = weights(logits[row].float(), wish.temperature, wish.shaping, wish.sampled)
    # Cumulated in fp64: in fp32 the rounding of a large vocabulary swallows rare tokens.
    cumulated = mass.cumsum(-1, dtype=torch.float64)
    at = torch.tensor([wish.uniform for wish in wishes], dtype=torch.float64)[:, None] * cumulated[:, -1:]
    ids = torch.searchsorted(cumulated, at, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    greedy = [wish.temperature == 0 and wish.shaping is None for wish in wishes]
    if any(greedy):
        ids = torch.where(torch.tensor(greedy), logprobs.argmax(-1), ids)
    if any(wish.forced >= 0 for wish in wishes):
        forced = torch.tensor([wish.forced for wish in wishes])
        ids = torch.where(forced >= 0, forced, ids)
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    if not torch.isfinite(chosen).all():
        raise ValueError("the model gave a logprob that is not finite")
    return Drawn(ids.tolist(), chosen.tolist(), _tops(logprobs, [wish.top for wish in wishes]))


def _tops(logprobs: torch.Tensor, counts: list[int]) -> list[Top]:
    tops: list[Top] = [()] * len(counts)
    if not any(counts):
        return tops
    rows = [row for row, count in enumerate(counts) if count]
    best, ids = logprobs[rows].topk(min(max(counts), logprobs.shape[-1]))
    # JSON has no infinity.
    best.clamp_(min=torch.finfo(best.dtype).min)
    for row, values, tokens in zip(rows, best.tolist(), ids.tolist(), strict=True):
        tops[row] = tuple(zip(values, tokens, strict=True))[: counts[row]]
    return tops
