"""The trainer's sections of a run's file: `[train]`, `[optim]`, `[algo]`, `[weights]`, `[sft]`. Nothing heavy is imported.

Keys of the specification that this build cannot honour are refused by name; values too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from palestra.agents.config import GroupsConfig
from palestra.envs.config import Section
from palestra.envs.findings import Finding, RefusedError, Severity

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline")
"""By the names of `palestra.trainer.advantages.ESTIMATORS`."""
LOSSES = ("ppo", "gspo", "gspo_token", "cispo", "reinforce")
"""By the names of `palestra.trainer.losses.SURROGATES`, which needs torch."""
Correction: TypeAlias = Literal["none", "tis", "mask", "seq_mask", "seq_tis", "seq_mis", "geo_mask"]
BY_ROW = ("gspo", "gspo_token")
"""Losses whose ratio is a row's mean."""


def _only(path: str, value: Any, built: tuple[str, ...]) -> Any:
    if value not in built:
        raise ValueError(f"not built: {path} = {value!r}; use {' or '.join(map(repr, built))}")
    return value


def _idle(path: str, message: str) -> RefusedError:
    """P721: a bound of a correction that is not made."""
    return RefusedError(Finding("P721", Severity.ERROR, path, message, "remove it"))


def delta_findings(mode: str, transport: str) -> Iterator[Finding]:
    """P605: changed bytes are written as files; by any other way handles or whole buckets travel."""
    if mode == "delta" and transport != "disk":
        message = f'weights.mode = "delta" needs weights.transport = "disk", not {transport!r}'
        yield Finding("P605", Severity.ERROR, "weights.mode", message, suggest={"weights.mode": "full"})


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
            "critic",
            "deterministic",
            "grouped_gemm",
            "mcore_version",
        }
    )
    backend: Literal["megatron", "fsdp"] = "megatron"
    """`fsdp`: transformers' own model under FSDP2, for architectures that megatron's backend does not know, and machines without
    megatron-core."""
    dtype: str = "fp32"
    """What weights, gradients and moments are kept in."""
    threads: int | None = Field(None, ge=1)
    """Threads of the trainer's arithmetic on a CPU; None: torch's own choice."""
    max_tokens_per_gpu: int = Field(1024, ge=1)
    """Distinct tokens that go through the model at once: a prompt that rows share counts once."""
    entropy: bool = True
    """Whether the entropy of the predictions is told, `train/entropy/mean`; megatron's backend computes it from the logits at hand."""
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
    """What a rollout's reward is compared with. grpo: its group's mean, and divided by its deviation; dr_grpo: without the division;
    rloo: the mean of its siblings; reinforce: nothing; reinforce_pp: mean and deviation of the whole batch; reinforce_pp_baseline: its
    group's mean, and divided by the batch's deviation."""
    std_normalise: bool = True
    """Of grpo: divide by the standard deviation of the group's rewards; false makes it dr_grpo."""
    advantage: str | None = None
    """An advantage of the user's in place of the estimator, "package.module:name", see palestra.trainer.types.OwnAdvantage."""
    turn_discount: float | None = Field(None, gt=0, le=1)
    """Credit by turns: the advantage of a turn is made of its own reward and of what follows it, each turn later counting this much less.
    None: every token has the advantage of its rollout."""
    reduction: Literal["rollout_mean", "token_mean", "prompt_mean", "constant"] = "rollout_mean"
    """How the losses of an optimizer step's tokens become one. rollout_mean: the mean over rollouts of the mean over their tokens;
    token_mean: over all tokens; prompt_mean: over groups of the mean over their tokens; constant: the mean over rollouts of the sum over
    their tokens, divided by reduction_tokens."""
    reduction_tokens: int | None = Field(None, ge=1)
    """Of constant: what sums are divided by, such as the most tokens that a rollout can have."""
    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL penalty against the weights that the run started from; 0: none, and no second forward pass."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty is: a term of the loss, or taken from each rollout's reward before advantages (kl_coef times the sum over its
    tokens of log p of the engine less log p of the reference)."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """None: k3 in the loss, k1 in the reward. k2 may stand in the loss too. k1 there would do nothing, since its gradient has the mean 0,
    and k2 or k3 in the reward would push elsewhere than where the divergence falls."""
    loss: str = "ppo"
    """ppo, gspo, gspo_token, cispo or reinforce; or a loss of the user's, "package.module:name", see palestra.trainer.types.Loss."""
    clip_low: float | None = Field(None, gt=0, le=1)
    """The ratio is not followed below 1 - clip_low; 1: however far. None: 0.2, and 0.0003 with gspo, whose ratio is a row's mean."""
    clip_high: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Nor above 1 + clip_high. None: 0.2, and 0.0004 with gspo."""
    entropy_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """What the mean entropy of the predictions is rewarded with; needs train.backend = "megatron"."""
    dual_clip: float | None = Field(None, gt=1, allow_inf_nan=False)
    """Of ppo: where the advantage is negative the ratio is not followed above this. None: however far."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps over which the rollouts of a batch are spread."""
    ratio_correction: Correction | None = None
    """What is done about tokens that another policy sampled than the one they train. none: the clipped ratio is taken against the engine's
    logprobs. The others clip it against the trainer's own logprobs before the step, and weight each token by the ratio of those to the
    engine's: at most ratio_clip (tis); tokens whose ratio lies outside [ratio_floor, ratio_clip] left out (mask); rows whose mean ratio
    lies outside [1 / sequence_clip, sequence_clip] left out, the others as in tis (seq_mask), or as they are (geo_mask). By the product of
    a row's ratios: at most ratio_clip (seq_tis), or rows outside [ratio_floor, ratio_clip] left out (seq_mis). None: tis where the schedule
    lets tokens be older than the weights that they train, with veto_floor, and with gspo, whose bounds are narrower than what engine and
    trainer differ by; else none."""
    ratio_clip: float = Field(2.0, gt=1, allow_inf_nan=False)
    """Bound of a single token's correction, or of a row's product (seq_tis, seq_mis)."""
    ratio_floor: float | None = Field(None, gt=0, lt=1)
    """What mask and seq_mis leave out below; None: 1 / ratio_clip."""
    sequence_clip: float = Field(1.1, gt=1, allow_inf_nan=False)
    """Bound of the geometric mean of a row's ratios (seq_mask, geo_mask)."""
    veto_floor: float | None = Field(None, gt=0, lt=1)
    """A row with one token whose ratio is below it is left out; None: no veto."""
    opsm_delta: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Rows with a negative advantage are left out of the surrogate where the mean of log p of the engine less log p of the policy is above
    it, nats per token; None: none are."""
    age_decay: float = Field(1.0, gt=0, le=1)
    """A token's weight is multiplied by this for each policy version that it is older than the weights it trains; 1: age does not count."""

    @field_validator("estimator")
    @classmethod
    def _estimator(cls, value: str) -> str:
        return str(_only("algo.estimator", value, ESTIMATORS))

    @field_validator("loss")
    @classmethod
    def _loss(cls, value: str) -> str:
        return value if ":" in value else str(_only("algo.loss", value, LOSSES))

    @property
    def by_row(self) -> bool:
        """Whether the ratio is a row's mean."""
        return self.loss in BY_ROW

    @property
    def clip(self) -> tuple[float, float]:
        """The bounds in force, below and above. A row's mean ratio moves far less than a token's: GSPO's own bounds (Zheng et al. 2025,
        section 5.1)."""
        low, high = (3e-4, 4e-4) if self.by_row else (0.2, 0.2)
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def drops_equal_groups(self) -> bool:
        """Whether a group of equal rewards teaches nothing, and is to be dropped: not where something else than its siblings is compared
        with, or more than the sum of rewards."""
        compares = self.estimator not in ("reinforce", "reinforce_pp") and self.advantage is None
        return self.drop_zero_variance and compares and self.turn_discount is None and self.kl_in == "loss"

    def correction(self, off_policy: bool) -> Correction:
        """The correction in force. `off_policy`: whether tokens may be older than the weights that they train."""
        needed = off_policy or self.veto_floor is not None or self.by_row
        return self.ratio_correction or ("tis" if needed else "none")

    @model_validator(mode="after")
    def _advantages_fit(self) -> AlgoConfig:
        if self.estimator != "grpo" and not self.std_normalise:
            raise _idle(
                "algo.std_normalise", f"algo.std_normalise has no effect when algo.estimator is {self.estimator!r}"
            )
        if self.advantage is not None:
            for name, default in (("estimator", "grpo"), ("std_normalise", True), ("turn_discount", None)):
                if getattr(self, name) != default:
                    raise _idle(f"algo.{name}", f"algo.{name} has no effect when algo.advantage is given")
        if self.reduction == "constant" and self.reduction_tokens is None:
            raise ValueError(
                "algo.reduction_tokens must be given when algo.reduction is 'constant': what each rollout's sum is divided by"
            )
        if self.reduction != "constant" and self.reduction_tokens is not None:
            raise _idle("algo.reduction_tokens", "algo.reduction_tokens needs algo.reduction = 'constant'")
        return self

    @model_validator(mode="after")
    def _clips_fit(self) -> AlgoConfig:
        kind, given = self.ratio_correction, self.model_fields_set
        if kind in ("none", "geo_mask") and "ratio_clip" in given and self.ratio_clip != 2.0:
            raise _idle("algo.ratio_clip", f"algo.ratio_clip has no effect when algo.ratio_correction is {kind!r}")
        if kind not in ("seq_mask", "geo_mask") and "sequence_clip" in given and self.sequence_clip != 1.1:
            raise _idle(
                "algo.sequence_clip", "algo.sequence_clip needs algo.ratio_correction = 'seq_mask' or 'geo_mask'"
            )
        if kind not in ("mask", "seq_mis") and self.ratio_floor is not None:
            raise _idle("algo.ratio_floor", "algo.ratio_floor needs algo.ratio_correction = 'mask' or 'seq_mis'")
        if kind == "none" and self.veto_floor is not None:
            raise _idle("algo.veto_floor", "algo.veto_floor has no effect when algo.ratio_correction is 'none'")
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> AlgoConfig:
        if self.loss != "ppo" and self.dual_clip is not None:
            raise _idle("algo.dual_clip", "algo.dual_clip needs algo.loss = 'ppo'")
        for name in ("clip_low", "clip_high"):
            if (self.loss == "reinforce" or ":" in self.loss) and getattr(self, name) is not None:
                raise _idle(f"algo.{name}", f"algo.{name} has no effect when algo.loss is {self.loss!r}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip[1]:
            raise ValueError(
                "algo.dual_clip must be above 1 + algo.clip_high: the ratio would be cut before it is bounded"
            )
        if self.kl_in == "reward" and self.turn_discount is not None:
            raise ValueError(
                "algo.kl_in = 'reward' with algo.turn_discount: the last turn would pay for all of them; use algo.kl_in = 'loss'"
            )
        if not self.kl_coef and self.kl_in == "reward":
            raise _idle("algo.kl_in", "algo.kl_in = 'reward' has no effect without algo.kl_coef")
        if self.kl_estimator is not None and not self.kl_coef:
            raise _idle("algo.kl_estimator", "algo.kl_estimator has no effect without algo.kl_coef")
        if self.kl_estimator is not None and (self.kl_estimator == "k1") != (self.kl_in == "reward"):
            fit = "'k1'" if self.kl_in == "reward" else "'k2' or 'k3'"
            raise ValueError(f"algo.kl_estimator = {self.kl_estimator!r} with algo.kl_in = {self.kl_in!r}: use {fit}")
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
        for finding in delta_findings(self.mode, self.transport):
            raise RefusedError(finding)
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
