"""The command line's own sections of a configuration: `[model]` and `[run]`, and what tables that are passed on need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from palestra.envs.config import Section
from palestra.server.config import EngineSection


class ModelConfig(Section):
    """`[model]`: which weights the run starts from."""

    table: ClassVar[str] = "model"
    not_built: ClassVar[frozenset[str]] = frozenset(
        [
            "preset",
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "vocab",
            "tied",
            "qkv_bias",
            "qk_norm",
            "attn_gate",
            "max_position",
            "experts",
            "topk",
            "moe_ffn",
            "shared_ffn",
            "dense_layers",
            "shared_gate",
            "expert_bias",
            "q_lora",
            "kv_lora",
            "nope_dim",
            "rope_dim",
            "v_dim",
            "index_dim",
            "linear_layers",
            "lin_k_heads",
            "lin_v_heads",
            "lin_k_dim",
            "lin_v_dim",
            "lin_conv",
            "linear_kind",
            "mtp_layers",
        ]
    )
    path: str
    """A local folder in Hugging Face form, a hub id, or a packaged model (`smollm2-135m`)."""
    family: str | None = None
    """Chat family (`palestra doctor template MODEL` says which are known); None: told by the model's files."""
    cache: str = "~/.cache/palestra"
    """Where packaged models are converted to, once."""


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class FolderSection(Section):
    """`[run]` of a service: where its folder is."""

    table: ClassVar[str] = "run"
    not_built: ClassVar[frozenset[str]] = frozenset({"free_disk_bytes", "buffer_dir", "wall_clock_s"})
    save_dir: str = "runs"
    """Parent of the run's folder."""
    name: str = Field("serve", pattern=_NAME)
    """The run's folder below save_dir."""
    start_deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """How long a role may take to become ready, seconds."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.save_dir).expanduser() / self.name


class RunSection(FolderSection):
    """`[run]` of a training run: also how long it goes on."""

    name: str = Field("run", pattern=_NAME)
    """The run's folder below save_dir."""
    steps: int = Field(10, ge=1)
    """Train steps."""
    save_every: int = Field(5, ge=1)
    """Train steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that stay."""
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    """rollout_only: plays as the schedule says and trains nothing; train_only: trains what another run dumped, without engines or service.
    """
    dump: Path | None = None
    """A folder of claimed batches: train and rollout_only write them there, train_only reads them. None: none are kept."""

    @field_validator("dump")
    @classmethod
    def _whole(cls, value: Path | None) -> Path | None:
        # The same folder wherever the run is gone on with.
        return None if value is None else value.expanduser().absolute()

    @model_validator(mode="after")
    def _dumps(self) -> RunSection:
        if self.mode != "train" and self.dump is None:
            raise ValueError(f"run.mode = {self.mode!r} needs run.dump, the folder of its batches")
        return self


def check_backend(megatron: Mapping[str, Any], backend: str) -> None:
    """Megatron's table needs megatron's backend.

    Raises:
        ValueError: the run has another one.
    """
    if megatron and backend != "megatron":
        raise ValueError(f'[megatron] needs train.backend = "megatron", not {backend!r}')


def check_passed(rollout: EngineSection, sglang: Mapping[str, Any], router: Mapping[str, Any]) -> None:
    """Tables that are passed on must have somebody who gets them.

    Raises:
        ValueError: one has not.
    """
    if sglang and (rollout.engine != "sglang" or rollout.urls):
        raise ValueError(
            '[sglang] is for engines that are started here: it needs rollout.engine = "sglang" and no rollout.urls'
        )
    if router and (not rollout.routed or rollout.router_url is not None):
        raise ValueError("[router] is for a router that is started here, in front of several SGLang engines")
