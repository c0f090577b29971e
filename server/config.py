"""The service's sections of a configuration: `[rollout]` and `[schedule]`, in the part that every service has and the part that only a
training run has, and `[serve]`, of a service without a trainer.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from palestra.envs.config import Section
from palestra.server.enginerules import (
    experts_dropped,
    idle_fields,
    no_router,
    not_default,
    split_sizes,
    two_sources,
)
from palestra.server.listen import LOOPBACK
from palestra.server.schedulerules import (
    bound,
    bound_findings,
    budget_findings,
    least_findings,
    publish_steps,
    refuse,
    sharing_findings,
)
from palestra.server.types import PublishMode

ENTRY = r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$"
"""An import path and a name in it."""


class PdSection(Section):
    """`[rollout.pd]`: prompts are computed by some engines and completions by others (prefill and decode apart)."""

    table: ClassVar[str] = "rollout.pd"
    prefill_gpus: int = Field(ge=1)
    decode_gpus: int = Field(ge=1)
    prefill_gpus_per_engine: int = Field(1, ge=1)
    decode_gpus_per_engine: int = Field(1, ge=1)
    transfer: Literal["mooncake", "nixl", "mori", "ascend", "mooncake_tcp"] = "mooncake"
    """How the cache travels from one to the other: over RDMA, but for mooncake_tcp."""
    ib_device: str | None = None
    """Network device of the transfer; None: the engine's own choice."""

    @model_validator(mode="after")
    def _whole(self) -> PdSection:
        prefill, decode = self.prefill_gpus_per_engine, self.decode_gpus_per_engine
        refuse(split_sizes(prefill=(self.prefill_gpus, prefill), decode=(self.decode_gpus, decode)))
        return self


class EngineSection(Section):
    """`[rollout]` of any run: the engine that samples."""

    table: ClassVar[str] = "rollout"
    not_built: ClassVar[frozenset[str]] = frozenset(["draft_tokens", "memory_saver"])
    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded: a process of ours on transformers; sglang: real SGLang engines, started by us or given by their URLs."""
    context_len: int = Field(2048, ge=32)
    """Window of the engine: prompt and reply, tokens."""
    max_running: int | None = Field(None, ge=1)
    """Requests that an engine decodes at a time; None: 64 of the embedded engine and of SGLang on a CPU, SGLang's own choice on a GPU."""
    max_total_tokens: int | None = Field(None, ge=256)
    """Tokens that an engine's cache holds; None: 32,768 of the embedded engine, what fits into its memory of SGLang."""
    page_size: int | None = Field(None, ge=1)
    """Tokens of a cache page: whole pages are shared between prompts. None: 16 of the embedded engine, SGLang's own choice."""
    threads: int = Field(2, ge=1)
    """CPU threads of the embedded engine."""
    forced_ids: bool = False
    """A test's switch of the embedded engine: requests may name the ids to be sampled."""
    engines: int = Field(1, ge=1)
    """SGLang engines to start."""
    urls: list[str] = Field(default_factory=list)
    """SGLang engines that run already: they are probed and updated, never started or stopped."""
    router_url: str | None = None
    """A router in front of `urls` that runs already; None: ours is started where there are several engines."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Engine's URL -> URL of the `palestra engine agent` on its host, for engines that get their weights as deltas."""
    agent_token_file: str | None = None
    """File with the token that those agents ask for; None: they ask for none."""
    environment: str | None = None
    """Folder with the engines' own Python environment, made by `palestra engine install`; None: .engine beside the project or in
    ~/.local/share/palestra."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What SGLang computes on; auto: cuda where the machine has an NVIDIA driver."""
    topology: str | None = None
    """A YAML file with groups of engines (see docs/engines.md); then `engines`, `gpus_per_engine` and `pd` are not to be given."""
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one engine: its tensor parallel size."""
    ep: int = Field(1, ge=1)
    """Expert parallel size."""
    dp: int = Field(1, ge=1)
    """Data parallel size within one engine."""
    dp_attention: bool = False
    """Attention by data parallel ranks, experts by all."""
    mem_fraction: float | None = Field(None, ge=0.1, le=0.97)
    """Share of the device's memory for weights and cache; None: 0.85 on a GPU, 0.1 of the host's memory on a CPU."""
    weight_dtype: Literal["bf16", "fp32", "fp8", "int4"] | None = None
    """What engines compute with. fp8: their folder is block-quantised (`palestra convert`, weights.engine_model). None: what the folder
    says, and fp32 on a CPU."""
    kv_dtype: Literal["auto", "bf16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """What keys and values are kept in."""
    ssm_dtype: Literal["default", "fp32", "bf16"] = "default"
    """What the states of linear attention are kept in."""
    conv_dtype: Literal["bf16", "fp32"] = "bf16"
    """What the inputs of its short convolution are kept in."""
    state_ratio: float | None = Field(None, gt=0)
    """Memory for states against memory for keys and values, of models with linear attention."""
    state_slots_pin: int | None = Field(None, ge=1)
    """So many states instead, whatever the ratio."""
    state_strategy: Literal["extra_buffer", "extra_buffer_lazy", "no_buffer"] | None = None
    """How states of shared prefixes are kept."""
    prefix_cache: bool = True
    """Whether prompts share what is equal at their beginnings."""
    attention_backend: str | None = None
    """SGLang's attention kernels; None: its own choice (torch_native on a CPU)."""
    deterministic: bool = False
    """Batch-invariant kernels: seeds are honoured, and slower."""
    hicache: bool = False
    """A second cache in host memory."""
    hicache_ratio: float | None = Field(None, gt=1)
    """Its size against the device's; None: 2, or less where the host has not so much."""
    pd: PdSection | None = None
    router: Literal["sglang-router", "smg", "none"] = "sglang-router"
    """What stands in front of several engines; none: only where there is one."""
    router_policy: Literal["cache_aware", "consistent_hashing", "round_robin", "manual", "random", "power_of_two"] = (
        "consistent_hashing"
    )
    """How the router chooses. With consistent_hashing and manual all turns of a group go to one engine."""
    routed_experts: bool = False
    """Whether the engine reports the experts of every token (routing replay)."""

    @field_validator("weight_dtype")
    @classmethod
    def _precision(cls, value: str | None) -> str | None:
        if value == "int4":
            raise ValueError("not built: rollout.weight_dtype = 'int4'; use 'bf16', 'fp32' or 'fp8'")
        return value

    @model_validator(mode="after")
    def _of_this_engine(self) -> EngineSection:
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        values = {name: getattr(self, name) for name in defaults}
        refuse(idle_fields(self.engine, {name: values[name] for name in self.model_fields_set}, defaults))
        sources = not_default(values, defaults, ("engines", "gpus_per_engine", "pd", "urls"))
        refuse(
            two_sources(
                sources, topology=self.topology is not None, split=self.pd is not None, external=bool(self.urls)
            )
        )
        if self.router_url is not None and not self.urls:
            raise ValueError("rollout.router_url is of engines that run already: rollout.urls must name them")
        refuse(no_router(self.router, max(self.engines, len(self.urls)), self.pd is not None))
        if self.routed_experts and self.engine == "sglang":
            refuse(experts_dropped(self.router, self.routed))
        return self

    @property
    def running(self) -> int:
        """Requests of an engine at a time, as far as the configuration tells."""
        return 64 if self.max_running is None else self.max_running

    @property
    def routed(self) -> bool:
        """Whether a router stands in front of the engines."""
        many = self.engines > 1 or len(self.urls) > 1 or self.pd is not None or self.topology is not None
        return self.engine == "sglang" and self.router != "none" and (many or self.router_url is not None)


class RolloutConfig(EngineSection):
    """`[rollout]` of a training run: also how often a faulty rollout is played again."""

    retries: int = Field(1, ge=0)
    """How often a rollout that an infrastructure fault ended is played again."""
    plan: str | None = Field(None, pattern=ENTRY)
    """A `RolloutPlan` of yours, "package.module:Name" or "folder/file.py:Name": tasks, filters, rewards. None: the built-in one."""
    function: str | None = Field(None, pattern=ENTRY)
    """A `generate_rollout(args, rollout_id, data_buffer, evaluation=False)` of yours, which makes all rollouts by itself."""

    @model_validator(mode="after")
    def _one_program(self) -> RolloutConfig:
        if self.plan is not None and self.function is not None:
            raise ValueError("rollout.plan and rollout.function both say how rollouts are made; give one")
        return self


class BufferConfig(Section):
    """`[buffer]`: where groups wait between generation and training, and how long their arrays stay."""

    table: ClassVar[str] = "buffer"
    url: str | None = Field(None, pattern=r"^postgres(ql)?://")
    """A PostgreSQL database, such as postgresql://user@host/name; its password belongs into PGPASSFILE. None: files in the run's folder."""
    keep_hours: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How long arrays of trained groups stay after no checkpoint needs them any more, hours."""
    keep_bytes: int | None = Field(None, ge=0)
    """Of these, the oldest go before their time while all arrays together take more than this; None: keep_hours alone says."""

    @model_validator(mode="after")
    def _shortens(self) -> BufferConfig:
        if self.keep_bytes is not None and not self.keep_hours:
            raise ValueError(
                "buffer.keep_bytes shortens buffer.keep_hours, which is 0: nothing would stay that it could delete"
            )
        return self


class UpdateSection(Section):
    """`[schedule]` of any run: what a weight update does to running requests, and the longest wait."""

    table: ClassVar[str] = "schedule"
    update_mode: PublishMode = PublishMode.RETRACT
    """What a weight update does to running requests."""
    deadline_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """The longest wait of any part for another, seconds; whoever waited then says for whom."""


class ScheduleConfig(UpdateSection):
    """`[schedule]` of a training run: also how far generation may run ahead of training."""

    kind: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generate, then train; one_step_off: the next batch is generated while this one trains; async: up to max_staleness."""
    max_staleness: int | None = Field(None, ge=0)
    """Train steps between the weights that sampled a token and those it trains. Must be given where kind is async, and where a sync run has
    something to carry over (partial, or algo.oversample above 1); nowhere else: with weights published every train step it is 0 of sync and
    1 of one_step_off, and each step without a publish adds one."""
    max_in_flight: int | None = Field(None, ge=1)
    """Rollouts that play or wait to be played at a time; None: as many as the staleness bound lets be trained."""
    too_old: Literal["drop", "mask"] = "drop"
    """What becomes of a group with tokens beyond the bound: dropped whole, or those tokens masked and the rest trained."""
    partial: Literal["off", "resume"] = "off"
    """resume: a step takes what is ready at its budget; rollouts that go on then finish in a later step, in several versions."""
    partial_old_tokens: Literal["train", "mask"] = "train"
    """Whether such a rollout's tokens of earlier versions are trained on (within the bound) or masked."""
    generation_budget_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Of partial = resume: seconds that a step generates before it takes what is ready."""
    generation_budget_tokens: int | None = Field(None, ge=1)
    """The same in sampled tokens of all rollouts together."""
    min_batch: float = Field(0.25, ge=0, le=1)
    """Share of algo.groups_per_step that such a step takes at least, one group in any case: short steps make what goes on older."""
    colocated: bool = False
    """Engines and trainer share their devices: engines are frozen while a step trains."""
    publish_every: int = Field(1, ge=1)
    """Optimizer steps between publishes; one is made at the end of a train step at the earliest, and after the last one always."""

    @model_validator(mode="after")
    def _bound(self) -> ScheduleConfig:
        refuse([*bound_findings(self), *budget_findings(self), *sharing_findings(self)])
        return self

    def publish_steps(self, updates_per_batch: int) -> int:
        """Train steps between publishes."""
        return publish_steps(self.publish_every, updates_per_batch)

    def ahead(self, updates_per_batch: int) -> int:
        """Batches beyond the next one that may be generated under one publish: a sync run generates what it trains until the next."""
        return self.publish_steps(updates_per_batch) - 1 if self.kind == "sync" else self.staleness(updates_per_batch)

    def staleness(self, updates_per_batch: int) -> int:
        """The bound in force, train steps.

        Raises:
            RefusedError: it is too small for the steps between two publishes: the run would wait for itself.
        """
        refuse(least_findings(self, updates_per_batch))
        return bound(self, updates_per_batch)


class ServeSection(Section):
    """`[serve]`: where a service without a trainer is reached, and what a session has that asks for nothing else."""

    table: ClassVar[str] = "serve"
    host: str = Field("127.0.0.1", min_length=1)
    """Address of the model routes; 0.0.0.0 for all of this machine's."""
    port: int = Field(0, ge=0, le=65535)
    """0: the one that this run had before, at its first start a free one."""
    admin_host: str = Field("127.0.0.1", min_length=1)
    """Address of the control routes, where admin_port is given."""
    admin_port: int | None = Field(None, ge=0, le=65535)
    """Port of the control routes, 0 as for port; None: they are on the same address as the model routes."""
    url: str | None = Field(None, pattern=r"^https?://[^/]+$")
    """What agents put before /v1, where that is another address than the one listened on (a container, a proxy)."""
    agent_key: bool = False
    """Whether one key opens the model routes of every session, which a request names by X-Session-Id or by the path."""
    max_turns: int = Field(64, ge=1)
    """Model calls of a session."""
    max_response: int = Field(1024, ge=1)
    """Tokens of one reply."""
    max_context: int | None = Field(None, ge=2)
    """Prompt and reply together, tokens; None: the engine's window."""
    max_tokens: int | None = Field(None, ge=1)
    """Sampled tokens of a session; None: no bound."""
    session_deadline_s: float = Field(86_400.0, gt=0, allow_inf_nan=False)
    """Wall time of a session, seconds; then it is closed with the rewards that were posted."""
    temperature: float = Field(1.0, ge=0, le=100)
    """At which tokens are drawn; 0 (greedy) only where sampling is free."""
    sampling: Literal["strict", "override", "free"] = "strict"
    """What becomes of a call that asks for another distribution: refused, given the session's, or granted (and never trained on)."""
    drop_zero_variance: bool = False
    """Whether groups with one reward for all are dropped: for trainers whose estimator learns nothing from them."""
    staleness: int | None = Field(None, ge=0)
    """Train steps after which a ready group is dropped; None: never."""

    @model_validator(mode="after")
    def _fits(self) -> ServeSection:
        if self.temperature == 0 and self.sampling != "free":
            raise ValueError(
                'serve.temperature is 0 (greedy): that needs serve.sampling = "free", whose sessions are not trained on'
            )
        if self.url is None and self.admin_port is not None and self.host in LOOPBACK:
            raise ValueError(
                f"serve.url must be given when serve.host is {self.host} and there is a serve.admin_port: a session that is opened at the "
                "control address has to be told where agents reach the model routes, such as http://this-machine:8000"
            )
        return self
