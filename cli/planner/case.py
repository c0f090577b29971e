"""What rules and quantities are computed from: an input with everything derived that was left out.

In: a `PlanInput`. Out: a `Case`, or findings where there is no model to speak of. Values that are costly or that few rules ask for are
computed at their first use and kept. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from palestra.cli.planner.engines import EngineShape, engine_shapes
from palestra.cli.planner.inputs import UNREAD, PlanInput
from palestra.cli.planner.memory import (
    FRAGMENTATION,
    RUNTIME_BYTES,
    STATE,
    Activations,
    EnginePool,
    StageState,
    activations,
    training_state,
)
from palestra.cli.planner.model import Parameters, parameters
from palestra.cli.planner.presets import DEVICES, Device
from palestra.cli.planner.workload import Times, Work, times_of, work_of
from palestra.envs.findings import Finding
from palestra.server.config import ScheduleConfig
from palestra.trainer.layout.types import Layout, ModelDims, stage_layers


@dataclass(frozen=True)
class Case:
    """An input whose model is known."""

    input: PlanInput
    model: ModelDims

    @cached_property
    def parameters(self) -> Parameters:
        """F1."""
        return parameters(self.model)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether there are no GPUs."""
        return self.mode == "cpu"

    @cached_property
    def device(self) -> Device | None:
        """One GPU, with what was given in place of the preset; None: unknown (custom without its numbers, or a name nobody knows)."""
        given = self.input.hardware
        known = DEVICES.get(given.gpu)
        if known is None:
            if given.gpu_mem_bytes is None or given.gpu_flops is None or given.gpu_hbm is None:
                return None
            return Device(given.gpu_mem_bytes, given.gpu_flops, given.gpu_hbm, "given")
        return replace(
            known,
            memory_bytes=given.gpu_mem_bytes or known.memory_bytes,
            flops=given.gpu_flops or known.flops,
            hbm=given.gpu_hbm or known.hbm,
        )

    @cached_property
    def mode(self) -> str:
        """colocated, separate, external or cpu."""
        return self.input.placement.mode or ("cpu" if self.input.hardware.gpu == "cpu" else "separate")

    @property
    def colocated(self) -> bool:
        """Whether rollout and training take turns on the same GPUs."""
        return self.mode == "colocated"

    @cached_property
    def gpus_there(self) -> int:
        """On all nodes together."""
        return 0 if self.on_cpu else self.input.hardware.gpus_per_node * self.input.hardware.nodes

    @cached_property
    def train_gpus(self) -> int:
        """N_T; 1 on a CPU, where one process trains."""
        given = self.input.placement
        if given.train_gpus is not None:
            return given.train_gpus
        if self.on_cpu:
            return 1
        if self.mode == "separate":
            taken = given.rollout_gpus if given.rollout_gpus is not None else self.gpus_there // 2
            return max(0, self.gpus_there - taken - given.reference_gpus)
        return self.gpus_there

    @cached_property
    def rollout_gpus(self) -> int:
        """N_R; 0 where engines run elsewhere or without GPUs."""
        given = self.input.placement
        if self.mode in ("external", "cpu"):
            return given.rollout_gpus or 0
        if given.rollout_gpus is not None:
            return given.rollout_gpus
        if self.colocated:
            return self.train_gpus
        if self.input.rollout.pd is not None:
            return self.input.rollout.pd.prefill_gpus + self.input.rollout.pd.decode_gpus
        return max(0, self.gpus_there - self.train_gpus - given.reference_gpus)

    @cached_property
    def offload_train(self) -> bool:
        """Whether training leaves the GPU while engines sample."""
        given = self.input.placement.offload_train
        return self.colocated if given is None else given

    @cached_property
    def offload_rollout(self) -> bool:
        """Whether engines give their memory up while training."""
        given = self.input.placement.offload_rollout
        return self.colocated if given is None else given

    @cached_property
    def layout(self) -> Layout:
        """How training is spread."""
        given = self.input.train
        return Layout(
            gpus=self.train_gpus,
            tp=given.tp,
            pp=given.pp,
            vpp=given.vpp,
            cp=given.cp,
            ep=given.ep,
            etp=given.etp,
            sp=self.sp,
            first_stage_layers=given.first_stage_layers,
            last_stage_layers=given.last_stage_layers,
            distributed_optimizer=given.distributed_optimizer,
        )

    @cached_property
    def sp(self) -> bool:
        """Sequence parallel regions."""
        given = self.input.train
        return given.tp > 1 if given.sp is None else given.sp

    @cached_property
    def train_dtype(self) -> str:
        """bf16, fp32 or fp8."""
        return self.input.train.dtype or ("fp32" if self.on_cpu else "bf16")

    @cached_property
    def recompute(self) -> str:
        """none, selective or full."""
        return self.input.train.recompute or ("none" if self.on_cpu else "full")

    @cached_property
    def deterministic_engine(self) -> bool:
        """Batch-invariant kernels in the engines."""
        given = self.input.rollout.deterministic
        return self.input.train.deterministic if given is None else given

    @cached_property
    def memory_saver(self) -> bool:
        """Whether engines can give their memory up."""
        given = self.input.rollout.memory_saver
        return self.offload_rollout if given is None else given

    @cached_property
    def grouped_gemm(self) -> bool:
        """Whether experts are multiplied together."""
        given = self.input.train.grouped_gemm
        return (not self.on_cpu) if given is None else given

    @cached_property
    def rollouts(self) -> int:
        """R: of one batch."""
        return self.input.algo.groups_per_step * self.input.algo.group_size

    @cached_property
    def global_batch(self) -> int:
        """B: rollouts of one optimizer step."""
        return self.input.algo.global_batch or max(1, self.rollouts // self.input.algo.updates_per_batch)

    @cached_property
    def publish_every(self) -> int:
        """Optimizer steps between publishes."""
        return self.input.schedule.publish_every or self.input.algo.updates_per_batch

    @cached_property
    def staleness(self) -> int:
        """eta: the bound in force, train steps; -1 where the schedule cannot have one (a rule says why)."""
        given = self.input.schedule
        fields: dict[str, Any] = {"kind": given.kind, "publish_every": self.publish_every}
        if given.kind != "one_step_off":
            fields["max_staleness"] = given.max_staleness
        try:
            return ScheduleConfig.model_construct(**fields).staleness(self.input.algo.updates_per_batch)
        except ValueError:
            return -1

    @cached_property
    def ratio_correction(self) -> str:
        """none, tis, mask or seq_mask."""
        return self.input.algo.ratio_correction or ("tis" if self.staleness > 0 else "none")

    @cached_property
    def max_context(self) -> int:
        """Tokens of one rollout at most."""
        return self.input.algo.max_context or self.input.rollout.context_len

    @cached_property
    def needed_context(self) -> int | None:
        """Tokens that the longest rollout would take; None: prompts have no bound of their own."""
        given = self.input.algo
        if given.max_prompt is None:
            return None
        return given.max_prompt + given.max_turns * (given.max_response + given.max_observation)

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the longest row that can be trained."""
        return min(self.max_context, self.needed_context or self.max_context)

    @cached_property
    def max_tokens_per_gpu(self) -> int:
        """Tokens of one rank's micro-batch."""
        return self.input.train.max_tokens_per_gpu or max(1024, ceil(self.longest_row / self.layout.cp))

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
    def state(self) -> tuple[StageState, ...]:
        """F4, of each stage; empty where the layers cannot be spread."""
        if self.stages is None:
            return ()
        held = STATE["fp32" if self.train_dtype == "fp32" else "bf16", self.input.train.optimizer]
        if self.input.train.grad_dtype == "bf16":
            held = replace(held, gradient=2)
        return training_state(
            self.model, self.layout, held, self.input.train.optimizer_offload, 2 if self.input.train.critic else 1
        )

    def stage_activations(self, stage: int, recompute: str | None = None) -> Activations:
        """F5, of one stage."""
        state = self.state[stage]
        last = stage == self.layout.pp - 1
        return activations(
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

    def train_bytes(self, recompute: str | None = None) -> tuple[float, ...]:
        """Memory of each stage's GPU in training: state, activations, reference, runtime."""
        found = []
        for state in self.state:
            reference = 0.0
            if self.input.placement.reference == "shared":
                reference = 2.0 * (state.dense_parameters + state.expert_parameters)
            held = state.gpu_bytes + reference + self.stage_activations(state.stage, recompute).total
            found.append(held * FRAGMENTATION + RUNTIME_BYTES)
        return tuple(found)

    @cached_property
    def worst_train_bytes(self) -> float:
        """Of the fullest GPU; 0 where unknown."""
        return max(self.train_bytes(), default=0.0)

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
    def running(self) -> float:
        """Rollouts that one sampling engine has at a time: those of a batch, or what the schedule lets be in flight."""
        engines = max(1, self.decoding.count if self.decoding else len(self.input.rollout.urls) or 1)
        most = self.input.schedule.max_in_flight or self.rollouts
        return min(most, self.rollouts) / engines

    @cached_property
    def times(self) -> Times | None:
        """F7 to F11; None: nothing is known of the device."""
        return times_of(self)


def build(given: PlanInput, model: ModelDims | None, findings: tuple[Finding, ...]) -> Case | None:
    """The case of an input; None where its model is not known or something could not be read."""
    if model is None or any(each.code in UNREAD for each in findings):
        return None
    return Case(given, model)
