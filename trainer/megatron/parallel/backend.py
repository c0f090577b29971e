"""ParallelBackend: the trainer's Backend over several processes.

Every process calls the same methods with the same arguments, and gets the same statistics and log p. Losses are sums that were normalised
over the whole step, so gradients are only ever added, over micro-batches as over ranks. A loss sees whole rows, on the last stage of
the data rank that has the micro-batch. Every call waits for all ranks, each wait at most for the process group's deadline.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palestra.trainer.layout.types import Layout
from palestra.trainer.megatron import convert
from palestra.trainer.megatron.backend import BackendSettings
from palestra.trainer.megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    get_forward_backward_func,
    parallel_state,
)
from palestra.trainer.megatron.families import Architecture, architecture_of, read_config
from palestra.trainer.megatron.parallel import checkpoint
from palestra.trainer.megatron.parallel.batches import Turn, nodes_of, turns
from palestra.trainer.megatron.parallel.gathering import gather, whole_parts
from palestra.trainer.megatron.parallel.model import StageModel, parallel_config
from palestra.trainer.megatron.parallel.optimizer import ShardedOptimizer
from palestra.trainer.megatron.parallel.refusals import check
from palestra.trainer.megatron.parallel.shards import fill, locals_of
from palestra.trainer.megatron.process import device
from palestra.trainer.megatron.weights import HfWeights
from palestra.trainer.sums import add_sums
from palestra.trainer.tensors import chosen, putter, tensors_of
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch, OptimStats, TrainerError


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of one micro-batch."""

    index: int
    loss: float
    sums: Mapping[str, float]
    logprobs: F32
    nodes: int


class ParallelBackend:
    """A policy with its optimizer, spread over the ranks that `process.arrange` has laid out. Build it with `from_folder`."""

    def __init__(self, arch: Architecture, layout: Layout, settings: BackendSettings) -> None:
        """Builds this rank's part; its weights are not there yet.

        Raises:
            TrainerError: the layout cannot train this model (with the planner's code), or is not the one that was arranged.
        """
        check(arch, layout)
        if settings.dtype != "fp32":
            raise TrainerError(f"not built: train.dtype = {settings.dtype!r}; use 'fp32'")
        _check_arranged(layout)
        self.arch, self.layout, self._settings, self._device = arch, layout, settings, device()
        config = parallel_config(arch, layout, settings.megatron)
        stages = range(layout.vpp) if layout.vpp > 1 else (None,)
        models = [StageModel(arch, config, stage).to(self._device) for stage in stages]
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        # Gradients are added up in `optim_step`: a schedule that did it would do it again after the next micro-batches.
        self._chunks = [DistributedDataParallel(config, ddp, model) for model in models]
        for chunk in self._chunks:
            chunk.train()
        self._locals = locals_of(models, arch)
        self._optimizer = ShardedOptimizer(self._chunks, self._locals, settings.optim)
        self._reference: list[torch.Tensor] | None = None

    @classmethod
    def from_folder(cls, folder: Path, layout: Layout, settings: BackendSettings | None = None) -> ParallelBackend:
        """Builds this rank's part of the model that a Hugging Face folder describes, and reads its share of the weights.

        Raises:
            ModelError: the folder is incomplete, of an unknown architecture or has unsupported fields.
            TrainerError: the layout cannot train this model.
        """
        arch = architecture_of(read_config(folder))
        backend = cls(arch, layout, settings or BackendSettings())
        fill([(local, local.parameter) for local in backend._locals], arch, HfWeights(folder))
        return backend

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        """Adds the gradients of all micro-batches, each computed by one data rank."""
        return self.forward_backward_logprobs(batches, loss)[0]

    def forward_backward_logprobs(self, batches: Sequence[MicroBatch], loss: Loss) -> tuple[ForwardStats, list[F32]]:
        """As `forward_backward`, with log p [B, S] of every micro-batch: a loss sees only those of its own rank."""
        if not batches:
            raise TrainerError("forward_backward needs at least one micro-batch")
        answers = self._run(batches, loss)
        sums: dict[str, float] = {}
        for answer in answers:
            add_sums(sums, answer.sums)
        total, nodes = sum(answer.loss for answer in answers), sum(answer.nodes for answer in answers)
        return ForwardStats(loss=total, sums=sums, tokens=nodes), [answer.logprobs for answer in answers]

    def optim_step(self, lr: float) -> OptimStats:
        """Adds up over ranks, clips, applies and clears the gradients at learning rate `lr`."""
        return self._optimizer.step(lr)

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        """[B, S] log p of each token whose weight is not 0, and 0 elsewhere."""
        if not batches:
            return []
        with torch.no_grad(), self._swapped() if reference else contextlib.nullcontext():
            return [answer.logprobs for answer in self._run(batches, None)]

    def _run(self, batches: Sequence[MicroBatch], loss: Loss | None) -> list[_Answer]:
        """All micro-batches of the step through this rank's stage; without a loss, forward only. Returns everybody's, in their order."""
        layout, rank = self.layout, parallel_state.get_data_parallel_rank()
        mine = turns(batches, layout.dp, layout.pp if layout.vpp > 1 else 1)[rank]
        ranks, put = layout.tp * layout.cp, putter(self._device)
        # Stages exchange states of one shape; without stages each micro-batch keeps its own.
        longest = max(turn.nodes for turn in mine) if layout.pp > 1 else 0

        def step(left: Iterator[Turn], model: Any) -> tuple[torch.Tensor, Any]:
            turn = next(left)
            found = chosen(turn.batch)
            width = _up(longest or turn.nodes, ranks)
            out = model(nodes_of(turn.batch, found, width, layout.cp > 1, self._device), self._settings.logprob_chunk)
            where = put(found[0]), put(found[1])
            return out, lambda picked: self._finish(turn, picked, where, loss)

        iterators = [iter(mine) for _ in self._chunks]
        results: list[_Answer] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(mine),
            seq_length=_up(longest, ranks) or 1,
            micro_batch_size=1,
            forward_only=loss is None,
        )
        return _everybodys(results)

    def _finish(
        self, turn: Turn, picked: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], loss: Loss | None
    ) -> tuple[torch.Tensor, torch.Tensor, _Answer]:
        """Megatron's triple: what is differentiated, a token count that nothing divides by, and what is kept."""
        logprobs = torch.zeros(turn.batch.token_ids.shape, device=self._device).index_put(where, picked)
        value, metrics = picked.sum() * 0.0, dict[str, torch.Tensor]()
        if loss is not None and turn.index >= 0:
            value, metrics = loss(logprobs, tensors_of(turn.batch, self._device))
        sums = {name: float(metric.detach()) for name, metric in metrics.items()}
        kept = logprobs.detach().cpu().numpy()
        return (
            value,
            torch.ones((), dtype=torch.int),
            _Answer(turn.index, float(value.detach()), sums, kept, turn.nodes),
        )

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """The reference's weights in place of the present ones."""
        if self._reference is None:
            raise TrainerError("there is no reference yet: freeze_reference comes first")
        present = [local.parameter.data for local in self._locals]
        try:
            for local, kept in zip(self._locals, self._reference, strict=True):
                local.parameter.data = kept
            yield
        finally:
            for local, values in zip(self._locals, present, strict=True):
                local.parameter.data = values

    def freeze_reference(self) -> None:
        """Keeps a copy of the present weights as the reference of the KL penalty."""
        self._reference = [local.parameter.detach().clone() for local in self._locals]

    def reset_optimizer(self) -> None:
        """Forgets moments and step count; weights stay."""
        self._optimizer.clear_gradients()
        self._optimizer.reset()

    def save(self, folder: Path) -> None:
        """Rank 0 writes what `MegatronBackend.save` writes, so one process or another layout can go on from it. Its memory has to hold the
        whole model with both moments. Returns on every rank when the files are durable.

        Raises:
            CheckpointError: the disk refused; on every rank.
        """
        checkpoint.save(folder, self.arch, self._locals, self._optimizer, self._reference, self._device)

    def load(self, folder: Path) -> None:
        """Every rank reads its share of what `save`, of any layout, wrote; gradients that were not applied are dropped.

        Raises:
            CheckpointError: it is not there or does not fit this model.
        """
        self.reset_optimizer()
        self._reference = checkpoint.load(folder, self.arch, self._locals, self._optimizer)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the weights under their Hugging Face names and shapes, in a stable order, one tensor at a time; elsewhere nothing.
        Every rank has to run it to its end."""
        held = whole_parts([(local, local.parameter) for local in self._locals])
        yield from self._named(gather(held, self._locals, self.arch, self._device))

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `export`, the gradients that the next `optim_step` would apply, before clipping."""
        yield from self._named(gather(self._optimizer.gradients(), self._locals, self.arch, self._device))

    def _named(self, wholes: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        pieces = {piece.megatron: piece for piece in convert.pieces(self.arch)}
        for name, whole in wholes:
            yield from convert.split(self.arch, pieces[name], whole)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _everybodys(results: Sequence[_Answer]) -> list[_Answer]:
    """The answers of all data ranks, from one rank of each, in the order of the micro-batches; idle ones are gone."""
    state = parallel_state
    speaks = not state.get_tensor_model_parallel_rank() and not state.get_context_parallel_rank()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(results) if speaks else [])
    return sorted((answer for each in told for answer in each if answer.index >= 0), key=lambda answer: answer.index)


def _check_arranged(layout: Layout) -> None:
    if not parallel_state.model_parallel_is_initialized():
        raise TrainerError("no layout is arranged: process.join and process.arrange come first")
    state = parallel_state
    there = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
        dist.get_world_size(),
    )
    asked = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.gpus)
    if there != asked:
        raise TrainerError(f"arranged are (tp, pp, cp, ep, etp, ranks) = {there}, asked for {asked}")
