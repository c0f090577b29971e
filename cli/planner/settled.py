"""What an input leaves out, settled: mode, numbers of GPUs, types, batches. No formula of memory or time. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from palestra.cli.planner.inputs import PlanInput
from palestra.cli.planner.presets import DEVICES, Device
from palestra.server.config import ScheduleConfig
from palestra.trainer.config import BY_ROW
from palestra.trainer.layout.types import Layout, ModelDims


@dataclass(frozen=True)
class Settled:
    """An input whose model is known. Values are computed at their first use and kept."""

    input: PlanInput
    model: ModelDims

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
        """colocated, separate, external or cpu. Where nothing is said of GPUs that there are, engines with URLs are elsewhere."""
        if self.input.placement.mode is not None:
            return self.input.placement.mode
        if self.input.hardware.gpu == "cpu":
            return "cpu"
        if self.external_urls:
            return "external"
        return "colocated" if self.input.schedule.colocated else "separate"

    @cached_property
    def external_urls(self) -> tuple[str, ...]:
        """Engines that others run, each once: both tables may name the same."""
        return tuple(dict.fromkeys((*self.input.rollout.urls, *self.input.placement.external_urls)))

    @cached_property
    def reference_gpus(self) -> int:
        """GPUs that only compute the reference policy."""
        given = self.input.placement
        return max(1, given.reference_gpus) if given.reference == "separate_gpus" else 0

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
            return max(0, self.gpus_there - taken - self.reference_gpus)
        return max(0, self.gpus_there - self.reference_gpus)

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
        return max(0, self.gpus_there - self.train_gpus - self.reference_gpus)

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
        """A name of `algo.ratio_correction`; what it is where nothing is said is the trainer's rule."""
        algo = self.input.algo
        needed = self.staleness > 0 or algo.veto_floor is not None or algo.loss in BY_ROW
        return algo.ratio_correction or ("tis" if needed else "none")

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
