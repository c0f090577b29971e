"""docs/plan.md and docs/plan-rules.md are what the command says; PALESTRA_WRITE_DOCS=1 writes what it says into them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.cli.plan import main
from palestra.cli.planner.rules import registry
from palestra.cli.planner.rulespage import rules_page

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, RULES = DOCS / "plan.md", DOCS / "plan-rules.md"
SHOWN = re.compile(r"^(<!-- shows: [^\n]*-->)\n```\n(?P<text>.*?)^```$", re.S | re.M)
"""A block of output. The comment above it may name sections of it: `<!-- shows: a step; numbers -->`; without one all is shown."""


def sections(output: str) -> Iterator[tuple[str, str]]:
    """Parts of a report, each with its first line; they are set off by empty lines."""
    for part in output.rstrip("\n").split("\n\n"):
        yield part.partition("\n")[0], part


def made(words: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says, of the sections that are wanted."""
    main(shlex.split(words)[2:])
    output = capsys.readouterr().out
    if wanted == "all":
        return output
    found = [part for head, part in sections(output) if any(head.startswith(name) for name in wanted.split("; "))]
    assert len(found) >= len(wanted.split("; ")), f"{words}: no section {wanted}"
    return "\n\n".join(found) + "\n"


def test_the_page_shows_what_the_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()

    def again(found: re.Match[str]) -> str:
        wanted = found[1].removeprefix("<!-- shows: ").removesuffix(" -->")
        command = found["text"].partition("\n")[0]
        assert command.startswith("$ palestra plan "), command
        return f"{found[1]}\n```\n{command}\n{made(command.removeprefix('$ '), wanted, capsys)}```"

    assert len(SHOWN.findall(page)) >= 6
    _hold(PAGE, page, SHOWN.sub(again, page))


def test_every_rule_is_on_the_page_of_rules() -> None:
    page = rules_page()
    assert [code for code in registry() if f"### {code}: " not in page] == []
    _hold(RULES, RULES.read_text() if RULES.is_file() else "", page)


def test_every_command_of_the_page_is_one_that_the_verb_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    options = set(re.findall(r"--[a-z-]+(?![a-z-]*\.)", capsys.readouterr().out))
    used = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w.=-]*\.)", PAGE.read_text()))
    assert used <= options, used - options
    assert options - used <= {"--help"}, "an option that the page says nothing of"


def _hold(path: Path, is_there: str, should_be: str) -> None:
    if os.environ.get("PALESTRA_WRITE_DOCS"):
        path.write_text(should_be)
    else:
        assert is_there == should_be, f"{path.name} is not what the command says: PALESTRA_WRITE_DOCS=1 writes it"
