"""What is planned: a run's file or a packaged recipe, and the model's dimensions.

In: what the command line names. Out: a `Source`. Waits for the disk.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from palestra.cli.config import ConfigError, read_tables
from palestra.cli.planner.examples import text_of
from palestra.cli.planner.plan import plan
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.types import PlanReport
from palestra.cli.preflight import dims_of_file
from palestra.envs.findings import Finding, Severity
from palestra.envs.overrides import apply_override
from palestra.trainer.megatron.passthrough import OWNED, check_passthrough, known_fields
from palestra.trainer.types import TrainerError

HF = "hf"
"""As `model.preset`: the dimensions are those of --model-config."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is planned."""

    name: str
    """For people: a file or a recipe."""
    tables: Mapping[str, Any]
    model: Mapping[str, Any] | None
    """Dimensions that the model's own config.json gives."""
    text: str
    """As it was read, before overrides."""

    def report(self) -> PlanReport:
        """Its plan, with names of `[megatron]` that the installed megatron-core does not have."""
        found = plan(self.tables, self.model)
        unknown = unknown_names(self.tables.get("megatron"))
        return replace(found, findings=tuple(sorted((*found.findings, *unknown), key=lambda each: each.order)))


def unknown_names(table: Any) -> Iterator[Finding]:
    """P001 of `[megatron]`; none where megatron-core is not installed: then nobody knows its names."""
    given = set(table) - OWNED.keys() if isinstance(table, Mapping) else set()
    try:
        unknown = sorted(given - known_fields()) if given else []
    except TrainerError:
        return
    for name in unknown:
        try:
            check_passthrough({name: None})
        except TrainerError as error:
            yield Finding(
                "P001", Severity.ERROR, f"megatron.{name}", str(error), "give a name that it has, or remove it"
            )


def of_file(path: Path, overrides: Sequence[str] = (), model_config: Path | None = None) -> Source:
    """A run's file.

    Raises:
        ConfigError: it, or the model's config.json, cannot be read.
    """
    tables = read_tables(path, overrides)
    return _with_model(_named(str(path), overrides), tables, path.read_text(encoding="utf-8"), model_config)


def of_recipe(name: str, overrides: Sequence[str] = (), model_config: Path | None = None) -> Source:
    """A packaged recipe.

    Raises:
        ConfigError: there is none of this name, or an override has another form.
    """
    try:
        text = text_of(name)
        tables = tomllib.loads(text)
        for word in overrides:
            apply_override(tables, word.removeprefix("--"), "overrides look like --table.key=value")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return _with_model(_named(f"recipe {name}", overrides), tables, text, model_config)


def _named(name: str, overrides: Sequence[str]) -> str:
    changes = f"{len(overrides)} field{'' if len(overrides) == 1 else 's'} changed"
    return f"{name} with {changes}" if overrides else name


def of_either(name: str, model_config: Path | None = None) -> Source:
    """A file, or else the recipe of this name.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    path = Path(name)
    return of_file(path, (), model_config) if path.exists() or path.suffix else of_recipe(name, (), model_config)


def _with_model(name: str, tables: dict[str, Any], text: str, config: Path | None) -> Source:
    """Dimensions: of the file that is given, of the folder at model.path, or of the packaged model of this name."""
    given = tables.get("model")
    model: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if model.get("preset") == HF:
        if config is None:
            raise ConfigError('model.preset = "hf" needs --model-config config.json')
        del model["preset"]
        tables = {**tables, "model": model}
    if config is not None:
        if "preset" in model:
            raise ConfigError("the model is given twice: by model.preset and by --model-config; drop one")
        return Source(name, tables, dims_of_file(config), text)
    return Source(name, tables, None if "preset" in model else _dims_at(model.get("path")), text)


def _dims_at(path: Any) -> Mapping[str, Any] | None:
    """Dimensions of what model.path names; None: the file has to give them."""
    if not isinstance(path, str):
        return None
    if path.lower() in MODELS:
        return asdict(MODELS[path.lower()])
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        return dims_of_file(file)
    except ConfigError as error:
        # The fields of [model] may say what the planner cannot read there; where they do not, P005 does.
        print(f"palestra plan: {error}", file=sys.stderr)
        return None
