"""FsdpBackend: the trainer's Backend over any causal language model of transformers, sharded by FSDP2 over the ranks there are.

In: micro-batches and a loss; out: statistics, log p, weights under Hugging Face names. Every rank makes the same calls with the same
arguments and gets the same answers: micro-batches are dealt out in turns, and log p comes back to all. Ranks wait for each other in
every call that computes, saves or exports; a single one, as in a run's trainer, waits for nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palestra.trainer.config import OptimConfig
from palestra.trainer.fsdp import names, state
from palestra.trainer.fsdp.inputs import inputs_of
from palestra.trainer.fsdp.model import load_model, sees_all, shard
from palestra.trainer.fsdp.optimizer import Optimizer
from palestra.trainer.fsdp.process import device, ensure_mesh
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.state import FIRST, MODEL, REFERENCE, SECOND
from palestra.trainer.sums import add_sums
from palestra.trainer.tensors import tensors_of
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch, OptimStats, TrainerError


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """How the model is computed and updated."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Of it the learning rate and its schedule are the caller's."""
    dtype: str = "fp32"
    """Of weights, gradients and moments."""
    logprob_chunk: int = 0
    """Predictions whose logits exist at a time; 0: all of a micro-batch."""


class FsdpBackend:
    """A policy with its optimizer. Build it with `from_folder`."""

    def __init__(self, model: Any, identity: Architecture | state.OtherModel, settings: FsdpSettings) -> None:
        if settings.dtype != "fp32":
            raise TrainerError(f"not built: train.dtype = {settings.dtype!r}; use 'fp32'")
        mesh = ensure_mesh()
        self._identity, self._settings, self._device = identity, settings, device()
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._share = sees_all(model.config)
        self.model = model
        self._scoring = shard(model.to(self._device), mesh)
        self._optimizer = Optimizer(dict(model.named_parameters()), settings.optim)
        self._reference: dict[str, torch.Tensor] | None = None

    @classmethod
    def from_folder(cls, folder: Path, settings: FsdpSettings | None = None) -> FsdpBackend:
        """Loads the model of a Hugging Face folder.

        Raises:
            ModelError: transformers does not know it, or the folder cannot be trained.
        """
        return cls(load_model(folder), state.identity_of(folder), settings or FsdpSettings())

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        """Adds the gradients of all micro-batches. The loss is asked about each of them, in their order, on every rank."""
        if not batches:
            raise TrainerError("forward_backward needs at least one micro-batch")
        sums: dict[str, float] = {}
        total, tokens = 0.0, 0
        for turn in self._turns(batches):
            own, width = self._score(turn)
            tokens += width
            shared = self._exchange(turn, own.detach())
            for rank, batch in enumerate(turn):
                value, metrics = loss(own if rank == self._rank else shared[rank], tensors_of(batch, self._device))
                total += float(value.detach())
                add_sums(sums, {name: float(metric.detach()) for name, metric in metrics.items()})
                if rank == self._rank:
                    value.backward()  # type: ignore[no-untyped-call]
            if self._rank >= len(turn):
                # The others gather and reduce: so must this rank, with gradients of 0.
                (own.sum() * 0).backward()  # type: ignore[no-untyped-call]
        return ForwardStats(loss=total, sums=sums, tokens=self._added(tokens))

    def optim_step(self, lr: float) -> OptimStats:
        """Clips, applies and clears the gradients at learning rate `lr`."""
        return self._optimizer.step(lr)

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        """[B, S] log p of each token whose weight is not 0, and 0 elsewhere."""
        out: list[F32] = []
        with torch.no_grad(), self._reference_in_place() if reference else contextlib.nullcontext():
            for turn in self._turns(batches):
                out += [found.cpu().numpy() for found in self._exchange(turn, self._score(turn)[0])]
        return out

    def _turns(self, batches: Sequence[MicroBatch]) -> Iterator[Sequence[MicroBatch]]:
        """Micro-batches that are computed at the same time, one on each rank; in the last turn there may be fewer than ranks."""
        return (batches[start : start + self._ranks] for start in range(0, len(batches), self._ranks))

    def _score(self, turn: Sequence[MicroBatch]) -> tuple[torch.Tensor, int]:
        """log p [B, S] of this rank's micro-batch, and how many tokens went through the model; of the first where it has none, and 0."""
        idle = self._rank >= len(turn)
        batch = turn[0 if idle else self._rank]
        inputs, rows, columns, width = inputs_of(batch, self._share, self._device)
        picked = self._scoring(inputs, self._settings.logprob_chunk)
        at = torch.from_numpy(rows).to(self._device), torch.from_numpy(columns).to(self._device)
        out = torch.zeros(batch.token_ids.shape, device=self._device).index_put(at, picked)
        return out, 0 if idle else width

    def _exchange(self, turn: Sequence[MicroBatch], own: torch.Tensor) -> list[torch.Tensor]:
        """log p of each micro-batch of the turn, from the rank that computed it."""
        if self._ranks == 1:
            return [own]
        out = []
        for rank, batch in enumerate(turn):
            found = own.contiguous() if rank == self._rank else torch.empty(batch.token_ids.shape, device=self._device)
            dist.broadcast(found, src=rank)
            out.append(found)
        return out

    def _added(self, count: int) -> int:
        """The sum over ranks."""
        value = torch.tensor(count, device=self._device)
        dist.all_reduce(value)
        return int(value)

    @contextlib.contextmanager
    def _reference_in_place(self) -> Iterator[None]:
        """The reference's weights in place of the present ones."""
        if self._reference is None:
            raise TrainerError("there is no reference yet: freeze_reference comes first")
        self._swap(self._reference)
        try:
            yield
        finally:
            self._swap(self._reference)

    def _swap(self, others: Mapping[str, torch.Tensor]) -> None:
        """Exchanges values with `others`, a tensor at a time. FSDP gathers from the memory that it knows: tensors cannot change places."""
        with torch.no_grad():
            for name, tensor in names.own_tensors(self.model).items():
                present = tensor.detach().clone()
                tensor.copy_(others[name])
                others[name].copy_(present)

    def freeze_reference(self) -> None:
        """Keeps a copy of the present weights as the reference of the KL penalty."""
        self._reference = {name: tensor.detach().clone() for name, tensor in names.own_tensors(self.model).items()}

    def reset_optimizer(self) -> None:
        """Forgets moments and step count; weights stay."""
        self._optimizer.clear_gradients()
        self._optimizer.reset()

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer state and the reference, if there is one, into an empty folder, durably."""
        steps, first, second = self._optimizer.state()
        files: dict[str, state.Tensors] = {MODEL: names.own_tensors(self.model)}
        if first:
            files |= {FIRST: first, SECOND: second}
        if self._reference is not None:
            files[REFERENCE] = self._reference
        state.write(folder, self.model, self._identity, files, steps)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, or megatron's backend; gradients that were not applied are dropped.

        Raises:
            CheckpointError: it is not there or does not fit this model.
        """
        steps, files = state.read_about(folder, self._identity)
        self.reset_optimizer()
        tensors = names.own_tensors(self.model)
        state.read_into(tensors, folder, MODEL, self.model)
        if FIRST in files:
            parameters = dict(self.model.named_parameters())
            first, second = ({n: torch.zeros_like(p).detach() for n, p in parameters.items()} for _ in range(2))
            state.read_into(first, folder, FIRST, self.model)
            state.read_into(second, folder, SECOND, self.model)
            self._optimizer.restore(steps, first, second)
        self._reference = None
        if REFERENCE in files:
            self._reference = {name: torch.empty_like(tensor).detach() for name, tensor in tensors.items()}
            state.read_into(self._reference, folder, REFERENCE, self.model)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names and shapes, in a stable order."""
        yield from names.exported(self.model, names.own_tensors(self.model))
