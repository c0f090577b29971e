"""Reads the leaderboard's data as it comes with the package `bfcl-eval`, whose code is never imported.

A category goes in, tasks come out; a file that is missing or broken is named. Functions become tool descriptions here:
types of the leaderboard into JSON schema's, names into those that chat APIs take.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.envs.types import Task, TaskError, ToolSpec

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")
LONGEST_NAME = 64


def data_folder() -> Path:
    """Where the installed package keeps its data.

    Raises:
        TaskError: the package is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (folder := Path(place) / "data").is_dir():
            return folder
    raise TaskError("the leaderboard's data come with a package: pip install --no-deps bfcl-eval")


@functools.cache
def read_category(category: str, folder: Path | None = None) -> tuple[Task, ...]:
    """The tasks of a category, in their order.

    Raises:
        TaskError: there is no such category or file, or a record is broken.
    """
    if category not in CATEGORIES:
        raise TaskError(f"no category {category!r}; categories: {', '.join(CATEGORIES)}")
    folder = data_folder() if folder is None else folder
    path = _newest(folder, category)
    answers: dict[str, Any] = {}
    if category != "irrelevance":
        answers = {row["id"]: row["ground_truth"] for row in _rows(_newest(folder / "possible_answer", category))}
    try:
        return tuple(task_of(row, category, answers) for row in _rows(path))
    except (KeyError, IndexError, TypeError) as error:
        raise TaskError(f"{path}: a record is broken: {type(error).__name__}: {error}") from error


def task_of(row: Mapping[str, Any], category: str, answers: Mapping[str, Any]) -> Task:
    """One record as a task: its first turn, its functions, and what is a right answer (None: no call is)."""
    functions = row["function"] if isinstance(row["function"], list) else [row["function"]]
    answer = None if category == "irrelevance" else answers[row["id"]]
    meta = {"category": category, "functions": functions}
    return Task(tuple(row["question"][0]), answer, str(row["id"]), meta)


def tool_name(name: str) -> str:
    """The name under which a function is offered: chat APIs take letters, digits, _ and - only."""
    return _FORBIDDEN.sub("_", name)[:LONGEST_NAME]


def tool_specs(functions: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Functions as tools in OpenAI's form."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": tool_name(function["name"]),
                "description": function.get("description", ""),
                "parameters": _schema(function["parameters"]),
            },
        }
        for function in functions
    )


def _schema(node: Any) -> Any:
    """A schema with JSON's types. Only what says `type` is one: a property can have any name."""
    if not isinstance(node, Mapping):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            named = _SCHEMA_TYPES.get(value, value)
            if named is not None:
                out["type"] = named
        elif key == "properties" and isinstance(value, Mapping):
            out["properties"] = {name: _schema(item) for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            out[key] = _schema(value)
        elif key != "optional":
            out[key] = value
    return out


def _newest(folder: Path, category: str) -> Path:
    named = re.compile(
        rf"BFCL_v([0-9]+)_{category}\.json"
    )  # not a glob: live_multiple and parallel_multiple end in multiple
    found = [(int(match[1]), path) for path in folder.glob("BFCL_v*.json") if (match := named.fullmatch(path.name))]
    if not found:
        raise TaskError(f"{folder}: no file of category {category!r}")
    return max(found)[1]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error
