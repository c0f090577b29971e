"""Megatron's optimizer with a learning rate per step, clipping, and state that goes in and out by parameter name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from palestra.trainer.megatron.core import OptimizerConfig, get_megatron_optimizer
from palestra.trainer.types import OptimStats


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW, as in `[optim]`."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""


class Optimizer:
    """AdamW over a model that megatron's DistributedDataParallel wraps."""

    def __init__(self, ddp: Any, settings: OptimSettings) -> None:
        self._ddp, self._settings = ddp, settings
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=False,
        )
        self._megatron = get_megatron_optimizer(config, [ddp])
        self._inner: list[torch.optim.Optimizer] = [each.optimizer for each in self._megatron.chained_optimizers]
        for group in self._groups():
            group["fused"] = True  # one pass over the state instead of ten: on a CPU the step is bound by memory

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]

    def clear_gradients(self) -> None:
        """Forgets what backward passes added."""
        self._ddp.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, lr: float) -> OptimStats:
        """Clips, applies and clears the gradients; leaves the weights alone where a gradient is not finite."""
        for group in self._groups():
            group["lr"] = lr
            # Megatron's own scheduler does this at each step; without it, groups with wd_mult = 0 (norms) would still decay.
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        finite = math.isfinite(norm)
        if finite:
            self._clip(norm)
            self._megatron.step_with_ready_grads()
        self.clear_gradients()
        return OptimStats(grad_norm=norm, lr=lr, skipped=not finite)

    def _clip(self, norm: float) -> None:
        """Scales all gradients so that their common norm is at most clip_grad (as megatron's own, which insists on CUDA tensors)."""
        limit = self._settings.clip_grad
        if 0 < limit < norm:
            gradients = [p.grad for group in self._groups() for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))

    def reset(self) -> None:
        """Forgets moments and step counts."""
        for inner in self._inner:
            inner.state.clear()

    def state(self, names: dict[torch.Tensor, str]) -> tuple[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Steps taken, and both moments by parameter name; nothing before the first step."""
        steps, moments = 0, {}
        for inner in self._inner:
            for parameter, state in inner.state.items():
                moments[names[parameter]] = (state["exp_avg"], state["exp_avg_sq"])
                steps = int(state["step"])
        return steps, moments

    def restore(self, steps: int, moments: dict[torch.nn.Parameter, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The inverse of `state`."""
        self.reset()
        for inner in self._inner:
            for parameter in (p for group in inner.param_groups for p in group["params"] if p in moments):
                first, second = moments[parameter]
                # A step tensor each: the optimizer adds to it in place.
                step = torch.tensor(float(steps), device=parameter.device)
                inner.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
