"""`palestra doctor template MODEL`: whether a model's conversations can go on token by token.

In: a model folder. Out: a table on stdout of what holds and what forks. Exit status: 0; 1 where a law is broken; 2 for bad input. Nothing
is waited for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.server.renderer.proof import Compared, Proof, Verdict, compare, prove
from palestra.server.renderer.registry import GENERIC, Choice, choose_family, known_families, make_renderer
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import Renderer
from palestra.server.types import RenderError

COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.FORKS: "yellow",
    Verdict.REFUSED: "yellow",
    Verdict.MISREAD: "yellow",
    Verdict.BROKEN: "red",
}
LEGEND = """holds: each prompt goes on from the ids that the engine has seen
forks: a request of this kind starts a branch, on record with the reason
cannot be said: the chat family has no way to write it; such a request is refused
misread: the prompts go on, but a reply of this kind is read back as another message
broken: a law does not hold; do not train on this"""


def main(argv: Sequence[str]) -> int:
    """Checks the folder that is named; the exit status."""
    parser = argparse.ArgumentParser(prog="palestra doctor template")
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model's folder")
    parser.add_argument("--family", help=f"instead of the one that fits best: {known_families()}")
    options = parser.parse_args(argv)
    return check_template(options.model, options.family)


def check_template(folder: Path, family: str | None = None) -> int:
    """Prints which family a folder gets, and what of the corpus holds; 1 where a law is broken, 2 where nothing can be tried."""
    if not folder.is_dir():
        print(f"{folder}: no such folder", file=sys.stderr)
        return 2
    try:
        codec = TokenCodec(folder)
        choice = Choice(family, "as asked for") if family else choose_family(folder, codec)
        renderer = make_renderer(folder, codec, choice.family)
    except RenderError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.print(f"family  {choice.family}: {choice.why}", markup=False)
    stops = ", ".join(f"{token} {codec.token_text(token)}" for token in renderer.stop_ids)
    console.print(f"stops   {stops}", markup=False)
    proof = prove(renderer)
    console.print(_outcomes(proof))
    if choice.family != GENERIC:
        _print_comparison(console, folder, codec, renderer)
    console.print(LEGEND, style="dim", markup=False)
    return 1 if proof.broken else 0


def _outcomes(proof: Proof) -> Table:
    table = Table("conversation", "verdict", "detail")
    for outcome in proof.outcomes:
        colour = COLOURS[outcome.verdict]
        table.add_row(outcome.kind, f"[{colour}]{outcome.verdict}[/]", escape(_short(outcome.detail)))
    return table


def _print_comparison(console: Console, folder: Path, codec: TokenCodec, renderer: Renderer) -> None:
    """First prompts beside those of the folder's own template, if it has one."""
    try:
        compared: tuple[Compared, ...] = compare(renderer, make_renderer(folder, codec, GENERIC))
    except RenderError as error:
        console.print(f"own chat template: not compared ({error})", markup=False)
        return
    table = Table("first prompt", "beside the own template", "where they differ")
    for one in compared:
        table.add_row(one.kind, "[green]same[/]" if one.same else "[yellow]differs[/]", escape(_short(one.detail)))
    console.print(table)


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
