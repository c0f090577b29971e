"""How far the weights that train are from those that sampled, told apart by who sampled. Pure; numpy only.

In: per trained token the engine's log p ("sampled"), this trainer's before the step ("trained"), and the token's age in policy versions.
What the present version sampled (age 0) differs by the engine's arithmetic alone: `mismatch/engine/*`. What older ones sampled differs by
that and by what was learned since: `mismatch/stale/*`, and by age. Where a batch has several updates, the version before the first is still
held at the later ones (`old_logprobs`), and there both parts are told apart: `mismatch/held/*`. Out: metrics. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.server.types import TrainingSample
from palestra.trainer.batches import Packing
from palestra.trainer.types import F32, I64

F64 = NDArray[np.float64]

LARGEST = 20.0
"""Log ratios count as this at most before they are exponentiated, as in corrections."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
UNKNOWN = -1
"""Age of a token whose version nobody recorded."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Trained tokens, flat; all arrays have one length."""

    ages: I64
    """Policy versions; UNKNOWN where none is recorded."""
    trained: F64
    """log p under the weights before the step."""
    sampled: F64
    """log p under the engine's."""
    policy: F64
    """log p under the weights of the token's own update: `trained` in the first one."""


def token_ages(row: TrainingSample, version: int) -> I64:
    """[T] age of each token; versions of the future, after a restart with fewer steps, count as present."""
    out = np.full(len(row.token_ids), UNKNOWN, dtype=np.int64)
    for span in row.spans:
        out[span.start : span.end] = max(0, version - span.version)
    return out


def compared(packing: Packing, policy: F32, version: int, *, first: bool) -> Compared | None:
    """The tokens of a micro-batch with what its own update's forward pass gave, `policy` [B, S]. None where log p before the step is not
    known: at later updates without a correction."""
    old = policy if first else packing.batch.old_logprobs
    if old is None:
        return None
    ages = np.full(policy.shape, UNKNOWN, dtype=np.int64)
    for i, row in enumerate(packing.rows):
        if row.sample is not None:
            ages[i, : len(row.token_ids)] = token_ages(row.sample, version)
    on = packing.batch.weights != 0
    values = (old[on], packing.batch.rollout_logprobs[on], policy[on])
    trained, sampled, present = (each.astype(np.float64) for each in values)
    return Compared(ages[on], trained, sampled, present)


def mismatch_metrics(parts: Sequence[Compared], held: Sequence[Compared] = ()) -> dict[str, float]:
    """Of all tokens, by who sampled, and by age. `held`: those of `parts` that belong to later updates. Empty where there are no tokens."""
    ages, moved = _joined([part.ages for part in parts]), _joined([part.trained - part.sampled for part in parts])
    if not len(moved):
        return {}
    ratio = _exp(moved)
    out = {
        "mismatch/k1/mean": float(-moved.mean()),
        "mismatch/k3/mean": float((ratio - 1 - moved).mean()),
        "mismatch/ess/share": float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum())),
    }
    out |= {f"mismatch/ratio/{name}": float(np.quantile(ratio, at)) for name, at in QUANTILES.items()}
    out |= _of("mismatch/engine", moved[ages == 0])
    out |= _of("mismatch/stale", moved[ages > 0])
    for age in np.unique(ages[ages > 0]).astype(int).tolist():
        out |= _of(f"mismatch/stale/age_{age}", moved[ages == age])
    return out | _held(held)


def _of(name: str, moved: F64) -> dict[str, float]:
    """Figures of some tokens; none where there are none."""
    if not len(moved):
        return {}
    return {
        f"{name}/tokens/count": float(len(moved)),
        f"{name}/dlogp/mean": float(moved.mean()),
        f"{name}/abs_dlogp/mean": float(np.abs(moved).mean()),
        f"{name}/abs_dlogp/max": float(np.abs(moved).max()),
        f"{name}/k3/mean": float((_exp(moved) - 1 - moved).mean()),
    }


def _held(parts: Sequence[Compared]) -> dict[str, float]:
    """Of fresh tokens at later updates: policy - sampled is policy - trained (learned) and trained - sampled (the engine's part)."""
    fresh = [part.ages == 0 for part in parts]
    total = _joined([(part.policy - part.sampled)[on] for part, on in zip(parts, fresh, strict=True)])
    if not len(total):
        return {}
    learned = _joined([(part.policy - part.trained)[on] for part, on in zip(parts, fresh, strict=True)])
    engine = _joined([(part.trained - part.sampled)[on] for part, on in zip(parts, fresh, strict=True)])
    return {
        "mismatch/held/dlogp/mean": float(total.mean()),
        "mismatch/held/stale/mean": float(learned.mean()),
        "mismatch/held/engine/mean": float(engine.mean()),
    }


def _joined(arrays: Sequence[NDArray[np.float64] | I64]) -> F64:
    return np.concatenate([np.zeros(0), *arrays])


def _exp(moved: F64) -> F64:
    return np.exp(np.clip(moved, -LARGEST, LARGEST))
