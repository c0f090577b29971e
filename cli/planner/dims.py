"""A model's dimensions: from a preset, from fields, or from both. Pure.

In: `[model]`, and what a Hugging Face `config.json` said (see `huggingface.py`). Out: `ModelDims`, or the findings P003 to P005.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.sections import PlanModel
from palestra.envs.findings import Finding, Severity
from palestra.trainer.layout.types import ModelDims

NAMES = tuple(field.name for field in fields(ModelDims))
NEEDED = ("layers", "hidden", "heads", "kv_heads", "vocab")


def dims_of(given: PlanModel, read: Mapping[str, Any] | None = None) -> tuple[ModelDims | None, tuple[Finding, ...]]:
    """The model, and what stands against it. `read`: dimensions of the model's own config.json, which count as a preset's."""
    known: dict[str, Any] = {}
    if given.preset is not None:
        if given.preset not in MODELS:
            close = difflib.get_close_matches(given.preset, MODELS, n=1)
            message = f"no preset {given.preset}" + (f"; did you mean {close[0]}?" if close else "")
            return None, (
                _error(
                    "P003", "model.preset", f"{message} known: {', '.join(MODELS)}", "give --model-config config.json"
                ),
            )
        known = asdict(MODELS[given.preset])
    elif read is not None:
        known = dict(read)
    said = {name: getattr(given, name) for name in NAMES if getattr(given, name) is not None}
    if known and not given.override:
        origin = f"preset {given.preset}" if given.preset else "the model's config.json"
        if differing := [name for name, value in said.items() if name in known and known[name] != value]:
            name = differing[0]
            message = f"model.{name} = {said[name]} but {origin} says {known[name]}"
            return None, (_error("P004", f"model.{name}", message, "drop one, or set model.override = true"),)
    merged = {**known, **said}
    if lacking := [name for name in NEEDED if name not in merged]:
        return None, (
            _error(
                "P005",
                "model",
                f"the model's dimensions are not known: {', '.join(f'model.{name}' for name in lacking)}",
                f"give model.preset ({', '.join(list(MODELS)[:3])}, ...), --model-config config.json, or the fields",
            ),
        )
    merged.setdefault("head_dim", merged["hidden"] // merged["heads"])
    return ModelDims(**merged), ()


def _error(code: str, path: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, path, message, fix)
