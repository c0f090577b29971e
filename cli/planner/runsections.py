"""The tables of a run's file about engines, batches, schedule, weights, workload and boxes, as a plan reads them (see `sections.py`)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.envs.config import Section


class PlanPd(Section):
    """`[rollout.pd]`: prompts are computed by some engines and completions by others."""

    table: ClassVar[str] = "rollout.pd"
    prefill_gpus: int = Field(ge=1)
    decode_gpus: int = Field(ge=1)
    prefill_gpus_per_engine: int = Field(1, ge=1)
    decode_gpus_per_engine: int = Field(1, ge=1)
    transfer: Literal["mooncake", "nixl", "mori", "ascend", "mooncake_tcp", "fake"] = "mooncake"
    """How caches travel from one to the other."""
    ib_device: str | None = None


class PlanRollout(Section):
    """`[rollout]`: the engines."""

    table: ClassVar[str] = "rollout"
    engine: Literal["embedded", "sglang", "openai"] = "embedded"
    engines: int | None = Field(None, ge=1)
    """None: as many as the rollout's GPUs are enough for."""
    gpus_per_engine: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    dp_attention: bool = False
    mem_fraction: float | None = Field(None, ge=0.1, le=0.97)
    """None: 0.85, and 0.7 where colocated."""
    context_len: int = Field(2048, ge=32)
    max_running: int | None = Field(None, ge=1)
    max_total_tokens: int | None = Field(None, ge=256)
    weight_dtype: Literal["bf16", "fp32", "fp8", "int4"] | None = None
    """None: that of training."""
    kv_dtype: Literal["auto", "bf16", "fp32", "fp8_e4m3", "fp8_e5m2"] = "auto"
    ssm_dtype: Literal["default", "fp32", "bf16"] = "default"
    conv_dtype: Literal["bf16", "fp32"] = "bf16"
    state_ratio: float = Field(0.9, gt=0)
    state_slots_pin: int | None = Field(None, ge=1)
    state_strategy: Literal["extra_buffer", "extra_buffer_lazy", "no_buffer", "no_radix"] = "extra_buffer"
    prefix_cache: bool = True
    attention_backend: str | None = None
    deterministic: bool | None = None
    """None: as training."""
    draft_tokens: int = Field(0, ge=0)
    hicache: bool = False
    hicache_ratio: float | None = Field(None, gt=0)
    """None: 2, or less where the host has not so much."""
    hicache_on: Literal["prefill", "decode", "all"] = "prefill"
    """Which engines have a second cache where prompts and completions are apart; ours that compute prompts."""
    pd: PlanPd | None = None
    router: Literal["sglang-router", "smg", "none"] = "sglang-router"
    router_policy: Literal["cache_aware", "consistent_hashing", "round_robin", "manual", "random", "power_of_two"] = (
        "consistent_hashing"
    )
    routing_key: bool = True
    """Whether requests carry their group's id for the router; ours always do."""
    stock_router: bool = False
    """Whether the router is started by its own command line, `python -m sglang_router.launch_router`, in place of ours."""
    memory_saver: bool | None = None
    """None: where the rollout is offloaded."""
    urls: list[str] = Field(default_factory=list)
    agents: dict[str, str] = Field(default_factory=dict)
    """Engine's URL -> URL of the host agent that puts its deltas together."""
    partial_ids: bool = True
    """Whether an aborted request is answered with what it had sampled; by the embedded engine and SGLang it is."""
    flush_on_publish: bool = True
    """Whether caches are flushed, or salted, when weights change; ours always are."""
    quantised_checkpoint: bool = False
    """Whether engines start from a folder with a quantization_config; `weights.engine_model` says the same."""
    retries: int = Field(1, ge=0)


class PlanAlgo(Section):
    """`[algo]`: batch, context, sampling, loss."""

    table: ClassVar[str] = "algo"
    groups_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    min_group: int = Field(1, ge=1)
    """Rollouts with a reward that a group needs to be trained."""
    updates_per_batch: int = Field(1, ge=1)
    global_batch: int | None = Field(None, ge=1)
    """Rollouts of one optimizer step; None: groups_per_step * group_size / updates_per_batch."""
    oversample: float = Field(1.0, ge=1)
    drop_zero_variance: bool = True
    max_prompt: int | None = Field(None, ge=1)
    """None: what the window leaves."""
    max_response: int = Field(256, ge=1)
    max_turns: int = Field(8, ge=1)
    max_observation: int = Field(0, ge=0)
    max_context: int | None = Field(None, ge=1)
    """None: the engine's window."""
    estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "gspo", "ppo"
    ] = "grpo"
    std_normalise: bool = True
    advantage: str | None = None
    loss: str = "ppo"
    """ppo, gspo, gspo_token, cispo, reinforce, or the import path of one."""
    """A user's own in place of the estimator."""
    turn_discount: float | None = Field(None, gt=0, le=1)
    reduction: Literal["rollout_mean", "token_mean", "prompt_mean", "constant"] = "rollout_mean"
    reduction_tokens: int | None = Field(None, ge=1)
    kl_coef: float = Field(0.0, ge=0)
    ratio_correction: Literal["none", "tis", "mask", "seq_mask", "seq_tis", "seq_mis", "geo_mask"] | None = None
    """None: tis where tokens may be older than the weights that they train."""
    veto_floor: float | None = Field(None, gt=0, lt=1)
    clip_low: float | None = Field(None, ge=0)
    clip_high: float | None = Field(None, ge=0)
    clip: bool = True
    """false: the ratio is not clipped at all."""
    temperature: float = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    """Of tasks and environments."""
    engine_seed: int | None = None
    """Of each request's sampling."""
    mask_truncated: bool = False
    """Whether rollouts that a limit cut are left out of the loss."""


class PlanSchedule(Section):
    """`[schedule]`: who waits for whom."""

    table: ClassVar[str] = "schedule"
    kind: Literal["sync", "one_step_off", "async"] = "sync"
    max_staleness: int | None = Field(None, ge=0)
    max_in_flight: int | None = Field(None, ge=1)
    publish_every: int | None = Field(None, ge=1)
    """Optimizer steps; None: one batch's."""
    too_old: Literal["drop", "mask"] = "drop"
    partial: Literal["off", "resume"] = "off"
    partial_old_tokens: Literal["train", "mask"] = "train"
    generation_budget_s: float | None = Field(None, gt=0)
    generation_budget_tokens: int | None = Field(None, ge=1)
    update_mode: Literal["finish", "retract", "in_place", "abort"] = "retract"
    deadline_s: float = 900.0
    colocated: bool = False


class PlanWeights(Section):
    """`[weights]`: how new weights reach engines."""

    table: ClassVar[str] = "weights"
    transport: Literal["ipc", "nccl", "disk", "gloo", "none", "tensor", "distributed"] | None = None
    """None: ipc where colocated, nccl where separate, disk where external or without GPUs. `tensor` is the run's word for ipc,
    `distributed` for nccl between GPUs and gloo otherwise."""
    mode: Literal["full", "delta"] = "full"
    shared_dir: str | None = None
    local_dir: str | None = None
    agents: bool = True
    """Delta: whether a host agent puts deltas together on the engines' hosts; a stock engine cannot."""
    routable: bool = True
    """Whether engines that run elsewhere can join the trainer's NCCL group: GPUs of the same vendor, addresses that both sides reach."""
    bracketed: bool = True
    """Whether updates go between begin_weight_update and end_weight_update; ours always do."""
    bucket_bytes: int = Field(512 * 2**20, ge=1)
    t0_s: float = Field(1.0, ge=0)
    """Fixed cost of a publish, seconds."""
    verify: Literal["checksum", "none"] = "checksum"
    delta_encoding: Literal["overwrite", "xor"] = "overwrite"
    engine_model: str | None = None


class PlanMeasured(Section):
    """`[workload.measured]`: what replaces a guess."""

    table: ClassVar[str] = "workload.measured"
    prefill_tok_s: float | None = Field(None, gt=0)
    """Prompt tokens per second of one engine."""
    decode_tok_s: float | None = Field(None, gt=0)
    """Sampled tokens per second of one engine."""
    train_tok_s: float | None = Field(None, gt=0)
    """Trained tokens per second of one GPU, or of the CPU."""
    publish_s: float | None = Field(None, gt=0)
    mfu: float | None = Field(None, gt=0, le=1)
    """Share of the peak that training reaches."""
    delta_density: float | None = Field(None, ge=0, le=1)
    """Share of the weights' bytes that change in a publish."""
    kv_bw: float | None = Field(None, gt=0)
    """Bytes per second of caches from prefill to decode engines."""
    prefix_hit: float | None = Field(None, ge=0, le=1)
    """Share of prompt tokens that are found in a second cache."""
    peak_train_bytes: float | None = Field(None, gt=0)


class PlanWorkload(Section):
    """`[workload]`: what rollouts are like on average. Only the planner reads it."""

    table: ClassVar[str] = "workload"
    prompt_tokens: int | None = Field(None, ge=1)
    """Mean; None: half of algo.max_prompt."""
    response_tokens: int | None = Field(None, ge=1)
    """Mean of a turn; None: half of algo.max_response."""
    response_p99: int | None = Field(None, ge=1)
    """Of a turn; None: algo.max_response."""
    observation_tokens: int = Field(0, ge=0)
    """Mean of a turn."""
    turns: float | None = Field(None, ge=1)
    """Mean; None: algo.max_turns."""
    tool_s: float = Field(0.0, ge=0)
    """Of a turn."""
    judge_s: float = Field(0.0, ge=0)
    """Of a rollout."""
    success_rate: float = Field(0.5, ge=0, le=1)
    measured: PlanMeasured = PlanMeasured()


class PlanSandbox(Section):
    """`[sandbox]`: boxes for code that a model wrote."""

    table: ClassVar[str] = "sandbox"
    backend: Literal["none", "auto", "bubblewrap", "docker", "landlock", "remote", "unsafe_subprocess"] | None = None
    """None: auto where the table says anything, else none."""
    boxes: int | None = Field(None, ge=0)
    per_episode: bool = True
    create_s: float | None = Field(None, ge=0)
    busy_s: float | None = Field(None, ge=0)
    """Of an episode's own box. None: from its first tool call to its end."""
    destroy_s: float | None = Field(None, ge=0)
    memory_bytes: int = Field(256 * 2**20, ge=1)
    total_memory_bytes: int | None = Field(None, ge=1)
    """Of all boxes together; None: all of them at their limits."""
    pids: int | None = Field(None, ge=1)
    fresh_grader: bool = True
    network: str = "none"
    i_understand: bool = False
    judged_code: bool = True
    """Whether code that a model wrote is judged."""


class PlanRun(Section):
    """`[run]`: how long, and what stays on disk."""

    table: ClassVar[str] = "run"
    save_dir: str = "runs"
    name: str = "run"
    steps: int = Field(10, ge=1)
    save_every: int = Field(5, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    dump: str | None = None
    free_disk_bytes: int | None = Field(None, ge=0)
    buffer_dir: str | None = None
    buffer_on_network: bool = False
    """Whether buffer_dir is on a network file system."""
    wall_clock_s: float | None = Field(None, gt=0)
