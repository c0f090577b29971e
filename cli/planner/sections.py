"""The tables of a run's file as a plan reads them: what a run has, what it will have, and two that only the planner reads.

A field that is None is derived (`case.py`) or unknown; names and meanings are those of the run's own sections where they have the field.
Ranges are checked here, what goes with what by rules.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from palestra.envs.config import Section


class PlanModel(Section):
    """`[model]`: a preset, dimensions, or both with `override`."""

    table: ClassVar[str] = "model"
    path: str | None = None
    preset: str | None = None
    """A model of presets.toml."""
    override: bool = False
    """Dimensions that are given besides a preset are meant: they win."""
    layers: int | None = Field(None, ge=1)
    hidden: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    ffn: int | None = Field(None, ge=0)
    vocab: int | None = Field(None, ge=1)
    tied: bool | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    attn_gate: bool | None = None
    max_position: int | None = Field(None, ge=1)
    experts: int | None = Field(None, ge=0)
    topk: int | None = Field(None, ge=0)
    moe_ffn: int | None = Field(None, ge=0)
    shared_ffn: int | None = Field(None, ge=0)
    dense_layers: int | None = Field(None, ge=0)
    shared_gate: bool | None = None
    expert_bias: bool | None = None
    q_lora: int | None = Field(None, ge=0)
    kv_lora: int | None = Field(None, ge=0)
    nope_dim: int | None = Field(None, ge=0)
    rope_dim: int | None = Field(None, ge=0)
    v_dim: int | None = Field(None, ge=0)
    index_dim: int | None = Field(None, ge=0)
    linear_layers: int | None = Field(None, ge=0)
    lin_k_heads: int | None = Field(None, ge=0)
    lin_v_heads: int | None = Field(None, ge=0)
    lin_k_dim: int | None = Field(None, ge=0)
    lin_v_dim: int | None = Field(None, ge=0)
    lin_conv: int | None = Field(None, ge=0)
    linear_kind: Literal["gdn", "kda", "mamba2"] | None = None
    mtp_layers: int | None = Field(None, ge=0)


class PlanHardware(Section):
    """`[hardware]`: the machines. Only the planner reads it."""

    table: ClassVar[str] = "hardware"
    gpu: str = "cpu"
    """A device of presets.toml, `cpu`, or `custom` with the three numbers below."""
    gpu_mem_bytes: int | None = Field(None, ge=1)
    """Memory of a GPU that a process can have; measured where `palestra doctor` says so."""
    gpu_flops: float | None = Field(None, gt=0)
    """Dense bf16 operations per second."""
    gpu_hbm: float | None = Field(None, gt=0)
    """Bytes per second of its memory."""
    gpus_per_node: int = Field(8, ge=1, le=16)
    nodes: int = Field(1, ge=1)
    host_mem_bytes: int = Field(0, ge=0)
    """Per node; 0: unknown."""
    host_cores: int = Field(0, ge=0)
    """Per node; 0: unknown."""
    nvlink_bw: float = Field(400e9, gt=0)
    """Bytes per second between GPUs of a node, per GPU. A guess, as the four below."""
    nic_bw: float = Field(50e9, gt=0)
    """Bytes per second between nodes, per GPU."""
    pcie_bw: float = Field(50e9, gt=0)
    """Bytes per second between a GPU and its host."""
    disk_bw: float = Field(5e9, gt=0)
    """Bytes per second of a node's own disk."""
    shared_fs_bw: float = Field(5e9, gt=0)
    """Bytes per second of the folder that all nodes see, for all together."""
    rdma: bool = False
    """Whether nodes reach each other's GPU memory without their hosts."""
    shared_dir: str | None = None
    """A folder that all nodes see."""
    local_dir: str | None = None
    """A folder on each node's own disk."""
    shared_free_bytes: int = Field(0, ge=0)
    """0: unknown."""
    local_free_bytes: int = Field(0, ge=0)
    """0: unknown."""


class PlanPlacement(Section):
    """`[placement]`: which GPUs train, which sample."""

    table: ClassVar[str] = "placement"
    mode: Literal["colocated", "separate", "external", "cpu"] | None = None
    """None: cpu without GPUs; external where engines have URLs; colocated with schedule.colocated; else separate."""
    train_gpus: int | None = Field(None, ge=0)
    """None: what the rollout leaves (separate), or all."""
    rollout_gpus: int | None = Field(None, ge=0)
    """None: train_gpus where colocated; else half of all."""
    external_urls: list[str] = Field(default_factory=list)
    """Engines that run elsewhere; `rollout.urls` says the same."""
    reference: Literal["none", "shared", "separate_gpus"] = "none"
    """Where the reference policy of a KL penalty is computed."""
    reference_gpus: int = Field(0, ge=0)
    offload_train: bool | None = None
    """Weights and optimizer leave the GPU while engines sample; None: where colocated."""
    offload_rollout: bool | None = None
    """Engines give their memory up while training; None: where colocated."""
    allow_partial: bool = False
    """Colocated, with another number of GPUs for the rollout."""


class PlanTrain(Section):
    """`[train]`: layout and precision of training."""

    table: ClassVar[str] = "train"
    backend: Literal["megatron", "fsdp"] = "megatron"
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    vpp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)
    sp: bool | None = None
    """None: where tp > 1."""
    first_stage_layers: int | None = Field(None, ge=1)
    last_stage_layers: int | None = Field(None, ge=1)
    dtype: Literal["bf16", "fp32", "fp8"] | None = None
    """None: fp32 on a CPU, else bf16."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    optimizer: Literal["adam", "adam_bf16_moments", "sgd", "muon"] = "adam"
    distributed_optimizer: bool = True
    optimizer_offload: float = Field(0.0, ge=0, le=1)
    recompute: Literal["none", "selective", "full"] | None = None
    """None: none on a CPU, else full."""
    cpu_offloading: bool = False
    """Activations go to the host between forward and backward pass."""
    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """None: the longest row (at least 1,024)."""
    micro_batch: int | None = Field(None, ge=1)
    """Rows of a micro-batch where shapes are fixed."""
    dynamic_batch: bool = True
    per_token_loss: bool = True
    aux_loss_coef: float = Field(0.0, ge=0)
    z_loss_coef: float = Field(0.0, ge=0)
    mtp_loss: bool = False
    router_replay: Literal["off", "training", "rollout"] = "off"
    """rollout: routing of the engine is replayed in training (R3)."""
    expert_bias_rate: float = Field(0.0, ge=0)
    """By which the router's bias moves per step."""
    entropy: bool = True
    logprob_chunk_tokens: int = Field(0, ge=0)
    critic: bool = False
    deterministic: bool = False
    grouped_gemm: bool | None = None
    """None: on GPUs."""
    mcore_version: str = "0.16.1"
    resume_ep: int | None = Field(None, ge=1)
    """Expert parallel size of the checkpoint that is gone on from; None: a new run, or the same."""
    load_optimizer: bool = True
    threads: int | None = Field(None, ge=1)
