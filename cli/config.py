"""The configuration of a training run, and that of a service alone: one TOML file each, checked whole before anything starts.

In: a file and overrides such as `--optim.lr=1e-5`. Out: a frozen `RunConfig` or `ServeConfig`, or an error that names the field, what is
wrong and, for a misspelt key, the nearest one. Each package owns its section; this module puts them together.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError, model_validator

from palestra.agents.config import AgentConfig
from palestra.agents.evaluation.config import EvalConfig
from palestra.cli.engines.rules import agents_there
from palestra.cli.planner.runsections import PlanWorkload
from palestra.cli.planner.sections import PlanHardware
from palestra.cli.sections import FolderSection, ModelConfig, RunSection, check_backend, check_passed
from palestra.envs.config import EnvConfig, Section
from palestra.envs.overrides import apply_override
from palestra.envs.sandboxes import SandboxConfig
from palestra.server.config import (
    BufferConfig,
    EngineSection,
    RolloutConfig,
    ScheduleConfig,
    ServeSection,
    UpdateSection,
)
from palestra.server.schedulerules import carrying_findings, group_findings, refuse
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig


class ConfigError(ValueError):
    """A configuration that cannot be run; the message has a line per fault."""


class RunConfig(Section):
    """The whole file of a training run."""

    not_built: ClassVar[frozenset[str]] = frozenset({"placement"})
    model: ModelConfig
    env: EnvConfig
    run: RunSection = RunSection()
    agent: AgentConfig = AgentConfig()
    algo: AlgoConfig = AlgoConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    weights: WeightsConfig = WeightsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    """Where environments run code; nothing is started for one that runs none."""
    sft: SftConfig | None = None
    eval: EvalConfig | None = None
    """Evaluations while it trains; None: none."""
    hardware: PlanHardware = PlanHardware()
    """What the run is planned for; only `palestra plan` and the rules that a run is held to read it."""
    workload: PlanWorkload = PlanWorkload()
    """What its rollouts are like; read as `[hardware]` is."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Passed to megatron-core's TransformerConfig untouched, after its names were checked."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Passed to SGLang's engines untouched, after its names were checked."""
    router: dict[str, Any] = Field(default_factory=dict)
    """Passed to the router untouched, after its names were checked."""
    version: Literal[1] = 1
    """Of this file's form."""

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        check_passed(self.rollout, self.sglang, self.router)
        check_backend(self.megatron, self.train.backend)
        self.schedule.staleness(self.algo.updates_per_batch)
        self._carries_over()
        self._evaluates()
        if self.weights.mode == "delta":
            refuse(agents_there(self.rollout.urls, self.rollout.agents))
        return self

    def _evaluates(self) -> None:
        if self.eval is None:
            return
        if self.eval.top_p < 1 and self.agent.kind != "chat":
            raise ValueError('eval.top_p needs agent.kind = "chat": other agents ask the model by themselves')
        if (self.eval.max_response or self.algo.max_response) >= self.rollout.context_len:
            raise ValueError(f"eval.max_response leaves no room for a prompt in {self.rollout.context_len} tokens")

    def _carries_over(self) -> None:
        """What groups and the surplus of a step ask of the schedule."""
        refuse(group_findings(self.algo.min_group, self.algo.group_size))
        refuse(carrying_findings(self.schedule, self.algo.oversample))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder


class ServeConfig(Section):
    """The whole file of a service without a trainer."""

    not_built: ClassVar[frozenset[str]] = frozenset({"hardware", "placement", "sandbox", "workload"})
    model: ModelConfig
    run: FolderSection = FolderSection()
    rollout: EngineSection = EngineSection()
    schedule: UpdateSection = UpdateSection()
    serve: ServeSection = ServeSection()
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Passed to SGLang's engines untouched, after its names were checked."""
    router: dict[str, Any] = Field(default_factory=dict)
    """Passed to the router untouched, after its names were checked."""
    version: Literal[1] = 1
    """Of this file's form."""

    @model_validator(mode="after")
    def _fits(self) -> ServeConfig:
        check_passed(self.rollout, self.sglang, self.router)
        window = self.rollout.context_len
        if self.serve.max_context is not None and self.serve.max_context > window:
            raise ValueError(
                f"serve.max_context ({self.serve.max_context}) is more than rollout.context_len ({window})"
            )
        if self.serve.max_response >= self.window:
            raise ValueError(
                f"serve.max_response ({self.serve.max_response}) leaves no room for a prompt in {self.window} tokens"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder

    @property
    def window(self) -> int:
        """Prompt and reply of a session that asks for nothing else, tokens."""
        return self.serve.max_context or self.rollout.context_len


AnyConfig: TypeAlias = RunConfig | ServeConfig
"""What a run folder can hold."""
KINDS: Mapping[str, type[RunConfig] | type[ServeConfig]] = {"train": RunConfig, "serve": ServeConfig}
"""`kind` in a run folder's meta.json, and the form of the run.toml beside it."""
C = TypeVar("C", bound=Section)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A training run's configuration: see `load_as`."""
    return load_as(RunConfig, path, overrides)


def check_config(data: Mapping[str, Any], where: str) -> RunConfig:
    """A training run's configuration from plain values: see `check_as`."""
    return check_as(RunConfig, data, where)


def read_run(folder: Path) -> AnyConfig:
    """The configuration that a run folder has, in the form that its meta.json tells.

    Raises:
        ConfigError: there is none, or it is of another version.
    """
    return load_as(KINDS[kind_of(folder)], folder / "run.toml")


def kind_of(folder: Path) -> str:
    """train or serve.

    Raises:
        ConfigError: the folder has no run.
    """
    try:
        kind = str(json.loads((folder / "meta.json").read_text()).get("kind", "train"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no run is here ({error})") from None
    if kind not in KINDS:
        raise ConfigError(f"{folder / 'meta.json'}: kind {kind!r}; known: {', '.join(KINDS)}")
    return kind


def load_as(form: type[C], path: Path | None, overrides: Sequence[str] = ()) -> C:
    """Reads, overrides and checks. Without a file all is given by overrides.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    return check_as(form, read_tables(path, overrides), "arguments" if path is None else str(path))


def read_tables(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a file, with overrides, unchecked. Without a file all is given by overrides.

    Raises:
        ConfigError: it cannot be read, is no TOML, or an override has another form.
    """
    try:
        data = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(data, override)
    return data


def check_as(form: type[C], data: Mapping[str, Any], where: str) -> C:
    """A checked configuration from plain values.

    Raises:
        ConfigError: a line per fault: field, what is wrong, what to do.
    """
    try:
        return form.model_validate(data)
    except ValidationError as error:
        lines = [_explain(form, fault) for fault in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def dump_toml(config: AnyConfig) -> str:
    """The resolved configuration as TOML, every default written out."""
    data = config.model_dump(mode="json", exclude_none=True)
    plain = {key: value for key, value in data.items() if not isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
    for table, values in data.items():
        if isinstance(values, dict):
            lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _apply(data: dict[str, Any], override: str) -> None:
    """`--table.key=value`; the value is TOML, or a bare word."""
    try:
        apply_override(data, override.removeprefix("--"), "overrides look like --table.key=value")
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def _explain(form: type[Section], fault: Any) -> str:
    """One pydantic fault in a user's words."""
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _known_keys(form, fault["loc"][:-1])
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        return f"unknown field {path}" + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}")
    if fault["type"] == "missing":
        return f"{path} must be given"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message
    return f"{path}: {message}, got {fault['input']!r}"


def _known_keys(form: type[Section], tables: Sequence[Any]) -> list[str]:
    model: Any = form
    for table in tables:
        annotation = model.model_fields[table].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if model is None:
            return []
    return list(model.model_fields)
