"""What rules and quantities are computed from: an input with everything derived that was left out.

In: a `PlanInput`. Out: a `Case`, or findings where there is no model to speak of. Values that are costly or that few rules ask for are
computed at their first use and kept. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from palestra.cli.planner.boxes import BoxDemand, box_demand
from palestra.cli.planner.engines import WEIGHT_BYTES, EngineShape, engine_shapes, weight_dtype
from palestra.cli.planner.flow import Delta, zero_variance
from palestra.cli.planner.inputs import UNREAD, PlanInput
from palestra.cli.planner.local import local_kept
from palestra.cli.planner.memory import (
    STATE,
    Activations,
    EnginePool,
    StageState,
    StateBytes,
    activations,
    training_state,
)
from palestra.cli.planner.model import Parameters, parameters
from palestra.cli.planner.serving import (
    Held,
    PdFlow,
    SecondCache,
    delta_of,
    fit_of,
    held_of,
    pd_flow_of,
    second_cache_of,
)
from palestra.cli.planner.settled import Settled
from palestra.cli.planner.training import StageMemory, stage_memories
from palestra.cli.planner.workload import Times, Work, requests_of, times_of, work_of
from palestra.envs.findings import Finding
from palestra.trainer.layout.types import ModelDims, stage_layers


@dataclass(frozen=True)
class Case(Settled):
    """An input whose model is known, and what formulas make of it."""

    @cached_property
    def parameters(self) -> Parameters:
        """F1."""
        return parameters(self.model)

    @cached_property
    def work(self) -> Work:
        """What rollouts are like on average."""
        return work_of(self)

    @cached_property
    def microbatches(self) -> int:
        """Of one optimizer step on one rank, where rows are packed."""
        train = self.input.train
        if not train.dynamic_batch and train.micro_batch:
            return max(1, self.global_batch // (train.micro_batch * self.layout.dp))
        tokens = self.global_batch * self.work.row_tokens / self.layout.dp
        return max(1, ceil(tokens / (self.max_tokens_per_gpu * self.layout.cp)))

    @cached_property
    def stages(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage; None: they cannot be spread."""
        given = self.input.train
        return stage_layers(self.model.layers, given.pp, given.first_stage_layers, given.last_stage_layers)

    @cached_property
    def state_bytes(self) -> StateBytes:
        """F4: that a parameter takes in training."""
        held = STATE["fp32" if self.train_dtype == "fp32" else "bf16", self.input.train.optimizer]
        return replace(held, gradient=2) if self.input.train.grad_dtype == "bf16" else held

    @cached_property
    def state(self) -> tuple[StageState, ...]:
        """F4, of each stage; empty where the layers cannot be spread."""
        if self.stages is None:
            return ()
        return training_state(
            self.model,
            self.layout,
            self.state_bytes,
            self.input.train.optimizer_offload,
            2 if self.input.train.critic else 1,
        )

    def stage_activations(self, stage: int, recompute: str | None = None) -> Activations:
        """F5, of one stage; without GPUs that of the local path, which has no stages and recomputes nothing."""
        if self.on_cpu:
            local = local_kept(self)
            return Activations(local.layers + local.masks, local.scored + local.passing)
        state = self.state[stage]
        last = stage == self.layout.pp - 1
        kept = activations(
            self.model,
            self.layout,
            tokens=self.max_tokens_per_gpu * self.layout.cp,
            layers=state.layers,
            dense_layers=state.layers - state.moe_layers,
            microbatches=self.microbatches if self.layout.pp > 1 else 1,
            recompute=recompute or self.recompute,
            last=last,
            entropy=self.input.train.entropy,
            logit_tokens=self.input.train.logprob_chunk_tokens,
        )
        # F5 counts 16 bits; its logits have a copy in 32 bits as it is.
        return replace(kept, layers=2 * kept.layers) if self.train_dtype == "fp32" else kept

    def train_bytes(self, recompute: str | None = None) -> tuple[float, ...]:
        """Memory of each stage's GPU in training, in all."""
        return tuple(each.total for each in self.stage_memories(recompute))

    def stage_memories(self, recompute: str | None = None) -> tuple[StageMemory, ...]:
        """Memory of each stage's GPU in training, item by item; empty where the layers cannot be spread."""
        return self._memories if recompute is None else stage_memories(self, recompute)

    @cached_property
    def _memories(self) -> tuple[StageMemory, ...]:
        return stage_memories(self)

    @cached_property
    def worst_train_bytes(self) -> float:
        """Of the fullest GPU, as it was measured or by formula; 0 where unknown."""
        return self.input.workload.measured.peak_train_bytes or max(self.train_bytes(), default=0.0)

    @cached_property
    def worst_stage(self) -> int:
        """The stage of the fullest GPU."""
        held = self.train_bytes()
        return held.index(max(held)) if held else 0

    @cached_property
    def engines(self) -> tuple[EngineShape, ...]:
        """Kinds of engines: one, or prefill and decode; empty where they run elsewhere."""
        return engine_shapes(self)

    @cached_property
    def decoding(self) -> EngineShape | None:
        """The engines that sample; None: they run elsewhere."""
        return self.engines[-1] if self.engines else None

    @cached_property
    def pool(self) -> EnginePool | None:
        """F6, of one GPU of an engine that samples."""
        return self.decoding.pool if self.decoding else None

    @cached_property
    def sampling_engines(self) -> int:
        """Engines that sample, ours or others'; at least 1."""
        return self.decoding.count if self.decoding else max(1, len(self.external_urls))

    @cached_property
    def running(self) -> float:
        """Rollouts that one sampling engine has at a time."""
        return requests_of(self, self.sampling_engines)

    @cached_property
    def swapped_bytes(self) -> float:
        """That leave a GPU and come back in one step, where training and engines take turns: each direction counts."""
        worst = self._memories[self.worst_stage].state if self._memories and self.offload_train else 0.0
        weights = self.pool.weights if self.pool and self.offload_rollout else 0.0
        return 2 * (worst + weights) if self.colocated else 0.0

    @cached_property
    def swap_s(self) -> float:
        """Seconds that taking turns costs a step. A guess."""
        return self.swapped_bytes / self.input.hardware.pcie_bw

    @cached_property
    def held(self) -> Held:
        """F14: what rollouts keep in the caches of one sampling engine."""
        return held_of(self)

    @cached_property
    def fit_running(self) -> int | None:
        """Rollouts that one sampling engine has room for; None: nothing is known to bind."""
        return fit_of(self)

    @cached_property
    def sent_bytes(self) -> float:
        """S: of a full publish, in the type that engines keep weights in."""
        return self.parameters.total * WEIGHT_BYTES[weight_dtype(self)]

    @cached_property
    def delta(self) -> Delta:
        """F9: a publish of changes beside one of everything, both through a folder."""
        return delta_of(self)

    @cached_property
    def pd_flow(self) -> PdFlow | None:
        """F12; None where prompts and completions are not apart, or the device is not known."""
        return pd_flow_of(self)

    @cached_property
    def second_cache(self) -> SecondCache | None:
        """F13; None without hicache."""
        return second_cache_of(self)

    @cached_property
    def boxes(self) -> BoxDemand | None:
        """F16; None without a sandbox, or where a step's time is not known."""
        return box_demand(self)

    @cached_property
    def zero_variance(self) -> float:
        """F15: share of groups that teach nothing."""
        return zero_variance(self.input.workload.success_rate, self.input.algo.group_size)

    @cached_property
    def optimizer_host_bytes(self) -> float:
        """Of one node, where the optimizer is offloaded: a node may hold one stage alone."""
        ranks = min(self.input.hardware.gpus_per_node, self.train_gpus)
        return ranks * max((stage.host_bytes for stage in self.state), default=0.0)

    @cached_property
    def times(self) -> Times | None:
        """F7 to F11; None: nothing is known of the device."""
        return times_of(self)


def build(given: PlanInput, model: ModelDims | None, findings: tuple[Finding, ...]) -> Case | None:
    """The case of an input; None where its model is not known or something could not be read."""
    if model is None or any(each.code in UNREAD for each in findings):
        return None
    return Case(given, model)
