"""`palestra doctor sandbox`: what the sandboxes of this machine hold, and whether one of our escape probes gets out.

In: names of backends. Out: two tables on stdout: what each says that it enforces, and what came of each probe. Exit status: 0; 1 where a
probe escaped or could not be judged; 2 where no backend can be tried. Waits for the probes, about half a minute for each backend.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.sandbox.attacks.run import ATTACKS, run_attacks
from palestra.sandbox.attacks.scene import Scene
from palestra.sandbox.attacks.types import Attack, Outcome
from palestra.sandbox.choose import make
from palestra.sandbox.types import PROMISES, Backend, Enforced, SandboxError

LOCAL = ("bubblewrap", "docker", "landlock")
COLOURS = {
    "contained": "green", "weaker": "yellow", "ESCAPED": "bold red", "untried": "red",
    "kernel": "green", "watched": "yellow", "none": "red",
}  # fmt: skip
LEGEND = """kernel: the kernel holds it at once; watched: a process of ours looks now and then; none: nothing holds it
contained: the attack did not get what it wanted; weaker: it did, and the backend says so of itself
ESCAPED: it did, and should not have; untried: the probe did not work here, so nothing is known"""


def main(argv: Sequence[str]) -> int:
    """Runs the probes against each backend that is asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="palestra doctor sandbox")
    parser.add_argument("--backend", action="append", choices=(*LOCAL, "remote"), help="this one only; may be repeated")
    parser.add_argument("--host", action="append", metavar="URL", help="a sandbox host, for the backend remote")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the hosts' token")
    options = parser.parse_args(argv)
    names = options.backend or (["remote"] if options.host else LOCAL)
    if ("remote" in names) != bool(options.host):
        parser.error("the backend remote and --host URL go together")
    return check_sandbox(names, options.host or [], options.token_file)


def check_sandbox(
    names: Sequence[str],
    hosts: Sequence[str] = (),
    token_file: Path | None = None,
    attacks: Sequence[Attack] = ATTACKS,
) -> int:
    """Prints what each backend holds and what came of each attack; the exit status."""
    console = Console(highlight=False)
    try:
        token = token_file.read_text().strip() if token_file is not None else None
    except OSError as error:
        print(f"{token_file}: {error.strerror}", file=sys.stderr)
        return 2
    promises: dict[str, Enforced] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for name in names:
        options = {"urls": list(hosts), "token": token} if name == "remote" else {}
        try:
            with Scene() as scene:
                promises[name], outcomes[name] = asyncio.run(_try(make(name, **options), scene, attacks))
        except SandboxError as error:
            console.print(f"{name}: not tried: {error}", style="yellow", markup=False)
    if not outcomes:
        print("no backend can be tried here", file=sys.stderr)
        return 2
    console.print(_promises(promises))
    for name, enforced in promises.items():
        for note in enforced.notes:
            console.print(f"{name}: {note}", markup=False)
    console.print(_outcomes(outcomes))
    console.print(LEGEND, style="dim", markup=False)
    bad = _tell_of_escapes(console, outcomes)
    return 1 if bad else 0


async def _try(backend: Backend, scene: Scene, attacks: Sequence[Attack]) -> tuple[Enforced, list[Outcome]]:
    try:
        await backend.start()
        return backend.enforced(), await run_attacks(backend, scene, attacks)
    except BaseExceptionGroup as group:  # the first of several boxes that could not be had
        raise group.exceptions[0] from None
    finally:
        await backend.close()


def _promises(promises: dict[str, Enforced]) -> Table:
    table = Table("promise", *promises)
    for promise in PROMISES:
        levels = [getattr(enforced, promise) for enforced in promises.values()]
        table.add_row(promise, *[f"[{COLOURS[level]}]{level}[/]" for level in levels])
    return table


def _outcomes(outcomes: dict[str, list[Outcome]]) -> Table:
    table = Table("attack", *outcomes)
    for row in zip(*outcomes.values(), strict=True):
        cells = [f"[{COLOURS[one.judged.verdict]}]{one.judged.verdict}[/]: {escape(one.judged.how)}" for one in row]
        table.add_row(row[0].attack.name, *cells)
    return table


def _tell_of_escapes(console: Console, outcomes: dict[str, list[Outcome]]) -> bool:
    """Says at length what must not be; whether there was any."""
    bad = False
    for name, found in outcomes.items():
        for one in found:
            if one.judged.verdict in ("ESCAPED", "untried"):
                bad = True
                line = f"{name}: {one.judged.verdict}: {one.attack.name} ({one.attack.tries}): {one.judged.how}: {one.judged.detail}"
                console.print(line, style="red", markup=False)
    return bad
