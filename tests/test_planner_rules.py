"""Every rule of a plan has an example that it refuses and one that it lets pass, and refuses nothing else in the first."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.cli.planner.examples import OURS, PUBLIC, changed, data_of
from palestra.cli.planner.plan import plan
from palestra.cli.planner.rules import registry
from palestra.cli.planner.types import Example, Severity

CODES = sorted(registry())


@pytest.mark.parametrize("code", CODES)
def test_a_rule_refuses_its_failing_example_and_nothing_else_in_it(code: str) -> None:
    rule = registry()[code]
    report = plan(data_of(rule.fails))
    assert code in {each.code for each in report.findings}, [f"{each.code} {each.message}" for each in report.findings]
    assert rule.severity in {each.severity for each in report.findings if each.code == code}
    errors = {each.code: each.message for each in report.of(Severity.ERROR)}
    assert errors.keys() <= {code}, errors


@pytest.mark.parametrize("code", CODES)
def test_a_rule_lets_its_passing_example_pass(code: str) -> None:
    rule = registry()[code]
    report = plan(data_of(rule.passes))
    assert code not in {each.code for each in report.findings}, [each.message for each in report.findings]
    assert report.of(Severity.ERROR) == ()


@pytest.mark.parametrize("code", CODES)
def test_what_a_finding_suggests_removes_it_and_adds_no_error(code: str) -> None:
    data = data_of(registry()[code].fails)
    for finding in plan(data).findings:
        if finding.code == code and finding.suggest:
            after = plan(changed(data, finding.suggest))
            assert (code, finding.path) not in {(each.code, each.path) for each in after.findings}
            assert after.of(Severity.ERROR) == ()


@pytest.mark.parametrize("recipe", [*PUBLIC, *OURS])
def test_recipes_have_no_error(recipe: str) -> None:
    report = plan(data_of(Example(recipe)))
    assert [f"{each.code} {each.message}" for each in report.of(Severity.ERROR)] == []


def boxes_here(**changes: Any) -> dict[str, Any]:
    """A recipe whose boxes are on a host of a known size."""
    here = {"sandbox.backend": "bubblewrap", "sandbox.hosts": None, "sandbox.memory_bytes": 2**30}
    return data_of(Example("many-nodes", {**here, **changes}))


@pytest.mark.parametrize(
    ("code", "tight", "roomy"),
    [
        # More boxes than the host's memory holds (P904).
        (
            "P901",
            boxes_here(**{"sandbox.boxes": 64, "hardware.host_mem_bytes": 10**12}),
            boxes_here(**{"sandbox.boxes": 64, "hardware.host_mem_bytes": 10**14}),
        ),
        (
            "P902",
            boxes_here(**{"sandbox.boxes": 2, "sandbox.memory_bytes": 10**11, "hardware.host_mem_bytes": 10**12}),
            boxes_here(**{"sandbox.boxes": 2, "hardware.host_mem_bytes": 10**14}),
        ),
        # Engines of half as many GPUs, which weights do not fit into (P803).
        (
            "P403",
            data_of(Example("qwen3-30b", {"hardware.gpu_mem_bytes": 15 * 2**30, "rollout.mem_fraction": 0.8})),
            data_of(Example("qwen3-30b")),
        ),
    ],
)
def test_a_warning_suggests_nothing_that_would_be_refused(
    code: str, tight: dict[str, Any], roomy: dict[str, Any]
) -> None:
    (finding,) = (each for each in plan(roomy).findings if each.code == code)
    assert finding.suggest
    report = plan(tight)
    (finding,) = (each for each in report.findings if each.code == code)
    assert finding.fix
    refused = {(each.code, each.path) for each in report.of(Severity.ERROR)}
    after = plan(changed(tight, finding.suggest)).of(Severity.ERROR)
    assert {(each.code, each.path) for each in after} <= refused
