"""AdamW whose moments are spread over the data parallel ranks, with a gradient norm of our own that counts every element once.

Megatron's norm leaves elements out under some layouts (P213: an expert's); here each element has one owner, known from the layout. Waits
for the ranks that share gradients, and for all of them in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from palestra.trainer.megatron.core import OptimizerConfig, finalize_model_grads, get_megatron_optimizer
from palestra.trainer.megatron.optimizer import OptimSettings
from palestra.trainer.megatron.parallel.gathering import Fragment
from palestra.trainer.megatron.parallel.gloo import cuda_type_names
from palestra.trainer.megatron.parallel.shards import Local
from palestra.trainer.types import OptimStats

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Shard:
    """The stretch of a parameter that this rank updates."""

    local: Local
    inner: Any
    """The torch optimizer that holds its state."""
    values: torch.Tensor
    """A view of the parameter, flattened; the key of its state."""
    start: int
    stop: int

    @property
    def fragment(self) -> Fragment:
        """What the rest of the room calls it."""
        return Fragment(self.local.name, self.local.part, self.start, self.stop)


class ShardedOptimizer:
    """Megatron's distributed optimizer over the DDP-wrapped chunks of this rank."""

    def __init__(self, chunks: Sequence[Any], mine: Sequence[Local], settings: OptimSettings) -> None:
        self._chunks, self._settings, self._reduced = list(chunks), settings, False
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        )
        with cuda_type_names():
            self._megatron = get_megatron_optimizer(config, self._chunks)
        parts = [each for each in self._megatron.chained_optimizers if each.optimizer is not None]
        self._inner: list[torch.optim.Optimizer] = [each.optimizer for each in parts]
        by_parameter = {local.parameter: local for local in mine}
        self._shards = [shard for part in parts for shard in _shards_of(part, by_parameter)]
        for group in self._groups():
            group["fused"] = True  # as in one process: a step on a CPU is bound by memory

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]

    def clear_gradients(self) -> None:
        """Forgets what backward passes added."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._megatron.zero_grad()
        self._reduced = False

    def reduce(self) -> None:
        """Adds up the gradients of all ranks, each rank keeping its stretch. Done once, however often it is asked for."""
        if not self._reduced:
            finalize_model_grads(self._chunks, None)
            self._reduced = True

    def gradients(self) -> dict[Fragment, torch.Tensor]:
        """The gradient as it stands, added up over all ranks, in fragments; nothing is applied."""
        self.reduce()
        return {
            shard.fragment: shard.local.parameter.main_grad.view(-1)[shard.start : shard.stop]  # type: ignore[attr-defined]
            for shard in self._primary()
        }

    def _primary(self) -> Iterator[_Shard]:
        return (shard for shard in self._shards if shard.local.primary)

    def step(self, lr: float) -> OptimStats:
        """Adds up, clips, applies and clears the gradients; leaves the weights alone on every rank where a gradient is not finite."""
        self.reduce()
        for group in self._groups():
            group["lr"] = lr
            # Megatron's own scheduler does this at each step; without it, groups with wd_mult = 0 (norms) would still decay.
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        self._megatron.prepare_grads()
        norm = self._norm()
        finite = math.isfinite(norm)
        if finite:
            if 0 < self._settings.clip_grad < norm:
                gradients = [shard.values.grad for shard in self._shards if shard.values.grad is not None]
                torch._foreach_mul_(gradients, self._settings.clip_grad / (norm + 1e-6))
            self._megatron.step_with_ready_grads()
        self.clear_gradients()
        return OptimStats(grad_norm=norm, lr=lr, skipped=not finite)

    def _norm(self) -> float:
        squares = [
            shard.values.grad.double().square().sum() for shard in self._primary() if shard.values.grad is not None
        ]
        device = self._shards[0].values.device
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def reset(self) -> None:
        """Forgets moments and step counts."""
        for inner in self._inner:
            inner.state.clear()

    def state(self) -> tuple[int, tuple[dict[Fragment, torch.Tensor], dict[Fragment, torch.Tensor]]]:
        """Steps taken, and both moments in fragments; nothing before the first step."""
        steps, found = 0, ({}, {})  # type: tuple[int, tuple[dict[Fragment, torch.Tensor], dict[Fragment, torch.Tensor]]]
        for shard in self._shards:
            if state := shard.inner.state.get(shard.values):
                steps = int(state["step"])
                if shard.local.primary:
                    for into, name in zip(found, MOMENTS, strict=True):
                        into[shard.fragment] = state[name]
        return steps, found

    def restore(self, steps: int, moments: Sequence[dict[int, torch.Tensor]]) -> None:
        """The inverse of `state`; `moments`: both, by the parameter's `id`, in the parameter's shape."""
        self.reset()
        for shard in self._shards:
            first, second = (
                each[id(shard.local.parameter)].reshape(-1)[shard.start : shard.stop].clone() for each in moments
            )
            # A step tensor each: the optimizer adds to it in place.
            step = torch.tensor(float(steps), device=shard.values.device)
            shard.inner.state[shard.values] = {"step": step, "exp_avg": first, "exp_avg_sq": second}


def _shards_of(part: Any, by_parameter: dict[torch.nn.Parameter, Local]) -> Iterator[_Shard]:
    for parameters, views in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
        for parameter, view in zip(parameters, views, strict=True):
            found = part._get_model_param_range_map(parameter)["param"]
            yield _Shard(by_parameter[parameter], part.optimizer, view, found.start, found.end)
