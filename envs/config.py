"""The base of every configuration section, and the `[env]` section.

A section refuses unknown keys, and refuses by name the keys of the specification that this build cannot honour yet:
nothing is ignored.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """One table of the run's TOML file. Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    not_built: ClassVar[frozenset[str]] = frozenset()
    """Keys of the specification that are refused by name because nothing would honour them."""
    table: ClassVar[str] = ""
    """The table's name in the file, for messages."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_not_built(cls, data: Any) -> Any:
        if isinstance(data, dict) and (named := sorted(cls.not_built & data.keys())):
            keys = ", ".join(f"{cls.table}.{key}" for key in named)
            raise ValueError(f"not built: {keys}; remove it")
        return data


class EnvConfig(Section):
    """`[env]`: which environment is played, and by how many threads."""

    table: ClassVar[str] = "env"
    id: str
    """A gymnasium id such as `palestra/Calculator-v0`; `package.module:id` imports the module first."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    tasks: str | None = None
    """A JSONL or Parquet file of tasks ({"prompt", "answer", "id", "meta"} a line or row). None: the environment's own tasks."""
    order: str = Field("shuffle", pattern="^(shuffle|sequential)$")
    """How tasks are drawn: a seeded shuffle per epoch, or as they lie."""
    concurrency: int = Field(64, ge=1)
    """Episodes that one environment worker plays at a time, each in a thread of its own."""
