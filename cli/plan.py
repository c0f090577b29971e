"""`palestra plan CONFIG [--table.key=value ...]`: what a run would need, how long its steps would take and what speaks against it.

In: a run's file, or a packaged recipe. Out: a report on stdout, or files of an export. Exit status: 0 nothing speaks against it; 1 errors
(with --strict: or warnings); 2 it could not be read. Nothing is started and nothing is waited for but the disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from palestra.cli.config import ConfigError
from palestra.cli.planner.compare import compare, compare_lines, plain_comparison
from palestra.cli.planner.explain import explain
from palestra.cli.planner.export import export
from palestra.cli.planner.listing import listing
from palestra.cli.planner.plain import dumped, plain
from palestra.cli.planner.plan import case_of
from palestra.cli.planner.rulespage import rules_page
from palestra.cli.planner.sweep import plain_row, sweep, sweep_lines
from palestra.cli.planner.text import Line, finding_lines, report_lines
from palestra.cli.planner.types import PlanReport, Severity
from palestra.cli.plans.sources import Source, of_either, of_file, of_recipe
from palestra.cli.plans.writing import write_files
from palestra.envs.overrides import read_value

MODES = ("explain", "sweep", "compare", "export", "toml", "list", "rules_page")
"""Options that say what is done in place of a report; one at a time."""
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "head": "bold", "dim": "dim", "": ""}


def main(argv: Sequence[str]) -> int:
    """Plans; its exit status."""
    options, overrides = _parsed(argv)
    try:
        return _run(options, overrides)
    except (ConfigError, ValueError) as error:
        print(f"palestra plan: {error}", file=sys.stderr)
        return 2


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="palestra plan",
        description="Check a run before paying for it. Any field of the file can be given as --table.key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", type=Path, help="the run's TOML file")
    parser.add_argument("--recipe", metavar="NAME", help="a packaged recipe in place of a file; --list names them")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="the model's config.json (Hugging Face)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument("--explain", metavar="NAME", help="a rule's code, a field's path, or a number's id")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B", help="a row for each combination; repeatable"
    )
    parser.add_argument("--compare", metavar="OTHER", help="what another file, or a recipe, has otherwise")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write files that start the planned run")
    parser.add_argument("--only", metavar="A,B", help="with --export: these alone")
    parser.add_argument(
        "--force", action="store_true", help="with --export: over files that are there, and with errors"
    )
    parser.add_argument("--toml", action="store_true", help="with --recipe: print its file")
    parser.add_argument("--list", action="store_true", help="presets of models and GPUs, and recipes")
    parser.add_argument("--rules-page", action="store_true", help="all rules, as docs/plan-rules.md has them")
    options, words = parser.parse_known_args(argv)
    _check_words(parser, options, words)
    return options, words


def _check_words(parser: argparse.ArgumentParser, options: argparse.Namespace, words: Sequence[str]) -> None:
    """Ends with status 2 where words exclude each other, or where one would be without effect."""
    if bad := [word for word in words if not word.startswith("--") or "=" not in word]:
        parser.error(f"unexpected {bad[0]!r}; overrides look like --table.key=value")
    if options.config is not None and options.recipe is not None:
        parser.error("a file or --recipe, not both")
    if (
        options.config is None
        and options.recipe is None
        and not (options.list or options.rules_page or options.explain)
    ):
        parser.error("give a run's file, or --recipe NAME (--list names them)")
    if (options.only or options.force) and options.export is None:
        parser.error("--only and --force go with --export")
    modes = [name for name in MODES if getattr(options, name)]
    if len(modes) > 1:
        parser.error(f"{_flag(modes[0])} and {_flag(modes[1])} do not go together")
    mode = modes[0] if modes else ""
    if options.json and mode == "explain":
        parser.error("--explain has no --json: plan --json has the same of everything")
    if options.json and mode in ("export", "toml", "list", "rules_page"):
        parser.error(f"{_flag(mode)} has no --json")
    if options.strict and mode in ("explain", "sweep", "toml", "list", "rules_page"):
        parser.error(f"--strict is of a plan: {_flag(mode)} has no findings to count")
    source = options.config is not None or options.recipe is not None
    if mode in ("list", "rules_page") and (source or words or options.model_config):
        parser.error(f"{_flag(mode)} stands alone")
    if mode == "explain" and not source and (words or options.model_config):
        parser.error("--explain with other fields needs CONFIG or --recipe, whose they are")
    if mode == "toml" and (options.config is not None or words or options.model_config):
        parser.error("--toml prints a recipe's file as it is: it goes with --recipe alone")


def _flag(mode: str) -> str:
    return "--" + mode.replace("_", "-")


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.list or options.rules_page:
        _say(listing() if options.list else [Line(rules_page().rstrip())])
        return 0
    source = _source(options, overrides) if options.config or options.recipe else None
    if options.explain:
        _say(explain(options.explain, source.report() if source else None))
        return 0
    assert source is not None
    if options.toml:
        print(source.text, end="")
        return 0
    if options.sweep:
        return _sweep(source, options.sweep, options.json)
    report = source.report()
    if options.compare:
        _compare(source, report, of_either(options.compare, options.model_config), options.json)
    elif options.export:
        if report.of(Severity.ERROR) and not options.force:
            _say(finding_lines(report.of(Severity.ERROR)))
            print("palestra plan: nothing is written while errors stand (--force does it)", file=sys.stderr)
            return 1
        _export(source, report, options.export, options)
    elif options.json:
        print(dumped(plain(report)), end="")
    else:
        _say(report_lines(report, source.name))
    return status_of(report, options.strict)


def status_of(report: PlanReport, strict: bool) -> int:
    """0, or 1 where something speaks against it."""
    return int(bool(report.of(Severity.ERROR) or (strict and report.of(Severity.WARNING))))


def _source(options: argparse.Namespace, overrides: Sequence[str]) -> Source:
    if options.recipe is not None:
        return of_recipe(options.recipe, overrides, options.model_config)
    return of_file(options.config, overrides, options.model_config)


def _sweep(source: Source, words: Sequence[str], as_json: bool) -> int:
    axes: dict[str, list[Any]] = {}
    for path, values in map(_axis, words):
        if path in axes:
            raise ConfigError(f"--sweep {path} is given twice: write all of its values in one")
        axes[path] = values
    rows = sweep(source.tables, axes, source.model)
    if as_json:
        print(dumped([plain_row(row) for row in rows]), end="")
    else:
        _say(sweep_lines(rows))
    return int(all(row.errors for row in rows))


def _axis(word: str) -> tuple[str, list[Any]]:
    """`KEY=A,B`; the values may also be a list as TOML writes it.

    Raises:
        ConfigError: it is of another form.
    """
    path, equals, text = word.removeprefix("--").partition("=")
    table, _, key = path.partition(".")
    if not equals or not table or not key or not text:
        raise ConfigError(f"--sweep {word}: write table.key=A,B,C")
    if path == "model.path":
        raise ConfigError("--sweep model.path: dimensions are read once, of one folder; sweep model.preset")
    whole = read_value(text)
    if isinstance(whole, list):
        return path, whole
    parts = [each.strip() for each in text.split(",")]
    if not all(parts):
        raise ConfigError(f'--sweep {word}: a value is empty; write table.key=A,B,C, and an empty text as ""')
    return path, [read_value(each) for each in parts]


def _compare(source: Source, report: PlanReport, other: Source, as_json: bool) -> None:
    second = other.report()
    found = compare(report, second)
    if as_json:
        print(dumped(plain_comparison(found)), end="")
    else:
        _say(compare_lines(found, (source.name, report), (other.name, second)))


def _export(source: Source, report: PlanReport, folder: Path, options: argparse.Namespace) -> None:
    """Writes the files of a plan and says which.

    Raises:
        ConfigError: the folder has files already, or the disk refused.
        ExportError: a name of --only is unknown, or this plan has no such file.
    """
    case, _, _, _ = case_of(source.tables, source.model)
    only = tuple(name.strip() for name in options.only.split(",")) if options.only else ()
    files = export(report, case, source=source.text, only=only, force=options.force)
    write_files(folder, files, options.force)
    for name in files:
        print(folder / name)


def _say(lines: Iterable[Line]) -> None:
    """To a terminal with its styles, to a pipe as plain text."""
    if not sys.stdout.isatty():
        for line in lines:
            print(line.text)
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print(line.text, style=STYLES[line.style])
