"""Memory of a training GPU, item by item, for each pipeline stage: F4, F5, the reference, the runtime. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.cli.planner.local import local_held, local_kept, local_overhead, local_publishing
from palestra.cli.planner.memory import FRAGMENTATION, RUNTIME_BYTES

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one rank of a stage needs, bytes."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    """On the GPU."""
    reference: float
    """Weights of the policy that a KL penalty is against."""
    activations: float
    logits: float
    overhead: float
    """Of the runtime and of fragmentation. A guess."""

    @property
    def state(self) -> float:
        """What stays through a step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> float:
        """All of it."""
        return self.state + self.activations + self.logits + self.overhead


def stage_memories(case: Case, recompute: str | None = None) -> tuple[StageMemory, ...]:
    """Of each stage; empty where the layers cannot be spread. `recompute`: in place of the case's own. Without GPUs there is one stage,
    counted by the formulas of the local path."""
    if case.on_cpu:
        return (_local_memory(case),)
    each, copies = case.state_bytes, 2 if case.input.train.critic else 1
    found = []
    for state in case.state:
        held = state.dense_parameters + state.expert_parameters
        weights, gradients = copies * held * each.weight, copies * held * each.gradient
        reference = held * each.weight if case.input.placement.reference == "shared" else 0.0
        kept = case.stage_activations(state.stage, recompute)
        optimizer = max(0.0, state.gpu_bytes - weights - gradients)
        asked = state.gpu_bytes + reference + kept.total
        overhead = asked * (FRAGMENTATION - 1) + RUNTIME_BYTES
        found.append(
            StageMemory(state.stage, weights, gradients, optimizer, reference, kept.layers, kept.logits, overhead)
        )
    return tuple(found)


def _local_memory(case: Case) -> StageMemory:
    held, kept = local_held(case), local_kept(case)
    return StageMemory(
        0,
        held.weights,
        held.gradients,
        held.moments,
        held.reference,
        kept.layers + kept.masks,
        kept.scored + kept.passing,
        local_overhead(kept, local_publishing(case)),
    )
