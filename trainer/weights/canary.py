"""The last proof of a publish: trainer and engines compute the same logprobs of a short text.

In: a backend. Out: ids and the trainer's logprobs of them, for the service to compare with every engine's own.
"""

from __future__ import annotations

import numpy as np

from palestra.trainer.types import Backend, MicroBatch

LENGTH = 16


def canary_ids(vocab_size: int) -> list[int]:
    """The same ids every time, spread over the vocabulary: a tensor that is only half right shows."""
    return [(i * 7919 + 13) % vocab_size for i in range(LENGTH)]


def canary_logprobs(backend: Backend, ids: list[int]) -> list[float]:
    """The trainer's logprobs of all ids but the first, at temperature 1."""
    weights = np.ones((1, len(ids)), dtype=np.float32)
    weights[0, 0] = 0.0
    nothing = np.zeros_like(weights)
    batch = MicroBatch(
        token_ids=np.array([ids], dtype=np.int64),
        lengths=np.array([len(ids)], dtype=np.int64),
        weights=weights,
        rollout_logprobs=nothing,
        advantages=nothing,
        temperature=np.ones(1, dtype=np.float32),
    )
    return [float(value) for value in backend.logprobs([batch])[0][0, 1:]]
