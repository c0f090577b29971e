"""The two halves of a run without each other: playing without training, and training without engines.

In: a run's parts. Out: those that `Trainer` is given in place of its own, so that order, checkpoints and records stay those of any run.
Only the disk is waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.server.types import RenderedRow, TrainingSample, TrajectoryGroup, VersionSpan
from palestra.trainer.advantages import batch_advantages
from palestra.trainer.batches import plan_updates
from palestra.trainer.dumps import Batch, DumpError, Origin, batch_files, check_origin, read_batch, write_batch
from palestra.trainer.reductions import reduction_of
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import StepResult
from palestra.trainer.stepmetrics import batch_metrics
from palestra.trainer.types import Backend
from palestra.trainer.weights.types import Published

Render = Callable[[Sequence[Mapping[str, Any]]], list[RenderedRow]]
"""Transcripts as supervised rows, as the service would render them."""


class DumpWriter:
    """Keeps each batch of a run before it is trained."""

    def __init__(self, folder: Path, run: str, fingerprint: str, config_hash: str, *, trains: bool) -> None:
        """`trains`: False where no step changes the weights.

        Raises:
            DumpError: the folder has batches of another run.
        """
        self._folder, self._run, self._fingerprint, self._hash, self._trains = (
            folder,
            run,
            fingerprint,
            config_hash,
            trains,
        )
        found = batch_files(folder)
        first = read_batch(found[0]).origin if found else None
        if first is not None and (first.run, first.fingerprint) != (run, fingerprint):
            which = (
                f"run {first.run!r}, this is {run!r}" if first.run != run else "a run of this name with another model"
            )
            raise DumpError(f"{folder} has batches of {which}; choose another folder")
        self._played_by = None if first is None else first.policy_version
        self._begun = False

    def __call__(self, step: int, groups: Sequence[TrajectoryGroup], policy_version: int, optimizer_steps: int) -> None:
        """Writes the groups that `step` is about to be trained on.

        Raises:
            DumpError: the disk refused.
        """
        if not self._begun:
            self._begun = True
            self._forget_after(step)
        version = policy_version
        if not self._trains:
            # The weights of each publish are those of the first: under one name, or a trainer would take old tokens for fresh ones.
            version = self._played_by = policy_version if self._played_by is None else self._played_by
            groups = [as_version(group, version) for group in groups]
        origin = Origin(self._run, step, version, optimizer_steps, self._fingerprint, self._hash, self._trains)
        write_batch(self._folder, Batch(origin, tuple(groups)))

    def _forget_after(self, step: int) -> None:
        """Takes away batches that this run wrote before it went back to an earlier step: their groups are dealt out again."""
        mine = (self._run, self._fingerprint)
        for path in batch_files(self._folder):
            origin = read_batch(path).origin
            if origin.step > step and (origin.run, origin.fingerprint) == mine:
                path.unlink()


def as_version(group: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """The group as if all of it had been sampled by `version`."""

    def renamed(row: TrainingSample) -> TrainingSample:
        return dataclasses.replace(row, spans=tuple(VersionSpan(version, s.start, s.end) for s in row.spans))

    return dataclasses.replace(group, samples=tuple(map(renamed, group.samples)))


def play_only(
    backend: Backend,
    groups: Sequence[TrajectoryGroup],
    settings: TrainerSettings,
    *,
    policy_version: int,
    optimizer_steps: int,
) -> StepResult:
    """In place of `train_batch`: changes nothing, and says what training would have seen."""
    samples = [sample for group in groups for sample in group.samples]
    advantages = batch_advantages(samples, settings.algo)
    plan = plan_updates(samples, advantages.rows, settings.algo.updates_per_batch, reduction_of(settings.algo))
    return StepResult(0, 0, batch_metrics(plan, groups, policy_version), [])


def check_age(folder: Path, steps: int, bound: int) -> None:
    """Holds batches that one policy played to the staleness bound (train steps): each step that trains them makes the next ones older.

    Raises:
        DumpError: the last of them would be too old.
    """
    files = batch_files(folder)
    oldest = min(steps, len(files)) - 1
    if files and oldest > bound and not read_batch(files[0]).origin.trained:
        raise DumpError(
            f"{folder}: one policy played these batches, and the last of {oldest + 1} would be {oldest} train steps old, above the bound "
            f'of {bound}: set schedule.kind = "async" with schedule.max_staleness = {oldest}, or fewer run.steps'
        )


class DumpSource:
    """Stands where the service stands: hands out a folder's batches, one a step, and has nobody else to tell of commits."""

    def __init__(self, folder: Path, fingerprint: str, render: Render) -> None:
        """Raises:
        DumpError: the folder has no batches.
        """
        self._files, self._fingerprint, self.render = batch_files(folder), fingerprint, render
        self._next = 0
        if not self._files:
            raise DumpError(f"{folder}: no batch is there (step-00000001.batch and so on)")

    def restore(self, *, train_step: int, checkpoint_id: str | None, policy_version: int) -> int:
        """Goes on with the batch after those of `train_step` steps."""
        self._next = train_step
        return 0

    def claim(self, n: int, owner: str, ttl_s: float, deadline_s: float) -> list[TrajectoryGroup]:
        """The next batch, however many groups it has; none where all were given.

        Raises:
            DumpError: it is damaged, or of another model.
        """
        if self._next >= len(self._files):
            return []
        path = self._files[self._next]
        batch = read_batch(path)
        check_origin(batch, path, self._fingerprint)
        self._next += 1
        return list(batch.groups)

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Nobody else can claim them."""
        return len(group_ids)

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """The checkpoint alone says what was trained."""
        return len(group_ids)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Nothing is kept that could be given back."""
        return len(group_ids)

    def collect(self, oldest_train_step: int) -> None:
        """The folder stays as it is."""

    def step_metrics(self) -> dict[str, float]:
        """There is no rollout side."""
        return {}


class NoEngines:
    """In place of a `Publisher`: nobody reads the weights before the run is over."""

    def publish(self, backend: Backend, version: int, train_step: int) -> Published:
        """Nothing travels."""
        return Published(bytes=0, seconds=0.0, still_s=0.0, requests=0)
