"""Bending a distribution: one row of logits and a request's wishes in, the weights that its token is drawn by out. Waits for nothing.

The order is SGLang's: penalties and bias on the logits, then the temperature, softmax, and the filters top_k, top_p and min_p, all three
judged by the probabilities before any of them. Only rows that wish for it come here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from palestra.server.embedded.types import Shaping

HEAD = 1024
"""top_p ranks so many tokens first: most nuclei end there, and ranking a whole vocabulary costs milliseconds."""


def weights(logits: torch.Tensor, temperature: float, shaping: Shaping, sampled: Sequence[int]) -> torch.Tensor:
    """[vocabulary] fp32 logits -> [vocabulary] weights, 0 for what cannot be drawn.

    `sampled` is the completion so far; temperature 0 is greedy.
    """
    bent = bend(logits, shaping, sampled)
    if temperature == 0:
        return torch.zeros_like(bent).index_fill_(0, bent.argmax(), 1.0)
    return cut((bent / temperature).softmax(-1), shaping)


def bend(logits: torch.Tensor, shaping: Shaping, sampled: Sequence[int]) -> torch.Tensor:
    """A copy of the logits with penalties and bias. The prompt's tokens are not penalised, as in SGLang."""
    bent = logits.clone()
    penalties = (shaping.frequency_penalty, shaping.presence_penalty, shaping.repetition_penalty)
    if sampled and penalties != (0.0, 0.0, 1.0):
        # Counted anew at every token, so a retract cannot lose a count.
        counted = Counter(sampled)
        ids = torch.tensor(list(counted))
        counts = torch.tensor(list(counted.values()), dtype=bent.dtype)
        seen = bent[ids] - shaping.frequency_penalty * counts - shaping.presence_penalty
        bent[ids] = torch.where(seen < 0, seen * shaping.repetition_penalty, seen / shaping.repetition_penalty)
    if len(sampled) < shaping.min_new_tokens:
        bent[list(shaping.held_ids)] = float("-inf")
    if shaping.logit_bias:
        biased, values = zip(*shaping.logit_bias, strict=True)
        bent[list(biased)] += torch.tensor(values)
    return bent


def cut(probs: torch.Tensor, shaping: Shaping) -> torch.Tensor:
    """Probabilities with those that a filter drops set to 0; the others are as they were. The likeliest token always stays."""
    size = probs.shape[-1]
    if 0 < shaping.top_k < size:
        return _ranked(probs, shaping, shaping.top_k)[0]
    if shaping.top_p < 1:
        kept, mass = _ranked(probs, shaping, min(HEAD, size))
        return kept if mass > shaping.top_p else _ranked(probs, shaping, size)[0]
    return probs.where(probs >= probs.max() * shaping.min_p, 0.0)


def _ranked(probs: torch.Tensor, shaping: Shaping, count: int) -> tuple[torch.Tensor, float]:
    """What the filters leave of the `count` likeliest tokens, and the mass of all of those."""
    ranked, ids = probs.topk(count)
    cumulated = ranked.cumsum(-1, dtype=torch.float64)
    dropped = (cumulated - ranked > shaping.top_p) | (ranked < ranked[0] * shaping.min_p)
    return torch.zeros_like(probs).scatter_(0, ids, ranked.masked_fill(dropped, 0.0)), float(cumulated[-1])
