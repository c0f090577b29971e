"""What a run is held to before anything starts: the planner's rules, over the run's own file and model.

In: the tables of the file, and the model's folder. Out: a report, whose errors stop the run; it is kept as `plan.json` in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.cli.config import ConfigError
from palestra.cli.planner.huggingface import UnknownModelError, dims_of_config
from palestra.cli.planner.plain import dumped, plain
from palestra.cli.planner.plan import plan
from palestra.cli.planner.types import Finding, PlanReport, Severity
from palestra.cli.roles.context import write_atomically

NAME = "plan.json"


class UnknownArchitectureError(ConfigError):
    """A config.json whose dimensions the planner cannot read."""


def preflight(tables: Mapping[str, Any], model: Path, where: str) -> PlanReport | None:
    """The report of a run; None where the planner knows no such architecture and the file does not give its dimensions: the trainer then
    says whether it can train it.

    Args:
        tables: of its file, with overrides.
        model: its folder in Hugging Face form.
        where: the file's name, for messages.

    Raises:
        ConfigError: a line per error.
    """
    try:
        dims = dims_of_folder(model)
    except UnknownArchitectureError:
        dims = None
    report = plan(tables, dims)
    if dims is None and {each.code for each in report.of(Severity.ERROR)} == {"P005"}:
        return None
    if errors := report.of(Severity.ERROR):
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines(errors)))
    return report


def dims_of_folder(folder: Path) -> Mapping[str, Any]:
    """Dimensions that a folder's config.json gives: see `dims_of_file`."""
    return dims_of_file(folder / "config.json")


def dims_of_file(path: Path) -> Mapping[str, Any]:
    """Dimensions that a Hugging Face config.json gives.

    Raises:
        ConfigError: it cannot be read, or is of an architecture that the planner does not know.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return dims_of_config(config)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnknownModelError as error:
        raise UnknownArchitectureError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each: where, what, what to do."""
    return [f"{each.code} {each.path}: {each.message}" + (f"; {each.fix}" if each.fix else "") for each in findings]


def keep(folder: Path, report: PlanReport | None) -> list[str]:
    """Writes the report into a run's folder, over that of an earlier start; what whoever starts the run should read."""
    if report is None:
        return ["not planned: the planner does not know the model's architecture"]
    write_atomically(folder / NAME, dumped(plain(report)))
    return lines(report.of(Severity.WARNING))
