"""Recipes that come with the planner, and examples made of them by changing fields. Reads package data, no other I/O."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any

from palestra.cli.planner.types import Example

PUBLIC = ("qwen3-4b", "qwen3-30b", "qwen3-235b", "deepseek-v3", "qwen3-next")
"""Layouts that others published, one of each size class: none of them may have an error."""
OURS = ("laptop", "two-nodes", "many-nodes")
"""Worked examples of docs/plan.md."""


def text_of(recipe: str) -> str:
    """The file of a recipe.

    Raises:
        ValueError: there is none of this name.
    """
    if recipe not in (*PUBLIC, *OURS):
        raise ValueError(f"no recipe {recipe}; known: {', '.join((*PUBLIC, *OURS))}")
    return files("palestra.cli.planner").joinpath(f"recipes/{recipe}.toml").read_text(encoding="utf-8")


@cache
def _tables(recipe: str) -> Mapping[str, Any]:
    return tomllib.loads(text_of(recipe))


def data_of(example: Example) -> dict[str, Any]:
    """The tables of an example."""
    return changed(_tables(example.recipe), example.changes)


def changed(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with fields set, or taken away where the value is None."""
    copy = deepcopy(dict(data))
    for path, value in changes.items():
        *tables, key = path.split(".")
        at = copy
        for table in tables:
            at = at.setdefault(table, {})
        if value is None:
            at.pop(key, None)
        else:
            at[key] = value
    return copy
