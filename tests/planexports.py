"""Plans that exports are tried with, each exported once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import OURS, PUBLIC, data_of, text_of
from palestra.cli.planner.export import export
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.types import Example, PlanReport

# The quick one where PyYAML was built with it; both read the same.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DATA = Path(__file__).parent / "data" / "plan"
RECIPES = [Example(name) for name in (*PUBLIC, *OURS)]
EXTERNAL = Example(
    "two-nodes",
    {
        "rollout.pd": None,
        "placement.mode": "external",
        "placement.rollout_gpus": None,
        "placement.external_urls": ["http://10.0.0.5:30000", "http://10.0.0.6:30001"],
        "weights.transport": "disk",
        "weights.shared_dir": "/shared/weights",
    },
)
HALVES = Example(
    "qwen3-4b",
    {"placement.mode": "separate", "placement.train_gpus": 4, "placement.rollout_gpus": 4, "model.path": "/m"},
)
ON_CPU = Example("laptop", {"rollout.engine": "sglang", "rollout.engines": 2})
ALL = [*RECIPES, EXTERNAL, HALVES, ON_CPU]


def loaded(text: str) -> Any:
    return yaml.load(text, LOADER)


def planned(example: Example) -> tuple[PlanReport, Case]:
    """An example's plan, and what it was made from."""
    data = data_of(example)
    case, *_ = case_of(data)
    assert case is not None
    return plan(data), case


@cache
def _exported(recipe: str, changes: str) -> Mapping[str, str]:
    report, case = planned(Example(recipe, json.loads(changes)))
    return export(report, case, source=text_of(recipe))


def exported(example: Example) -> Mapping[str, str]:
    """All files of an example, made once."""
    return _exported(example.recipe, json.dumps(dict(example.changes)))


def named(example: Example) -> str:
    return f"{example.recipe}-{len(example.changes)}"
