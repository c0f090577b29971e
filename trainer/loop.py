"""The trainer's main work: claim groups, train, checkpoint, commit, publish; again.

In: a backend, the rollout service and a run folder. Out: checkpoints, `steps/N`, metrics, and new weights in the engines. It waits for the
service to have enough groups (at most `wait_s`, asking `stop` in between), and for its answers.

The order makes every interruption safe. A checkpoint names the groups of its own step, so a process killed before it
commits them does not train them again; a commit comes after the checkpoint that holds its step; and a resumed run
publishes its weights again under a new version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from palestra.server.types import LeaseLost, TrajectoryGroup
from palestra.trainer.checkpoints import Checkpoint, Checkpoints, Meta, model_fingerprint
from palestra.trainer.leases import LeaseKeeper
from palestra.trainer.publish import Publisher, figures
from palestra.trainer.records import MetricsFile, write_step
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import StepResult, train_batch
from palestra.trainer.types import Backend, RolloutService, TrainerError
from palestra.trainer.warmstart import warm_start

CLAIM_S = 2.0
"""How long one call of `claim` waits, so that a wish to stop is seen, seconds."""


class Trainer:
    """One run, from its newest checkpoint (or from the model) to its last step."""

    def __init__(
        self,
        config: TrainerSettings,
        backend: Backend,
        service: RolloutService,
        run_dir: Path,
        stop: Callable[[], bool],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`say` is told what the trainer is at, for those who watch."""
        self._say = say
        self._config, self._backend, self._service, self._run_dir, self._stop = config, backend, service, run_dir, stop
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints)
        self._publisher = Publisher(service, config.weights, run_dir, config.model)
        self._metrics = MetricsFile(run_dir)
        self._fingerprint = model_fingerprint(config.model)
        self._step = 0
        self._published_step = 0
        self._version = 0
        self._optimizer_steps = 0
        self._newest: Checkpoint | None = None
        self._trained: set[str] = set()
        """Groups that the checkpoint we came from holds but that were not committed."""

    @property
    def step(self) -> int:
        """Training steps that are done."""
        return self._step

    def run(self) -> int:
        """Trains until the last step, the end of the tasks, or `stop`; returns the number of steps done.

        Raises:
            TrainerError: the run cannot go on; what is on the disk can be resumed.
        """
        if not self._start():
            return 0
        while self._step < self._config.steps and not self._stop():
            started = time.monotonic()
            groups = self._claim()
            if not groups:
                break
            self._one_step(groups, time.monotonic() - started)
        if self._newest is None or self._newest.meta.train_step < self._step:
            self._save(())
        return self._step

    def _start(self) -> bool:
        """Brings backend, service and engines to a common state. False where `stop` came first."""
        checkpoint = self._checkpoints.latest()
        if checkpoint is not None:
            self._resume(checkpoint)
            return True
        following = self._service.restore(train_step=0, checkpoint_id=None, policy_version=0)
        self._say("starts")
        sft = self._config.sft
        if sft is not None and not warm_start(
            self._backend,
            self._service,
            sft,
            self._config.train.max_tokens_per_gpu,
            self._metrics.append,
            self._stop,
            self._say,
        ):
            return False
        if self._config.algo.kl_coef:
            self._backend.freeze_reference()
        # Version 0 is always the model's own weights, which a restarted engine has again; a warm start makes ours differ.
        self._version = following if sft is None else max(1, following)
        self._save(())
        self._publish()
        return True

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._say(f"restores {checkpoint.id}")
        self._checkpoints.load(self._backend, checkpoint, self._fingerprint)
        meta = checkpoint.meta
        self._step, self._optimizer_steps, self._newest = meta.train_step, meta.optimizer_steps, checkpoint
        following = self._service.restore(
            train_step=meta.train_step, checkpoint_id=checkpoint.id, policy_version=meta.policy_version
        )
        if meta.group_ids:
            try:
                self._service.commit(meta.train_step, checkpoint.id, meta.group_ids, self._config.owner)
            except LeaseLost:
                self._trained = set(meta.group_ids)  # they are somewhere in the queue again; see _claim
        # Versions are never used twice; 0 stays the model's own weights.
        self._version = max(1, following, meta.policy_version)
        self._publish()

    def _publish(self) -> dict[str, float]:
        """Gives the engines the present weights; returns what that took, as metrics."""
        self._say(f"publishes version {self._version}")
        started = time.monotonic()
        published = self._publisher.publish(self._backend, self._version, self._step)
        self._published_step = self._step
        return {"time/publish_s": time.monotonic() - started, **figures(published)}

    def _claim(self) -> list[TrajectoryGroup]:
        """The groups of the next step; fewer where the tasks are exhausted, none where `stop` came first."""
        self._say(f"waits for the groups of step {self._step + 1}")
        wanted, deadline = self._config.algo.groups_per_step, time.monotonic() + self._config.wait_s
        groups: list[TrajectoryGroup] = []
        while len(groups) < wanted:
            asked = wanted - len(groups)
            got = self._claim_some(asked, deadline)
            if got is None:
                self._service.release([group.group_id for group in groups], self._config.owner)
                return []
            old = [group.group_id for group in got if group.group_id in self._trained]
            if old and self._newest is not None:
                meta = self._newest.meta
                self._service.commit(meta.train_step, self._newest.id, old, self._config.owner)
                self._trained.difference_update(old)
            groups += [group for group in got if group.group_id not in old]
            if len(got) < asked:
                break
        return groups

    def _claim_some(self, wanted: int, deadline: float) -> list[TrajectoryGroup] | None:
        """`wanted` groups (fewer at the end of the tasks); None where `stop` came first."""
        owner, lease = self._config.owner, self._config.lease_s
        while not self._stop():
            try:
                wait = min(CLAIM_S, max(0.1, deadline - time.monotonic()))
                return self._service.claim(wanted, owner, lease, wait)
            except TimeoutError as error:
                if time.monotonic() > deadline:
                    waited = self._config.wait_s
                    raise TrainerError(f"step {self._step + 1} waited {waited:.0f} s for groups: {error}") from error
        return None

    def _one_step(self, groups: list[TrajectoryGroup], claim_s: float) -> None:
        step = self._step + 1
        ids = [group.group_id for group in groups]
        self._say(f"trains step {step}")
        with LeaseKeeper(self._service, ids, self._config.owner, self._config.lease_s) as keeper:
            result = train_batch(
                self._backend,
                groups,
                self._config,
                policy_version=self._version,
                optimizer_steps=self._optimizer_steps,
            )
            trained_version = self._version
            self._step, self._optimizer_steps = step, self._optimizer_steps + result.optimizer_steps
            # A step without an update still publishes, since the rollouts of a synchronous run wait for the next version.
            self._version += max(1, result.optimizer_steps)
            write_step(self._run_dir, step, result.records)
            if step % self._config.save_every == 0 or step == self._config.steps:
                self._save(tuple(ids))
            self._commit(step, ids, keeper)
        self._service.collect(self._checkpoints.all()[0].meta.train_step)
        due = step - self._published_step >= self._config.publish_steps or step == self._config.steps
        published = self._publish() if due else {"time/publish_s": 0.0}
        self._record(result, trained_version, {"time/claim_s": claim_s, **published})

    def _commit(self, step: int, ids: list[str], keeper: LeaseKeeper) -> None:
        newest = self._newest
        assert newest is not None, "a run has a checkpoint before its first step"
        try:
            self._service.commit(step, newest.id, ids, self._config.owner)
        except LeaseLost as error:
            renewals = f" (renewals: {'; '.join(keeper.failures)})" if keeper.failures else ""
            raise TrainerError(
                f"step {step} is dropped: its groups were no longer leased to this trainer{renewals}; go on with --resume"
            ) from error

    def _record(self, result: StepResult, trained_version: int, times: dict[str, float]) -> None:
        self._metrics.append(
            {
                "train_step": self._step,
                "steps": self._config.steps,
                **result.metrics,
                **times,
                **self._service.step_metrics(),
                "policy_version": self._version,
                "trained_version": trained_version,
            }
        )

    def _save(self, group_ids: tuple[str, ...]) -> None:
        self._say(f"saves step {self._step}")
        meta = Meta(
            train_step=self._step,
            policy_version=self._version,
            optimizer_steps=self._optimizer_steps,
            fingerprint=self._fingerprint,
            config_hash=self._config.config_hash,
            group_ids=group_ids,
        )
        self._newest = self._checkpoints.save(self._backend, meta)
