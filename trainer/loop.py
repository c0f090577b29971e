"""The trainer's main work: claim groups, train, checkpoint, commit, publish; again.

In: a backend, the rollout service and a run folder. Out: checkpoints, `steps/N`, metrics, and new weights in the engines. It waits for the
service to have enough groups (at most `wait_s`, asking `stop` in between), and for its answers.

The order makes every interruption safe. A checkpoint names the groups of its own step, so a process killed before it
commits them does not train them again; a commit comes after the checkpoint that holds its step; and a resumed run
publishes its weights again under a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from palestra.server.types import LeaseLost, TrajectoryGroup
from palestra.trainer.checkpoints import Checkpoint, Checkpoints, Meta, model_fingerprint
from palestra.trainer.claims import Claims
from palestra.trainer.evaluation import Evaluations
from palestra.trainer.leases import LeaseKeeper
from palestra.trainer.publish import Publisher, figures
from palestra.trainer.records import MetricsFile, write_step
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import StepResult, train_batch
from palestra.trainer.timing import StepClock
from palestra.trainer.types import Backend, RolloutService, TrainerError
from palestra.trainer.warmstart import warm_start
from palestra.trainer.weights.types import Published


class Publishing(Protocol):
    """Who brings weights to engines."""

    def publish(self, backend: Backend, version: int, train_step: int) -> Published:
        """See `Publisher.publish`."""


class TrainStep(Protocol):
    """What is done with the groups of a step."""

    def __call__(
        self,
        backend: Backend,
        groups: Sequence[TrajectoryGroup],
        settings: TrainerSettings,
        *,
        policy_version: int,
        optimizer_steps: int,
    ) -> StepResult:
        """See `train_batch`."""


Keep = Callable[[int, Sequence[TrajectoryGroup], int, int], None]
"""Told of the groups that a step is about to be trained on: step, groups, policy version, optimizer steps before it."""


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
        *,
        publisher: Publishing | None = None,
        train: TrainStep = train_batch,
        keep: Keep | None = None,
    ) -> None:
        """`say` is told what the trainer is at, for those who watch. Others than a run's own `publisher` and `train` are for runs that only
        train or only play (`palestra.trainer.offline`)."""
        self._say, self._train, self._keep = say, train, keep
        self._config, self._backend, self._service, self._run_dir, self._stop = config, backend, service, run_dir, stop
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.keep_checkpoints)
        self._publisher = publisher or Publisher(service, config.weights, run_dir, config.model)
        self._claims = Claims(service, config, stop)
        self._evaluations = Evaluations(config, run_dir)
        self._metrics = MetricsFile(run_dir)
        self._clock = StepClock()
        self._fingerprint = model_fingerprint(config.model)
        self._step = 0
        self._published_step = 0
        self._version = 0
        self._optimizer_steps = 0
        self._newest: Checkpoint | None = None

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
        self._clock.skip()
        while self._step < self._config.steps and not self._stop():
            if self._config.colocated:
                self._hold()  # engines rest from the claim to the publish: it would never be done in between
            self._say(f"waits for the groups of step {self._step + 1}")
            with self._clock.part("claim"):
                groups = self._claims.step(self._step + 1)
            if not groups:
                break
            self._one_step(groups)
        if self._newest is None or self._newest.meta.train_step < self._step:
            self._save(())
        if self._published_step < self._step and not self._stop():
            self._hold()
            self._publish()  # the tasks were at their end before the last step
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
        self._claims.settle(checkpoint)
        following = self._service.restore(
            train_step=meta.train_step, checkpoint_id=checkpoint.id, policy_version=meta.policy_version
        )
        # Versions are never used twice; 0 stays the model's own weights.
        self._version = max(1, following, meta.policy_version)
        self._publish()

    def _publish(self) -> dict[str, float]:
        """Gives the engines the present weights; returns what that took, as metrics."""
        self._say(f"publishes version {self._version}")
        published = self._publisher.publish(self._backend, self._version, self._step)
        self._published_step = self._step
        self._evaluations.published(self._backend.export, self._step, self._version)
        return figures(published)

    def _publish_if_due(self) -> dict[str, float]:
        """Every so many steps, and after the last one."""
        if self._step < self._config.steps and self._step - self._published_step < self._config.publish_steps:
            return {}
        self._hold()
        with self._clock.part("publish"):
            return self._publish()

    def _hold(self) -> None:
        """Waits for an evaluation that needs the version in force, as long as the configuration allows."""
        with self._clock.part("eval_hold"):
            self._evaluations.hold(self._stop, self._say)

    def _one_step(self, groups: list[TrajectoryGroup]) -> None:
        step = self._step + 1
        ids = [group.group_id for group in groups]
        self._say(f"trains step {step}")
        with LeaseKeeper(self._service, ids, self._config.owner, self._config.lease_s) as keeper:
            if self._keep is not None:
                with self._clock.part("dump"):
                    self._keep(step, groups, self._version, self._optimizer_steps)
            with self._clock.part("train"):
                result = self._train(
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
                with self._clock.part("save"):
                    self._save(tuple(ids))
            self._commit(step, ids, keeper)
        self._service.collect(self._checkpoints.all()[0].meta.train_step)
        self._record(result, trained_version, self._publish_if_due())

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

    def _record(self, result: StepResult, trained_version: int, published: dict[str, float]) -> None:
        rollout = self._service.step_metrics()
        self._metrics.append(
            {
                "train_step": self._step,
                "steps": self._config.steps,
                **result.metrics,
                **published,
                **self._clock.lap(result.trained_tokens),
                **rollout,
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
