"""The `[eval]` section: evaluations that go on while a run trains, each of one policy version."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from palestra.envs.config import Section


class EvalConfig(Section):
    """`[eval]`: what is played, how often, and on which engines. Without the section nothing is evaluated."""

    table: ClassVar[str] = "eval"
    every: int = Field(10, ge=1)
    """Train steps between evaluations. Only published weights are evaluated: a step without a publish is evaluated at the next one."""
    at_start: bool = True
    """Whether the weights that training starts from are evaluated too (step 0)."""
    at_end: bool = True
    """Whether the last step is, whatever `every` says."""
    on: Literal["job", "engines", "hold"] = "job"
    """job: an embedded engine of its own, on a copy of the weights, beside the training. engines: those of `urls`, which load the copy from
    disk. hold: the training's own engines; the next publish waits for the evaluation."""
    urls: list[str] = Field(default_factory=list)
    """Of on = "engines": SGLang engines that run already and are only for this; they must see the run's folder under the same name."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """What its metrics are called: eval/NAME/mean. None: the last part of the environment's id."""
    env: str | None = None
    """A gymnasium id; None: the run's environment."""
    args: dict[str, Any] | None = None
    """Keyword arguments of its constructor; None: the run's where `env` is, else none."""
    tasks: str | None = None
    """A file of tasks; None: the run's where `env` is, else the environment's own."""
    n: int = Field(50, ge=0)
    """Tasks, all where there are fewer; 0: all."""
    k: int = Field(1, ge=1)
    """Episodes of each task."""
    order: Literal["shuffle", "sequential"] = "shuffle"
    """Which n tasks: the first ones of a shuffle, or as they lie."""
    seed: int = 0
    """Of the shuffle, the environments and the model's sampling."""
    temperature: float = Field(1.0, ge=0, le=100)
    """0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Of agents of kind chat only: others ask the model by themselves."""
    max_response: int | None = Field(None, ge=1)
    """Tokens of one reply; None: algo.max_response."""
    max_turns: int | None = Field(None, ge=1)
    """Model calls of one episode; None: algo.max_turns."""
    pass_reward: float = 1.0
    """An episode counts as right from this reward on: for pass@k."""
    concurrency: int = Field(16, ge=1)
    """Episodes at a time."""
    retries: int = Field(2, ge=0)
    """How often an episode without a reward is played again: one that a fault ended, or that got a second policy version."""
    queue: int = Field(1, ge=0)
    """Evaluations that may wait while one goes on; one more is refused and counted."""
    deadline_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Wall time of one evaluation, seconds; then it ends with what it has. Of on = "hold" it is also the longest that a publish is held."""
    threads: int = Field(1, ge=1)
    """CPU threads of the engine of on = "job"."""

    @model_validator(mode="after")
    def _fits(self) -> EvalConfig:
        if (self.on == "engines") != bool(self.urls):
            raise ValueError('eval.urls and eval.on = "engines" go together: the engines that are only for evaluation')
        if "threads" in self.model_fields_set and self.threads != 1 and self.on != "job":
            raise ValueError('eval.threads needs eval.on = "job"')
        return self

    def env_id(self, run: str) -> str:
        """The environment that is played, where the run's is `run`."""
        return self.env or run

    def label(self, run: str) -> str:
        """NAME of its metrics, where the run's environment is `run`."""
        last = re.split(r"[/:]", self.env_id(run))[-1]
        return self.name or re.sub(r"[^A-Za-z0-9._-]+", "-", last) or "env"
