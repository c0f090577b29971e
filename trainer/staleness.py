"""How old tokens are when they are trained, and what their age makes of their weight. Pure; numpy only.

Age counts policy versions, which are optimizer steps: 0 is a token that the present weights sampled. In: rows, and the version of the
weights that are trained. Out: metrics, and weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from palestra.server.types import TrainingSample
from palestra.trainer.types import F32

SMALLEST = 1e-9
"""No weight falls below it by age: a weight of 0 would say that the token is masked, and take it out of all counts."""


def trained_spans(row: TrainingSample, version: int) -> Iterator[tuple[int, int]]:
    """(age, how many trained tokens) of each span that has any."""
    for span in row.spans:
        if count := int(row.loss_mask[span.start : span.end].sum()):
            yield max(0, version - span.version), count


def age_weights(row: TrainingSample, version: int, decay: float) -> F32:
    """[T] decay ** age of each token; 1 where no version is known."""
    out = np.ones(len(row.token_ids), dtype=np.float32)
    for span in row.spans:
        out[span.start : span.end] = max(decay ** max(0, version - span.version), SMALLEST)
    return out


def age_metrics(rows: Iterable[TrainingSample], version: int) -> dict[str, float]:
    """By token: mean, largest, and the share of each age. By rollout, whose age is that of its oldest trained token: least, mean, largest,
    and the share of those that several versions sampled."""
    tokens: Counter[int] = Counter()
    rollouts: dict[tuple[str, int], set[int]] = {}
    for row in rows:
        for age, count in trained_spans(row, version):
            tokens[age] += count
            rollouts.setdefault((row.rollout_id, row.attempt), set()).add(age)
    total = tokens.total()
    out = {
        "staleness/mean": sum(age * count for age, count in tokens.items()) / total if total else 0.0,
        "staleness/max": float(max(tokens, default=0)),
    }
    if not total:
        return out
    oldest = [max(ages) for ages in rollouts.values()]
    return {
        **out,
        **{f"staleness/age_{age}/share": count / total for age, count in sorted(tokens.items())},
        "staleness/rollout/min": float(min(oldest)),
        "staleness/rollout/mean": float(np.mean(oldest)),
        "staleness/rollout/max": float(max(oldest)),
        "staleness/rollout/mixed_share": sum(len(ages) > 1 for ages in rollouts.values()) / len(rollouts),
    }
