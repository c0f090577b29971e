"""The rows of an evaluation as one Parquet file, for data frames. Needs the extra `parquet`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.agents.evaluation.records import plain
from palestra.agents.evaluation.types import EvalError, Row

NAME = "episodes.parquet"


def load_pyarrow() -> ModuleType:
    """The package.

    Raises:
        EvalError: it is not installed.
    """
    try:
        importlib.import_module("pyarrow.parquet")  # binds itself as an attribute of its package
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise EvalError(f"Parquet needs pyarrow ({error}): pip install 'palestra[parquet]'") from None


def write_parquet(folder: Path, rows: Sequence[Row]) -> Path:
    """Writes `episodes.parquet`, a line per episode: figures as columns, components as `component/NAME`, messages and answer as JSON texts.

    Raises:
        EvalError: pyarrow is not there.
    """
    pyarrow = load_pyarrow()
    names = list(dict.fromkeys(name for row in rows for name in row.reward.components))
    columns: dict[str, list[Any]] = {name: [] for name in _flat(rows[0], names)} if rows else {"task": []}
    for row in rows:
        for name, value in _flat(row, names).items():
            columns[name].append(value)
    path = folder / NAME
    aside = folder / f".{NAME}"
    pyarrow.parquet.write_table(pyarrow.table(columns), aside)
    aside.replace(path)
    return path


def _flat(row: Row, names: Sequence[str]) -> dict[str, Any]:
    return {
        "task": row.task,
        "k": row.k,
        "task_id": plain(row.task_id),
        "seed": row.seed,
        "reward": row.reward.value,
        "note": plain(row.reward.note),
        **{f"component/{name}": row.reward.components.get(name) for name in names},
        "stop_reason": str(row.stop_reason),
        "terminated": row.terminated,
        "truncated": row.truncated,
        "turns": row.turns,
        "tool_calls": row.tool_calls,
        "tool_errors": row.tool_errors,
        "prompt_tokens": row.usage.prompt_tokens,
        "completion_tokens": row.usage.completion_tokens,
        "seconds": row.seconds,
        "ended": row.ended,
        "error": plain(row.error),
        "answer": json.dumps(plain(row.answer), ensure_ascii=False),
        "messages": json.dumps(plain(row.messages), ensure_ascii=False),
    }
