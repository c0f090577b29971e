"""Scores of checks in a document: a table between two marks.

Reports go in; the file is written anew, aside, and renamed. Nothing is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from palestra.envs.checking import Report, Verdict

BEGIN, END = "<!-- scores -->", "<!-- /scores -->"


def fill(path: Path, reports: Sequence[Report]) -> None:
    """Puts the reports' table between the marks.

    Raises:
        ValueError: the file cannot be read, or has not both marks, once each.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"{path}: the scores go between {BEGIN} and {END}, once in the file")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(f"{before}\n{table(reports)}\n{after}", encoding="utf-8")
    os.replace(aside, path)


def table(reports: Sequence[Report]) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| environment | tasks | null | echo | oracle | laws kept | not testable |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        scores = [f"{report.scores[kind]:.3f}" if kind in report.scores else "-" for kind in ("null", "echo", "oracle")]
        kept = len(report.having(Verdict.PASSED))
        tried = kept + len(report.failed)
        untested = ", ".join(outcome.law for outcome in report.untested) or "-"
        cells = [f"`{report.env_id}`", f"{len(report.tasks)} of {report.size}", *scores, f"{kept} of {tried}", untested]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
