"""What the trainer leaves for the reader: `steps/N.npz` and `steps/N.json` per step, and one line of `metrics.jsonl`.

The files of a step say for each row which advantage it had and what this trainer's log p was before the row's own update. One writer per
file. numpy only; a torch-free reader uses `read_step`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.server.types import TrainingSample
from palestra.trainer.durable import ASIDE
from palestra.trainer.types import F32, RowAdvantage, StepRecord


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One trained row of a step. The arrays speak of its tokens, in order; NaN where a token was not trained."""

    rollout_id: str
    attempt: int
    branch: int
    group_id: str
    advantage: RowAdvantage
    policy_logprobs: F32
    """[T] the trainer's log p at the row's own update, before it was applied."""
    ref_logprobs: F32 | None
    """[T] of the KL reference, where there is one."""


def row_record(sample: TrainingSample, advantage: RowAdvantage, policy: F32, reference: F32 | None) -> RowRecord:
    """A record of a row whose arrays may be padded and hold anything where nothing was trained."""
    on = sample.loss_mask.astype(bool)
    on[:1] = False
    n = len(on)

    def behind_mask(values: F32) -> F32:
        return np.where(on, values[:n], np.float32(np.nan)).astype(np.float32)

    ref = None if reference is None else behind_mask(reference)
    return RowRecord(
        sample.rollout_id, sample.attempt, sample.branch, sample.group_id, advantage, behind_mask(policy), ref
    )


def write_step(run_dir: Path, step: int, rows: Sequence[RowRecord]) -> None:
    """Writes `steps/N.npz` and then `steps/N.json`, each whole or not at all."""
    folder = run_dir / "steps"
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"offsets": np.cumsum([0] + [len(row.policy_logprobs) for row in rows])}
    empty = np.zeros(0, dtype=np.float32)
    arrays["policy_logprobs"] = np.concatenate([empty, *(row.policy_logprobs for row in rows)])
    if rows and all(row.ref_logprobs is not None for row in rows):
        arrays["ref_logprobs"] = np.concatenate([row.ref_logprobs for row in rows if row.ref_logprobs is not None])
    if any(row.advantage.tokens is not None for row in rows):
        arrays["advantages"] = np.concatenate([_of_tokens(row) for row in rows])
    aside = folder / f"{ASIDE}{step}.npz"
    np.savez(aside, **arrays)
    aside.rename(folder / f"{step}.npz")
    listed = [
        {
            "rollout_id": row.rollout_id,
            "attempt": row.attempt,
            "branch": row.branch,
            "group_id": row.group_id,
            "advantage": row.advantage.value,
            "baseline": row.advantage.baseline,
            "std": row.advantage.std,
        }
        for row in rows
    ]
    aside = folder / f"{ASIDE}{step}.json"
    aside.write_text(json.dumps({"train_step": step, "rows": listed}), encoding="utf-8")
    aside.rename(folder / f"{step}.json")


def _of_tokens(row: RowRecord) -> F32:
    """[T] the advantage of each token of a row."""
    if row.advantage.tokens is not None:
        return row.advantage.tokens
    return np.full(len(row.policy_logprobs), row.advantage.value, dtype=np.float32)


def read_step(run_dir: Path, step: int) -> list[RowRecord]:
    """The rows of a step.

    Raises:
        FileNotFoundError: there is no record of it.
    """
    folder = run_dir / "steps"
    told = json.loads((folder / f"{step}.json").read_text(encoding="utf-8"))
    out = []
    with np.load(folder / f"{step}.npz") as arrays:
        offsets, policy = arrays["offsets"], arrays["policy_logprobs"]
        reference, advantages = arrays.get("ref_logprobs"), arrays.get("advantages")
        for i, row in enumerate(told["rows"]):
            part = slice(int(offsets[i]), int(offsets[i + 1]))
            advantage = RowAdvantage(
                row["rollout_id"],
                row["branch"],
                row["advantage"],
                row["baseline"],
                row["std"],
                None if advantages is None else advantages[part],
            )
            ref = None if reference is None else reference[part]
            out.append(
                RowRecord(
                    row["rollout_id"], row["attempt"], row["branch"], row["group_id"], advantage, policy[part], ref
                )
            )
    return out


class MetricsFile:
    """Appends records to `metrics.jsonl`, each on the disk before `append` returns. A resumed run repeats the steps after its checkpoint;
    the last line of a step is the one that counts."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"

    def append(self, record: StepRecord) -> None:
        """Adds one line, with the time in seconds since 1970. Numbers that are not finite become null: JSON has no word for them."""
        line = json.dumps(
            {"time": time.time(), **{name: _plain(value) for name, value in record.items()}}, allow_nan=False
        )
        with self.path.open("ab+") as handle:
            if handle.tell() and not _ends_line(handle):
                handle.write(b"\n")  # a writer that was killed left half a line
            handle.write(line.encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())


def _plain(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _ends_line(handle: Any) -> bool:
    handle.seek(-1, os.SEEK_END)
    return bool(handle.read(1) == b"\n")
