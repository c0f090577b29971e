"""AdamW over sharded parameters, with a learning rate per step, clipping, and state that goes in and out by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from palestra.trainer.config import OptimConfig
from palestra.trainer.fsdp.names import whole
from palestra.trainer.types import OptimStats

Moments = Mapping[str, torch.Tensor]
"""By parameter name; sharded as the parameters are."""


class Optimizer:
    """AdamW; matrices decay, norms and biases do not."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], settings: OptimConfig) -> None:
        self._parameters, self._settings = parameters, settings
        decays = {name: p.ndim > 1 and not name.endswith("bias") for name, p in parameters.items()}
        groups = [
            {
                "params": [p for name, p in parameters.items() if decays[name] is decay],
                "weight_decay": settings.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,  # one pass over the state instead of ten
        )

    def clear_gradients(self) -> None:
        """Forgets what backward passes added."""
        self._adam.zero_grad()

    def step(self, lr: float) -> OptimStats:
        """Clips, applies and clears the gradients; leaves the weights alone where a gradient is not finite."""
        gradients = []
        for parameter in self._parameters.values():
            if parameter.grad is None:  # an expert that no token chose: its moments fade all the same
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        norm = float(whole(torch.nn.utils.get_total_norm(gradients)))
        finite = math.isfinite(norm)
        if finite:
            limit = self._settings.clip_grad
            if 0 < limit < norm:
                torch._foreach_mul_(gradients, limit / (norm + 1e-6))
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
        self.clear_gradients()
        return OptimStats(grad_norm=norm, lr=lr, skipped=not finite)

    def reset(self) -> None:
        """Forgets moments and step count."""
        self._adam.state.clear()

    def state(self) -> tuple[int, Moments, Moments]:
        """Steps taken and both moments; nothing before the first step."""
        if not self._adam.state:
            return 0, {}, {}
        states = {name: self._adam.state[parameter] for name, parameter in self._parameters.items()}
        first = {name: state["exp_avg"] for name, state in states.items()}
        second = {name: state["exp_avg_sq"] for name, state in states.items()}
        return int(next(iter(states.values()))["step"]), first, second

    def restore(self, steps: int, first: Moments, second: Moments) -> None:
        """The inverse of `state`."""
        self.reset()
        for name, parameter in self._parameters.items():
            # A step tensor each: the optimizer adds to it in place.
            step = torch.tensor(float(steps), device=parameter.device)
            self._adam.state[parameter] = {"step": step, "exp_avg": first[name], "exp_avg_sq": second[name]}
