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

FROM_FILE = "hf"
"""In place of a preset: the model's own config.json."""
FREE = ("max_position", "mtp_layers")
"""What files of one model differ in."""


def dims_of(given: PlanModel, read: Mapping[str, Any] | None = None) -> tuple[ModelDims | None, tuple[Finding, ...]]:
    """The model, and what stands against it. `read`: dimensions of the model's own config.json, which count as a preset's.

    Whoever gives a preset and a file is held to both.
    """
    known: dict[str, Any] = dict(read or {})
    if given.preset not in (None, FROM_FILE):
        if given.preset not in MODELS:
            return None, (_no_preset(given.preset),)
        preset = asdict(MODELS[given.preset])
        if differing := [name for name, value in known.items() if preset[name] != value and name not in FREE]:
            name = differing[0]
            message = (
                f"the model's config.json says {name} = {known[name]} but preset {given.preset} says {preset[name]}"
            )
            return None, (_error("P004", "model.preset", message, "take the preset away"),)
        known = {**preset, **known}
    elif given.preset == FROM_FILE and read is None:
        message = f"model.preset = {FROM_FILE!r} reads the model's config.json, and there is none"
        return None, (_error("P003", "model.preset", message, "give --model-config config.json"),)
    said = {name: getattr(given, name) for name in NAMES if getattr(given, name) is not None}
    if known and not given.override:
        origin = "the model's config.json" if given.preset in (None, FROM_FILE) else f"preset {given.preset}"
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
    merged.setdefault("head_dim", max(1, merged["hidden"] // merged["heads"]))
    return ModelDims(**merged), ()


def _no_preset(name: str) -> Finding:
    close = difflib.get_close_matches(name, MODELS, n=1)
    message = f"no preset {name}" + (f" (did you mean {close[0]}?)" if close else "")
    return _error("P003", "model.preset", f"{message}; known: {', '.join(MODELS)}", "give --model-config config.json")


def _error(code: str, path: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, path, message, fix)
