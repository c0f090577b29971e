"""The table of docs/sandbox.md: a row per attack, a column per backend. In: outcomes. Out: Markdown. Waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.sandbox.attacks.types import Outcome

BEGIN, END = "<!-- attacks: written by tests/test_sandbox_attacks.py -->", "<!-- attacks: end -->"


def markdown(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The table: of each backend, what came of each attack. All must have run the same ones."""
    lines = ["| attack | tries | " + " | ".join(outcomes) + " |", "| --- | --- |" + " --- |" * len(outcomes)]
    for row in zip(*outcomes.values(), strict=True):
        attack = row[0].attack
        cells = [f"{one.judged.verdict}: {one.judged.how}" for one in row]
        lines.append(f"| {attack.name} | {attack.tries} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spliced(document: str, table: str) -> str:
    """The document with this table in its place.

    Raises:
        ValueError: it has no place for one.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
