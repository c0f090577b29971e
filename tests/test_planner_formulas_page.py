"""docs/plan-formulas.md says what the code computes: its figures, and the guesses that it lists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.planvectors import FORMULAS, VECTORS

PAGE = (Path(__file__).parents[1] / "docs/plan-formulas.md").read_text(encoding="utf-8")
FIGURES = re.findall(r"^\| (G[\d.]+) \|.*\| (\w+) = (-?[\d,.]+) \|$", PAGE, re.MULTILINE)
GUESSES = re.findall(r"^\| `(\w+)\.(\w+)` \| ([\d.e]+) \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("vector", "name", "value"), FIGURES)
def test_a_figure_is_what_the_formula_gives(vector: str, name: str, value: str) -> None:
    (it,) = (each for each in VECTORS if each["id"] == vector)
    found = FORMULAS[it["formula"]](it["inputs"])[name]
    written = value.replace(",", "")
    digits = len(written.partition(".")[2])
    assert f"{found:.{digits}f}" == written


def test_every_formula_has_a_section_with_a_figure() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for number in range(1, 18):
        (section,) = (each for each in sections if each.startswith(f"F{number} "))
        assert re.search(rf"^\| G{number}\.\d+ \|", section, re.MULTILINE), number


@pytest.mark.parametrize(("module", "constant", "value"), GUESSES)
def test_a_guess_is_the_constant_of_the_code(module: str, constant: str, value: str) -> None:
    assert getattr(importlib.import_module(f"palestra.cli.planner.{module}"), constant) == float(value)


def test_there_are_figures_and_guesses() -> None:
    assert len(FIGURES) > 40
    assert len(GUESSES) == 16
