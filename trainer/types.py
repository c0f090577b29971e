"""Words of the trainer: micro-batches in, statistics out, and the Backend behind which a training engine stands.

Arrays are numpy here; a backend turns them into its own tensors. Rows are padded on the right to the micro-batch's longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from palestra.server.types import RenderedRow, TrainingSample, TrajectoryGroup
from palestra.trainer.weights.types import GroupService, HandleService

if TYPE_CHECKING:
    import torch


F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class TrainerError(Exception):
    """Root of the trainer's errors."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, half-written or of another model."""


class ModelError(TrainerError):
    """A model folder that cannot be trained: missing, of an unknown architecture, or with fields that are not supported."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows of at most S tokens. Position t of the [B, S] arrays speaks of token t; the backend does the shift by one."""

    token_ids: I64
    """[B, S], padded with 0."""
    lengths: I64
    """[B], tokens of each row."""
    weights: F32
    """[B, S] weight of each token's loss, already normalised over the whole optimizer step: the loss is sum(weights * l). 0 where the
    mask is 0."""
    rollout_logprobs: F32
    """[B, S] the engine's log p, 0 where the weight is 0."""
    advantages: F32
    """[B, S]."""
    temperature: F32
    """[B] logits are divided by it."""
    ref_logprobs: F32 | None = None
    """[B, S], where a KL penalty is asked for."""
    old_logprobs: F32 | None = None
    """[B, S] this trainer's log p before the first update on the batch; None: the engine's stand in for them."""


class Loss(Protocol):
    """A pure function of log p: differentiable in `logprobs`, sums weights * l over one micro-batch."""

    def __call__(
        self, logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`logprobs` [B, S] of each token at its row's temperature (0 at position 0), `batch` the MicroBatch's arrays by field name.
        Returns the loss to be added up, and sums for the metrics (added up over micro-batches; `max_*` keys take the maximum)."""


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """Sums over all micro-batches of one forward_backward."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    """Tokens that went through the model, padding excluded."""


@dataclass(frozen=True, slots=True)
class OptimStats:
    """One optimizer step."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool = False
    """True where gradients were not finite: weights are unchanged."""


class Backend(Protocol):
    """A model with its optimizer."""

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        """Adds the gradients of all micro-batches. Nothing is applied yet."""

    def optim_step(self, lr: float) -> OptimStats:
        """Clips, applies and clears the gradients at learning rate `lr`."""

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        """[B, S] log p of each token whose weight is not 0, per micro-batch, and 0 elsewhere (always at position 0); without gradients.
        `reference`: of the weights that `freeze_reference` kept."""

    def freeze_reference(self) -> None:
        """Keeps a copy of the present weights as the reference of the KL penalty."""

    def reset_optimizer(self) -> None:
        """Forgets moments and step count; weights stay."""

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state into an empty folder, durably."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote.

        Raises:
            CheckpointError: it is not there or does not fit this model.
        """

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names and shapes, in a stable order."""


@dataclass(frozen=True, slots=True)
class RowAdvantage:
    """The advantage of one row, and what it was made of."""

    rollout_id: str
    branch: int
    value: float
    """Of each token; where they differ, their mean over the trained ones."""
    baseline: float
    std: float
    tokens: F32 | None = None
    """[T] where tokens of the row differ: each turn has its own. None: `value` for all of them."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages of N rollouts at K turns. Arrays are [N, K]."""

    values: F64
    baseline: F64
    """What returns were compared with."""
    std: F64
    """The deviation of what they were compared with, whether it divides or not; 0 where there is none."""


class Estimator(Protocol):
    """A pure function from returns to advantages."""

    def __call__(self, returns: F64, groups: I64) -> Estimate:
        """`returns` [N, K], a line per rollout and a column per turn; `groups` [N], the group of each line."""


class OwnAdvantage(Protocol):
    """What `algo.advantage` names: a user's own estimate."""

    def __call__(self, rows: Sequence[TrainingSample], /) -> Sequence[float | F32 | F64 | None]:
        """For each row of a batch its advantage: one number, or an array with one per token; None: the row is not trained. `rows` are those
        of rollouts with a reward and a trained token; the rows of a rollout share `rollout_id` and `attempt`, siblings share
        `group_id`."""


class RolloutService(HandleService, GroupService, Protocol):
    """The service as the trainer sees it. `renew` is called from a second thread while the first one trains."""

    def restore(self, *, train_step: int, checkpoint_id: str | None, policy_version: int) -> int:
        """Tells from where the run goes on: groups committed after that checkpoint are ready again, those of the abandoned lineage are
        discarded. Rollouts start with the next publish. Returns its policy version: the highest published + 1, or 0 in a
        fresh run."""

    def claim(self, n: int, owner: str, ttl_s: float, deadline_s: float) -> list[TrajectoryGroup]:
        """Blocks until `n` groups are ready, and leases them; fewer where the budget of a step is spent, none where the source of tasks is
        exhausted and all that it gave is trained.

        Raises:
            TimeoutError: not within `deadline_s` seconds; names who it waits for. Nothing was leased.
        """

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Extends leases; returns how many `owner` still holds."""

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained in `step`, all or none; repeating it does no harm.

        Raises:
            LeaseLost: `owner` no longer holds all of them.
        """

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Gives leased groups back unread."""

    def collect(self, oldest_train_step: int) -> None:
        """Allows the deletion of what a restore to `oldest_train_step`, the oldest checkpoint kept, cannot need."""

    def publish_canary(self, version: int, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        """Compares the trainer's logprobs of `ids` with every engine's; how far off each is."""

    def render(self, transcripts: Sequence[Mapping[str, Any]]) -> list[RenderedRow]:
        """Token rows of {"messages": [...], "tools": [...]} transcripts, in their order."""

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the rollout side since the last call."""


StepRecord = dict[str, Any]
"""One line of metrics.jsonl: names are `area/name/stat`."""
