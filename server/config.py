"""The service's sections of a configuration: `[rollout]` and `[schedule]`, in the part that every service has and the part that only a
training run has, and `[serve]`, of a service without a trainer.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from palestra.envs.config import Section
from palestra.server.listen import LOOPBACK
from palestra.server.types import PublishMode


class EngineSection(Section):
    """`[rollout]` of any run: the engine that samples."""

    table: ClassVar[str] = "rollout"
    not_built: ClassVar[frozenset[str]] = frozenset(
        [
            "gpus_per_engine",
            "ep",
            "dp",
            "dp_attention",
            "mem_fraction",
            "weight_dtype",
            "kv_dtype",
            "ssm_dtype",
            "conv_dtype",
            "state_ratio",
            "state_slots_pin",
            "state_strategy",
            "prefix_cache",
            "attention_backend",
            "deterministic",
            "draft_tokens",
            "hicache",
            "hicache_ratio",
            "pd",
            "router",
            "router_policy",
            "memory_saver",
            "function",
        ]
    )
    engine: Literal["embedded"] = "embedded"
    """The engine. Others of the specification (sglang, openai) are not built."""
    context_len: int = Field(2048, ge=32)
    """Window of the engine: prompt and reply, tokens."""
    max_running: int = Field(64, ge=1)
    """Requests that the engine decodes at a time."""
    max_total_tokens: int = Field(32_768, ge=256)
    """Tokens that the engine's cache holds."""
    page_size: int = Field(16, ge=1)
    """Tokens of a cache page: whole pages are shared between prompts."""
    threads: int = Field(2, ge=1)
    """CPU threads of the engine."""
    forced_ids: bool = False
    """A test's switch: requests may name the ids to be sampled."""


class RolloutConfig(EngineSection):
    """`[rollout]` of a training run: also how often a faulty rollout is played again."""

    retries: int = Field(1, ge=0)
    """How often a rollout that an infrastructure fault ended is played again."""


class UpdateSection(Section):
    """`[schedule]` of any run: what a weight update does to running requests, and the longest wait."""

    table: ClassVar[str] = "schedule"
    not_built: ClassVar[frozenset[str]] = frozenset(
        [
            "max_in_flight",
            "publish_every",
            "partial",
            "partial_old_tokens",
            "generation_budget_s",
            "generation_budget_tokens",
        ]
    )
    update_mode: PublishMode = PublishMode.RETRACT
    """What a weight update does to running requests."""
    deadline_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """The longest wait of any part for another, seconds; whoever waited then says for whom."""


class ScheduleConfig(UpdateSection):
    """`[schedule]` of a training run: also how far generation may run ahead of training."""

    kind: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generate, then train; one_step_off: the next batch is generated while this one trains; async: up to max_staleness."""
    max_staleness: int | None = Field(None, ge=0)
    """Train steps between the weights that sampled a token and those it trains. sync: 0, one_step_off: 1, async: must be given."""

    @model_validator(mode="after")
    def _bound(self) -> ScheduleConfig:
        if self.kind == "async" and self.max_staleness is None:
            raise ValueError("schedule.max_staleness must be given when schedule.kind is async")
        fixed = {"sync": 0, "one_step_off": 1}
        if self.kind in fixed and self.max_staleness not in (None, fixed[self.kind]):
            raise ValueError(
                f"schedule.max_staleness is {fixed[self.kind]} when schedule.kind is {self.kind}; remove it"
            )
        return self

    @property
    def staleness(self) -> int:
        """The bound in force."""
        return {"sync": 0, "one_step_off": 1}.get(self.kind, self.max_staleness or 0)


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
