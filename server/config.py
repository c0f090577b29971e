"""The service's sections of the run's configuration: `[rollout]` and `[schedule]`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from palestra.envs.config import Section
from palestra.server.types import PublishMode


class RolloutConfig(Section):
    """`[rollout]`: the engine that samples, and how often a faulty rollout is played again."""

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
    retries: int = Field(1, ge=0)
    """How often a rollout that an infrastructure fault ended is played again."""
    forced_ids: bool = False
    """A test's switch: requests may name the ids to be sampled."""


class ScheduleConfig(Section):
    """`[schedule]`: how far generation may run ahead of training, and what a weight update does to running requests."""

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
    kind: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: generate, then train; one_step_off: the next batch is generated while this one trains; async: up to max_staleness."""
    max_staleness: int | None = Field(None, ge=0)
    """Train steps between the weights that sampled a token and those it trains. sync: 0, one_step_off: 1, async: must be given."""
    update_mode: PublishMode = PublishMode.RETRACT
    """What a weight update does to running requests."""
    deadline_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """The longest wait of any part for another, seconds; then the run stops and says who was waited for."""

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
