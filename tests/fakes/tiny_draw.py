"""Drawing one token in numpy: a row of logits and a request's wishes in, the id, its logprob and the likeliest ids out.

As the contract has it: penalties and bias on the logits, the temperature, then the filters, each judged by the probabilities before all of
them; the logprobs that are reported know nothing of any of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palestra.server.embedded.types import GenerateCall, Shaping
from tests.fakes.tiny_model import log_softmax

Row = NDArray[np.float64]
Top = tuple[tuple[float, int], ...]


def draw(row: Row, call: GenerateCall, sampled: Sequence[int]) -> tuple[int, float, Top]:
    """(id, logprob, likeliest) after the completion so far. The draw is a function of the request's seed and the place."""
    logprobs = log_softmax(row / (call.temperature or 1.0))
    bent = row if call.shaping is None else bend(row, call.shaping, sampled)
    if call.temperature == 0:
        token = int(bent.argmax())
    else:
        mass = np.exp(log_softmax(bent / call.temperature))
        if call.shaping is not None:
            mass = cut(mass, call.shaping)
        cumulated = mass.cumsum()
        at = random.Random(f"{call.seed} {len(call.prompt) + len(sampled)}").random() * cumulated[-1]
        token = int(np.searchsorted(cumulated, at, side="right"))
    best = np.argsort(-logprobs, kind="stable")[: call.top_logprobs]
    return token, float(logprobs[token]), tuple((float(logprobs[i]), int(i)) for i in best)


def bend(row: Row, wish: Shaping, sampled: Sequence[int]) -> Row:
    """A copy of the logits with penalties, bias, and stop ids held back."""
    bent = row.copy()
    for token in set(sampled):
        bent[token] -= wish.frequency_penalty * sampled.count(token) + wish.presence_penalty
        bent[token] *= wish.repetition_penalty if bent[token] < 0 else 1 / wish.repetition_penalty
    if len(sampled) < wish.min_new_tokens:
        bent[list(wish.held_ids)] = -np.inf
    for token, bias in wish.logit_bias:
        bent[token] += bias
    return bent


def cut(mass: Row, wish: Shaping) -> Row:
    """Probabilities, 0 where a filter drops the id."""
    order = np.argsort(-mass, kind="stable")
    ranked = mass[order]
    kept = (ranked.cumsum() - ranked <= wish.top_p) & (ranked >= ranked[0] * wish.min_p)
    if wish.top_k > 0:
        kept[wish.top_k :] = False
    result = np.zeros_like(mass)
    result[order[kept]] = ranked[kept]
    return result
