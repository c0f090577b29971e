"""One dumped batch trained again from the checkpoint that it was trained from, and compared with what was recorded then.

In: a dumped batch, the run's checkpoints, and its records of the step. Out: figures, and where they differ. It writes nothing. On one CPU
with the same number of threads the same arithmetic gives the same bits; anything else is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.trainer.checkpoints import Checkpoint, Checkpoints, model_fingerprint
from palestra.trainer.dumps import Batch, DumpError, batch_path, check_origin, read_batch
from palestra.trainer.records import RowRecord
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import StepResult, train_batch
from palestra.trainer.types import Backend

TIMED = frozenset({"train/tokens_per_s"})
"""Figures that depend on the clock."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What training a batch again gave."""

    batch: Batch
    checkpoint: str
    """From which it went on."""
    result: StepResult


def replay(settings: TrainerSettings, backend: Backend, run_dir: Path, run: str, path: Path) -> Replayed:
    """Loads the newest checkpoint before the batch's step from which dumped batches lead to it, and trains them. `run` is the name of the
    run that `run_dir` belongs to.

    Raises:
        DumpError: the batch was never trained, or is of another run, model or lineage; or no checkpoint leads to it.
        CheckpointError: the checkpoint is damaged.
    """
    batch, fingerprint = read_batch(path), model_fingerprint(settings.model)
    check_origin(batch, path, fingerprint)
    origin = batch.origin
    if origin.run != run:
        raise DumpError(
            f"{path}: a batch of run {origin.run!r}, this is {run!r}; give the run.toml of the run that dumped it"
        )
    if not origin.trained:
        raise DumpError(
            f"{path}: run {origin.run!r} only played this batch, so there is nothing to repeat; use --train-only"
        )
    checkpoints = Checkpoints(run_dir / "checkpoints")
    checkpoint = _start(checkpoints.all(), path, origin.step)
    checkpoints.load(backend, checkpoint, fingerprint)
    done, result = checkpoint.meta.optimizer_steps, None
    for step in range(checkpoint.meta.train_step + 1, origin.step + 1):
        file = path if step == origin.step else batch_path(path.parent, step)
        result = _train(settings, backend, file, done)
        done += result.optimizer_steps
    assert result is not None, "the checkpoint is of an earlier step"
    return Replayed(batch, checkpoint.id, result)


def _train(settings: TrainerSettings, backend: Backend, file: Path, done: int) -> StepResult:
    batch = read_batch(file)
    if batch.origin.optimizer_steps != done:
        raise DumpError(
            f"{file}: trained after {batch.origin.optimizer_steps} optimizer steps, but these checkpoints and batches lead to {done}: "
            f"they are of another lineage (a run that was restored and went on otherwise)"
        )
    version = batch.origin.policy_version
    return train_batch(backend, batch.groups, settings, policy_version=version, optimizer_steps=done)


def _start(found: Sequence[Checkpoint], path: Path, step: int) -> Checkpoint:
    for checkpoint in reversed(found):
        first = checkpoint.meta.train_step + 1
        if first <= step and all(batch_path(path.parent, each).is_file() for each in range(first, step)):
            return checkpoint
    have = ", ".join(checkpoint.id for checkpoint in found) or "none"
    raise DumpError(
        f"{path}: no checkpoint leads to step {step} (there are: {have}); it takes that of step {step - 1}, or an earlier one "
        f"with the batches in between; keep more with run.save_every and run.keep_checkpoints"
    )


def differences(result: StepResult, recorded: Mapping[str, Any], rows: Sequence[RowRecord]) -> list[str]:
    """A line for each figure, and for each row's logprobs, that is not what was recorded, bit for bit."""
    out = []
    for name, value in sorted(result.metrics.items()):
        now = value if math.isfinite(value) else None  # as metrics.jsonl writes it
        if name not in TIMED and (name not in recorded or recorded[name] != now):
            out.append(f"{name}: {recorded.get(name, 'not recorded')!r} then, {now!r} in the replay")
    then = {_name(row): row for row in rows}
    again = {_name(row): row for row in result.records}
    if then.keys() != again.keys():
        out.append(
            f"rows: {len(then)} were trained then, {len(again)} in the replay, {len(then.keys() & again.keys())} in both"
        )
    for row in sorted(then.keys() & again.keys()):
        old, new = then[row].policy_logprobs, again[row].policy_logprobs
        if not np.array_equal(old, new, equal_nan=True):
            far = float(np.nanmax(np.abs(old - new))) if old.shape == new.shape else math.nan
            out.append(f"logprobs of {row[0]} branch {row[2]}: at most {far:.3g} apart")
    return out


def _name(row: RowRecord) -> tuple[str, int, int]:
    return row.rollout_id, row.attempt, row.branch
