"""Every rule of a plan has an example that it refuses and one that it lets pass, and refuses nothing else in the first."""

from __future__ import annotations

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
