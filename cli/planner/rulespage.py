"""docs/plan-rules.md: every rule with what it refuses, made from the registry. Pure but for package data."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.examples import OURS, PUBLIC
from palestra.cli.planner.explain import changes_of, said
from palestra.cli.planner.rules import registry
from palestra.cli.planner.types import Rule

FAMILIES = {
    "P0": "Reading a file",
    "P1": "The model",
    "P2": "The layout of training",
    "P3": "Placement",
    "P4": "Engines and caches",
    "P5": "Schedule, staleness, partial rollouts",
    "P6": "Weights",
    "P7": "Batch, context, sampling",
    "P8": "Memory and disk",
    "P9": "Boxes, services, hygiene",
}
HEAD = f"""# Rules of a plan

Made by `palestra plan --rules-page`; `PALESTRA_WRITE_DOCS=1 pytest tests/test_planner_docs.py` writes it.
`palestra plan --explain CODE` says the same of one rule. Values that a rule speaks of are those of the example.

An *error* would crash, hang or train wrong in silence; `palestra train` refuses it. A *warning* runs, but is wasteful, unstable or
was never verified. A *note* is worth knowing. A rule whose inputs another rule found wrong is not asked.

Each example is a recipe that comes with the planner ({", ".join((*OURS, *PUBLIC))})
with fields changed, and can be tried: `palestra plan --recipe NAME --table.key=value`.
"""


def rules_page() -> str:
    """The page."""
    lines = [HEAD]
    for family, title in FAMILIES.items():
        rules = [rule for code, rule in registry().items() if code.startswith(family)]
        if rules:
            lines += [f"## {family}xx: {title}", ""]
            for rule in rules:
                lines += _of(rule)
    return "\n".join(lines).rstrip() + "\n"


def _of(rule: Rule) -> Iterator[str]:
    yield f"### {rule.code}: {rule.title}"
    yield ""
    yield f"{str(rule.severity).capitalize()}, `{rule.path}`. {rule.why}"
    yield ""
    yield f"- {'Refused' if rule.severity == 'error' else 'Found'}: `{changes_of(rule.fails)}`"
    for each in said(rule):
        fix = f" Fix: {each.fix}." if each.fix else ""
        yield f"  - `{each.path}`: {each.message}.{fix}"
    yield f"- Passes: `{changes_of(rule.passes)}`"
    yield ""
