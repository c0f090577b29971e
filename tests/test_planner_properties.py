"""What holds for every plan: it never raises, says the same twice, reads nothing, and comes back from its own resolved tables."""

from __future__ import annotations

import ast
import builtins
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from palestra.cli.engines.rules import MOST, divisors
from palestra.cli.planner.examples import OURS, PUBLIC, changed, data_of
from palestra.cli.planner.explain import fields
from palestra.cli.planner.inputs import COUNTED, PlanInput, section_of
from palestra.cli.planner.plain import dumped, plain
from palestra.cli.planner.plan import plan
from palestra.cli.planner.presets import DEVICES, MODELS
from palestra.cli.planner.rules import registry
from palestra.cli.planner.sweep import sweep
from palestra.cli.planner.text import findings_text, report_lines
from palestra.cli.planner.types import Example, Severity
from palestra.envs.config import Section

PLANNER = Path(__file__).resolve().parent.parent / "cli" / "planner"
RECIPES = (*PUBLIC, *OURS)
WHOLE = (0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, 4096, 10**6, 10**9 + 1, 10**12)
NUMBERS = (0.0, 0.01, 0.5, 0.9, 1.0, 1.5, 60.0, 1e6, 1e12)
TEXTS = ("", "x", "/shared/x", "http://127.0.0.1:30000", "fa3", "flashinfer", "docker")
NAMES = {"model.preset": list(MODELS), "hardware.gpu": [*DEVICES, "custom", "nobody"]}
JUNK = (None, True, -1, 0, 1.5, 10**9, 10**30, 1e-300, float("inf"), float("nan"), "", "x", [], [1], {}, {"x": 1})
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def values_of(path: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Values that a field of the planner takes."""
    if path in NAMES:
        return st.sampled_from(NAMES[path])
    annotations = [each for each in get_args(field.annotation) if get_origin(field.annotation) is not Literal]
    low = max((edge for each in field.metadata for edge in lows(each)), default=None)
    high = min((each.le for each in field.metadata if isinstance(each, annotated_types.Le)), default=None)

    def one(kind: Any) -> list[Any]:
        if get_origin(kind) is Literal:
            return list(get_args(kind))
        if kind is bool:
            return [True, False]
        if kind in (int, float):
            known = WHOLE if kind is int else NUMBERS
            return [each for each in known if (low is None or each >= low) and (high is None or each <= high)]
        return list(TEXTS) if kind is str else [[], ["http://127.0.0.1:1", "http://127.0.0.1:2"]]

    kinds = [each for each in (annotations or [field.annotation]) if each is not type(None)]
    return st.sampled_from([value for kind in kinds for value in one(kind)])


def lows(edge: Any) -> Iterator[float]:
    if isinstance(edge, annotated_types.Ge):
        yield edge.ge  # type: ignore[misc]
    if isinstance(edge, annotated_types.Gt):
        yield edge.gt + 0.01  # type: ignore[operator]


def planned() -> dict[str, FieldInfo]:
    """Every field that the planner reads."""
    found: dict[str, FieldInfo] = {}

    def walk(table: str, section: type[Section]) -> None:
        for name, field in section.model_fields.items():
            kinds = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
            inner = next((each for each in kinds if issubclass(each, Section)), None)
            if inner is None:
                found[f"{table}.{name}"] = field
            else:
                walk(f"{table}.{name}", inner)

    for table in PlanInput.model_fields:
        section = section_of(table)
        assert section is not None
        walk(table, section)
    return found


FIELDS = planned()


@st.composite
def changes(draw: st.DrawFn, most: int) -> dict[str, Any]:
    paths = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=most, unique=True))
    return {path: draw(values_of(path, FIELDS[path])) for path in paths}


def test_the_fields_are_those_that_can_be_explained() -> None:
    assert set(FIELDS) <= set(fields())
    assert len(FIELDS) > 150


@FAST
@given(st.sampled_from(RECIPES), changes(1))
@example("two-nodes", {"hardware.nodes": 10_000, "placement.rollout_gpus": 40_000, "rollout.pd": None})
@example("qwen3-4b", {"algo.groups_per_step": 10**9 + 1, "train.dynamic_batch": False, "train.micro_batch": 3})
@example("qwen3-4b", {"rollout.gpus_per_engine": 10**9 + 1})
@example("laptop", {"algo.temperature": math.nan})
@example("laptop", {"algo.temperature": math.inf})
def test_one_field_of_a_valid_plan_changed_never_raises(recipe: str, change: dict[str, Any]) -> None:
    report = plan(changed(data_of(Example(recipe)), change))
    assert report.findings == tuple(sorted(report.findings, key=lambda each: each.order))


@pytest.mark.parametrize("path", COUNTED)
def test_what_is_gone_through_one_by_one_has_a_bound(path: str) -> None:
    report = plan(changed(data_of(Example("two-nodes")), {path: COUNTED[path] + 1}))
    assert ("P002", path) in {(each.code, each.path) for each in report.findings}
    assert report.quantities == ()
    assert path in FIELDS


def test_sizes_of_engines_are_looked_at_up_to_a_bound() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(0) == []
    assert divisors(2 * (10**9 + 1))[:2] == [1, 2]
    assert divisors(10**18)[-1] <= MOST


@FAST
@given(st.sampled_from(RECIPES), changes(8))
def test_any_input_plans_and_plans_the_same_again(recipe: str, change: dict[str, Any]) -> None:
    data = changed(data_of(Example(recipe)), change)
    before = json.dumps(data)
    report = plan(data)
    assert dumped(plain(report)) == dumped(plain(plan(data)))
    assert json.dumps(data) == before, "a plan changes nothing of what it is given"
    assert report_lines(report, recipe)
    assert all(each.code in text for each, text in zip(report.findings, heads(report.findings), strict=True))


def heads(findings: Any) -> list[str]:
    return [line for line in findings_text(findings) if line.startswith("  P")]


@FAST
@given(st.sampled_from(RECIPES), changes(6))
@example("two-nodes", {"rollout.pd.transfer": "fake"})
@example("two-nodes", {"rollout.pd.transfer": "nixl", "hardware.rdma": False})
def test_a_row_of_a_sweep_has_the_errors_of_its_plan(recipe: str, change: dict[str, Any]) -> None:
    data = data_of(Example(recipe))
    errors = plan(changed(data, change)).of(Severity.ERROR)
    (row,) = sweep(data, {path: [value] for path, value in change.items()})
    assert row.errors == tuple(sorted({each.code for each in errors}))
    assert {registry()[each.code].severity for each in errors} <= {Severity.ERROR}


@FAST
@given(st.sampled_from(RECIPES), st.sampled_from([*FIELDS, *PlanInput.model_fields, "env", "x", "model.x"]), st.data())
def test_values_of_the_wrong_kind_are_findings_and_never_raise(recipe: str, path: str, data: st.DataObject) -> None:
    tables = data_of(Example(recipe))
    junk = data.draw(st.sampled_from(JUNK))
    *above, key = path.split(".")
    at: Any = tables
    for table in above:
        at = at.setdefault(table, {})
    at[key] = junk
    for each in plan(tables).findings:
        assert each.code.startswith("P")
        assert each.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_resolved_tables_plan_to_the_same(recipe: str) -> None:
    first = plan(data_of(Example(recipe)))
    again = plan(first.resolved)
    assert again.resolved == first.resolved
    assert again.quantities == first.quantities
    assert [(each.code, each.path) for each in again.findings] == [(each.code, each.path) for each in first.findings]


def test_a_plan_reads_no_file_no_clock_and_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {recipe: data_of(Example(recipe)) for recipe in RECIPES}
    expected = {recipe: dumped(plain(plan(data))) for recipe, data in inputs.items()}

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError(f"a plan asked the world: {arguments}")

    with monkeypatch.context() as patched:
        for name in ("time", "monotonic", "perf_counter", "time_ns"):
            patched.setattr(time, name, refuse)
        patched.setattr(builtins, "open", refuse)
        patched.setattr(socket, "socket", refuse)
        found = {recipe: dumped(plain(plan(data))) for recipe, data in inputs.items()}
    assert found == expected


def test_no_module_of_the_planner_imports_what_would_make_it_impure() -> None:
    impure = {"time", "datetime", "random", "socket", "subprocess", "threading", "os", "requests", "httpx2", "secrets"}
    found = []
    for path in PLANNER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in named if name.partition(".")[0] in impure]
    assert found == []


def test_the_planner_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom palestra.cli.planner.examples import data_of\nfrom palestra.cli.planner.plan import plan\n"
        "from palestra.cli.planner.types import Example\nplan(data_of(Example('two-nodes')))\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "palestra" in loaded
    assert not loaded & {"torch", "ray", "fastapi", "docker", "megatron", "transformers", "uvicorn", "openai", "rich"}
