"""MegatronBackend: the trainer's Backend on megatron-core, in one process.

In: micro-batches and a loss; out: statistics, log p, weights under Hugging Face names. Losses are sums that were normalised over the whole
step, so gradients are only ever added. Nothing is waited for: there is one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from palestra.trainer.losses.entropy import Wanted
from palestra.trainer.megatron import convert, state
from palestra.trainer.megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
)
from palestra.trainer.megatron.families import Architecture, architecture_of, read_config
from palestra.trainer.megatron.model import PolicyModel, transformer_config
from palestra.trainer.megatron.optimizer import Optimizer, OptimSettings
from palestra.trainer.megatron.process import device, ensure_process_group
from palestra.trainer.megatron.weights import HfWeights
from palestra.trainer.prefix import pack
from palestra.trainer.sums import add_sums
from palestra.trainer.tensors import added, chosen, predictors_of, putter, tensors_of
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch, OptimStats, TrainerError


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """How the model is computed and updated."""

    optim: OptimSettings = field(default_factory=OptimSettings)
    dtype: str = "fp32"
    """Of weights, gradients and moments."""
    logprob_chunk: int = 0
    """Predictions whose logits exist at a time; 0: all of a micro-batch."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """The run's `[megatron]` table."""
    entropy: Wanted = "none"
    """Whether losses are given the `entropy` [B, S] of each trained token's prediction, and whether it has a gradient."""


class MegatronBackend:
    """A policy with its optimizer. Build it with `from_folder`."""

    def __init__(self, arch: Architecture, settings: BackendSettings) -> None:
        if settings.dtype != "fp32":
            raise TrainerError(f"not built: train.dtype = {settings.dtype!r}; use 'fp32'")
        ensure_process_group()
        self.arch, self._settings, self._device = arch, settings, device()
        config = transformer_config(arch, settings.megatron)
        # Weights of the loss already sum to one over the step: megatron's own division by tokens must not happen again.
        config.finalize_model_grads_func = lambda model, _tokens, **kwargs: finalize_model_grads(model, None, **kwargs)
        self.model = PolicyModel(arch, config).to(self._device)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._ddp = DistributedDataParallel(config, ddp_config, self.model)
        self._ddp.train()
        self._optimizer = Optimizer(self._ddp, settings.optim)
        self._reference: dict[str, torch.Tensor] | None = None

    @classmethod
    def from_folder(cls, folder: Path, settings: BackendSettings | None = None) -> MegatronBackend:
        """Builds the model that a Hugging Face folder describes and loads its weights.

        Raises:
            ModelError: the folder is incomplete, of an unknown architecture or has unsupported fields.
        """
        arch = architecture_of(read_config(folder))
        weights = HfWeights(folder)
        backend = cls(arch, settings or BackendSettings())
        convert.load(backend._parameters(), arch, weights)
        return backend

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        """Adds the gradients of all micro-batches."""
        if not batches:
            raise TrainerError("forward_backward needs at least one micro-batch")
        sums: dict[str, float] = {}
        total, nodes = 0.0, 0

        def step(batches_left: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            nonlocal nodes
            batch = next(batches_left)
            logprobs, width, entropy = self._run(model, batch, self._settings.entropy)
            nodes += width
            beside = {} if entropy is None else {"entropy": entropy}
            return logprobs, lambda out: _loss_of(loss, out, tensors_of(batch, self._device) | beside)

        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self._ddp],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        for value, metrics in results:
            total += value
            add_sums(sums, metrics)
        return ForwardStats(loss=total, sums=sums, tokens=nodes)

    def optim_step(self, lr: float) -> OptimStats:
        """Clips, applies and clears the gradients at learning rate `lr`."""
        return self._optimizer.step(lr)

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        """[B, S] log p of each token whose weight is not 0, and 0 elsewhere."""
        with torch.no_grad(), self._swapped() if reference else contextlib.nullcontext():
            return [self._run(self.model, batch)[0].cpu().numpy() for batch in batches]

    def _run(
        self, model: Any, batch: MicroBatch, entropy: Wanted = "none"
    ) -> tuple[torch.Tensor, int, torch.Tensor | None]:
        """log p [B, S], how many nodes went through the model, and entropies [B, S] where they are wanted."""
        packed = pack(batch)
        rows, columns = chosen(batch)
        put = putter(self._device)
        picked = model(
            token_ids=put(packed.token_ids),
            positions=put(packed.positions),
            visible=None if packed.visible is None else added(put(packed.visible))[None, None],
            predictors=put(predictors_of(packed, rows, columns)),
            targets=put(batch.token_ids[rows, columns]),
            temperature=put(batch.temperature[rows]),
            chunk=self._settings.logprob_chunk,
            entropy=entropy,
        )
        where, empty = (put(rows), put(columns)), torch.zeros(batch.token_ids.shape, device=self._device)
        told = picked if entropy == "none" else picked[0]
        beside = None if entropy == "none" else empty.index_put(where, picked[1])
        return empty.index_put(where, told), len(packed.token_ids), beside

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """The reference's weights in place of the present ones."""
        if self._reference is None:
            raise TrainerError("there is no reference yet: freeze_reference comes first")
        present = {name: parameter.data for name, parameter in self._parameters().items()}
        try:
            for name, parameter in self._parameters().items():
                parameter.data = self._reference[name]
            yield
        finally:
            for name, parameter in self._parameters().items():
                parameter.data = present[name]

    def freeze_reference(self) -> None:
        """Keeps a copy of the present weights as the reference of the KL penalty."""
        self._reference = {name: parameter.detach().clone() for name, parameter in self._parameters().items()}

    def reset_optimizer(self) -> None:
        """Forgets moments and step count; weights stay."""
        self._optimizer.clear_gradients()
        self._optimizer.reset()

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer state and the reference, if there is one, into an empty folder, durably."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._parameters().items()}
        steps, moments = self._optimizer.state(names)
        files: dict[str, state.Tensors] = {state.MODEL: self._parameters()}
        if moments:
            files[state.FIRST] = {name: pair[0] for name, pair in moments.items()}
            files[state.SECOND] = {name: pair[1] for name, pair in moments.items()}
        if self._reference is not None:
            files[state.REFERENCE] = self._reference
        state.write(folder, self.arch, files, steps)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote; gradients that were not applied are dropped.

        Raises:
            CheckpointError: it is not there or does not fit this model.
        """
        steps, files = state.read_about(folder, self.arch)
        parameters = self._parameters()
        self.reset_optimizer()
        state.read_into(parameters, folder, state.MODEL, self.arch)
        if state.FIRST in files:
            moved = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            first, second = ({n: torch.empty_like(p.data) for n, p in moved.items()} for _ in range(2))
            state.read_into(first, folder, state.FIRST, self.arch)
            state.read_into(second, folder, state.SECOND, self.arch)
            self._optimizer.restore(steps, {p: (first[n], second[n]) for n, p in moved.items()})
        self._reference = None
        if state.REFERENCE in files:
            self._reference = {name: torch.empty_like(parameter.data) for name, parameter in parameters.items()}
            state.read_into(self._reference, folder, state.REFERENCE, self.arch)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names and shapes, in a stable order."""
        yield from convert.export(self._parameters(), self.arch)


def _loss_of(
    loss: Loss, logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Megatron's triple: what is differentiated, a token count that nothing divides by, and what is kept."""
    value, metrics = loss(logprobs, batch)
    kept = (float(value.detach()), {name: float(metric.detach()) for name, metric in metrics.items()})
    return value, torch.ones((), dtype=torch.int), kept
