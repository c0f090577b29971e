"""The trainer's sections of a run's file: `[train]`, `[optim]`, `[algo]`, `[weights]`, `[sft]`. Nothing heavy is imported.

Keys of the specification that this build cannot honour are refused by name; values too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from palestra.agents.config import GroupsConfig
from palestra.envs.config import Section


def _only(path: str, value: Any, built: tuple[str, ...]) -> Any:
    if value not in built:
        raise ValueError(f"not built: {path} = {value!r}; use {' or '.join(map(repr, built))}")
    return value


class TrainConfig(Section):
    """`[train]`: how a step is computed."""

    table: ClassVar[str] = "train"
    not_built: ClassVar[frozenset[str]] = frozenset(
        {
            "tp",
            "pp",
            "vpp",
            "cp",
            "ep",
            "etp",
            "sp",
            "first_stage_layers",
            "last_stage_layers",
            "grad_dtype",
            "optimizer",
            "distributed_optimizer",
            "optimizer_offload",
            "recompute",
            "micro_batch",
            "dynamic_batch",
            "per_token_loss",
            "aux_loss_coef",
            "z_loss_coef",
            "mtp_loss",
            "router_replay",
            "entropy",
            "critic",
            "deterministic",
            "grouped_gemm",
            "mcore_version",
        }
    )
    dtype: str = "fp32"
    """What weights, gradients and moments are kept in."""
    threads: int | None = Field(None, ge=1)
    """Threads of the trainer's arithmetic on a CPU; None: torch's own choice."""
    max_tokens_per_gpu: int = Field(1024, ge=1)
    """Distinct tokens that go through the model at once: a prompt that rows share counts once."""
    logprob_chunk_tokens: int = Field(0, ge=0)
    """Predictions whose logits exist at a time, the others being computed again in the backward pass; 0: all of a micro-batch."""

    @field_validator("dtype")
    @classmethod
    def _dtype(cls, value: str) -> str:
        return str(_only("train.dtype", value, ("fp32",)))


class OptimConfig(Section):
    """`[optim]`: AdamW."""

    table: ClassVar[str] = "optim"
    lr: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from lr / warmup_steps."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices; norms do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0: no clipping."""
    schedule: str = "constant"

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return str(_only("optim.schedule", value, ("constant",)))

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("optim.betas must lie in [0, 1)")
        return value


class AlgoConfig(GroupsConfig):
    """`[algo]`: groups and how they are sampled (inherited), and what is learned from them."""

    not_built: ClassVar[frozenset[str]] = GroupsConfig.not_built | frozenset(
        {
            "global_batch",
            "max_prompt",
            "max_observation",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
        }
    )
    estimator: str = "grpo"
    std_normalise: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty against the weights that the run started from; 0: none, and no second forward pass."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps over which the rollouts of a batch are spread."""
    ratio_correction: Literal["none", "tis", "mask", "seq_mask"] | None = None
    """What is done about tokens that another policy sampled than the one they train. none: the clipped ratio is taken against the engine's
    logprobs. The others clip it against the trainer's own logprobs before the step, and weight each token by the ratio of those to the
    engine's: at most ratio_clip (tis); tokens whose ratio lies outside [1 / ratio_clip, ratio_clip] left out (mask); rows whose mean ratio
    lies outside [1 / sequence_clip, sequence_clip] left out, the others as in tis (seq_mask). None: tis where the schedule lets tokens be
    older than the weights that they train, else none."""
    ratio_clip: float = Field(2.0, gt=1, allow_inf_nan=False)
    """Bound of a single token's correction."""
    sequence_clip: float = Field(1.1, gt=1, allow_inf_nan=False)
    """Bound of the geometric mean of a row's ratios (seq_mask)."""
    age_decay: float = Field(1.0, gt=0, le=1)
    """A token's weight is multiplied by this for each policy version that it is older than the weights it trains; 1: age does not count."""

    @field_validator("estimator")
    @classmethod
    def _estimator(cls, value: str) -> str:
        return str(_only("algo.estimator", value, ("grpo",)))

    @model_validator(mode="after")
    def _clips_fit(self) -> AlgoConfig:
        kind, given = self.ratio_correction, self.model_fields_set
        if kind == "none" and "ratio_clip" in given and self.ratio_clip != 2.0:
            raise ValueError("algo.ratio_clip has no effect when algo.ratio_correction is 'none'; remove it")
        if kind != "seq_mask" and "sequence_clip" in given and self.sequence_clip != 1.1:
            raise ValueError("algo.sequence_clip needs algo.ratio_correction = 'seq_mask'")
        return self


class WeightsConfig(Section):
    """`[weights]`: how new weights reach the engines."""

    table: ClassVar[str] = "weights"
    not_built: ClassVar[frozenset[str]] = frozenset({"t0_s"})
    transport: str = "disk"
    """`disk`: a Hugging Face folder that engines read; `tensor`: memory that trainer and engines share on one machine; `distributed`: a
    broadcast from the trainer to all engines, over nccl between GPUs and gloo otherwise."""
    mode: Literal["full", "delta"] = "full"
    """`delta` (disk only): only bytes that changed are written; `palestra engine agent` puts them together on the engines' hosts."""
    shared_dir: Path | None = None
    """Where folders and deltas are written; None: `weights` in the run. Engines, or their agents, must see it under the same name."""
    base_every: int = Field(20, ge=1)
    """Publishes between full folders where the mode is delta: so many deltas an agent that comes late has to apply at most."""
    delta_encoding: Literal["overwrite", "xor"] = "overwrite"
    """How changed bytes are written: as they are now, or as the difference to before, which also undoes."""
    engine_model: Path | None = None
    """Folder that engines are started with, where it is not the trained one: block-quantised by `palestra convert`. Weights are quantised
    as its config.json says before they travel. None: engines run the trained model."""
    canary: bool = True
    """Whether the logprobs of a short text are compared between trainer and every engine after each publish."""
    bucket_bytes: int = Field(512 * 2**20, ge=1)
    """Largest piece at a time: of a request's body, or of a file of the folder. A larger tensor goes alone."""
    verify: Literal["checksum", "none"] = "checksum"
    """`checksum`: what was written is read back and compared before an engine is told of it."""

    @model_validator(mode="after")
    def _fits(self) -> WeightsConfig:
        if self.mode == "delta" and self.transport != "disk":
            raise ValueError(f'weights.mode = "delta" needs weights.transport = "disk", not {self.transport!r}')
        return self

    @field_validator("transport")
    @classmethod
    def _transport(cls, value: str) -> str:
        return str(_only("weights.transport", value, ("disk", "tensor", "distributed")))


class SftConfig(Section):
    """`[sft]`: a supervised warm start before the first rollout."""

    table: ClassVar[str] = "sft"
    data: Path
    """A JSONL file, one {"messages": [...], "tools": [...]} a line."""
    steps: int = Field(100, ge=1)
    batch_size: int = Field(16, ge=1)
    """Transcripts of one step."""
    lr: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: falling to a tenth of lr, or staying."""
    seed: int = 0
    """Of the order in which transcripts are drawn."""
