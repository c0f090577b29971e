"""`palestra engine serve MODEL --num N`: SGLang engines and the router in front of them, until interrupted.

In: a model and options. Out: URLs on the console, logs in a folder, and an exit status: 0 stopped by the user, 1 the engines cannot go on,
2 what was asked for is wrong. All is checked before anything starts. It waits for the engines, with a deadline, then for SIGINT or
SIGTERM: the first ends all of them in order, a second one at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from palestra.cli.config import ConfigError, check_as
from palestra.cli.engines.assemble import HERE, Assembly, Places, assemble
from palestra.cli.engines.fleet import EngineFleet
from palestra.cli.engines.options import take
from palestra.cli.engines.part import FleetError
from palestra.cli.engines.types import EngineSetupError
from palestra.cli.roles.context import write_atomically
from palestra.cli.runfolder import resolve_model
from palestra.cli.sections import ModelConfig
from palestra.server.config import EngineSection

FIELDS: dict[str, tuple[str, type, str]] = {
    "num": ("engines", int, "how many engines; 1 unless given"),
    "gpus-per-engine": ("gpus_per_engine", int, "tensor parallel size of one engine"),
    "router": ("router", str, "sglang-router, smg or none; one engine has no router"),
    "policy": ("router_policy", str, "how the router chooses; consistent_hashing unless given"),
    "topology": ("topology", str, "a YAML file with groups of engines"),
    "context-len": ("context_len", int, "prompt and reply together, tokens; the model's own window unless given"),
    "max-running": (
        "max_running",
        int,
        "requests that an engine decodes at a time; the engine's own choice unless given",
    ),
    "max-total-tokens": ("max_total_tokens", int, "tokens that an engine's cache holds; what fits unless given"),
    "mem-fraction": ("mem_fraction", float, "share of the device's memory for weights and cache"),
    "device": ("device", str, "cpu or cuda; what the environment is made for unless given"),
    "env": ("environment", str, "the engines' Python environment, made by palestra engine install"),
}
"""Option -> field of `[rollout]`, its type, what it means."""


def main(argv: Sequence[str]) -> int:
    """Serves; the exit status."""
    rest, sglang, router = take(argv)
    options = _parser().parse_args(rest)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    said = {
        field: value for name, (field, _, _) in FIELDS.items() if (value := getattr(options, _plain(name))) is not None
    }
    try:
        model = _model(options.model, console)
        said.setdefault("context_len", window(model))
        rollout = check_as(EngineSection, {"engine": "sglang", **said}, "arguments")
        places = Places(options.host, options.port, tuple(options.node), options.gpus_per_node)
        assembly = assemble(rollout, model, sglang, router, places)
    except (ConfigError, EngineSetupError) as error:
        print(f"palestra engine serve: {error}", file=sys.stderr)
        return 2
    url = assembly.router.url if assembly.router is not None else assembly.engines[0].url
    folder = Path(options.log) if options.log else Path("runs") / f"engines-{url.rpartition(':')[2]}" / "log"
    told = Path(options.announce).expanduser().absolute() if options.announce else None
    return run(assembly, folder.expanduser().absolute(), options.deadline, console, told)


def run(assembly: Assembly, folder: Path, deadline_s: float, console: Console, told: Path | None = None) -> int:
    """Starts an assembly, says where it is reached, and keeps it up until a signal; the exit status. `told` is a file that says so to
    programs: written when all are ready, again after each restart, and gone with the engines."""
    stop, signals = threading.Event(), 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            fleet.kill()

    def announce() -> None:
        if told is not None:
            pools = {url: asdict(sizes) for url, sizes in fleet.pools.items()}
            said = {"url": fleet.url, "workers": fleet.workers, "pools": pools, "pids": fleet.pids}
            write_atomically(told, json.dumps(said))

    console.print(f"{len(assembly.engines)} engines{' and a router' if assembly.router else ''}; logs in {folder}")
    fleet = EngineFleet(
        assembly.engines,
        assembly.router,
        folder,
        start_deadline_s=deadline_s,
        say=console.print,
        external=assembly.external,
        device=assembly.device,
    )
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with fleet:
            if fleet.start(stop):
                announce()
                console.print(banner(fleet))
                fleet.watch(stop, announce)
            console.print("stopping")
    except FleetError as error:
        print(f"palestra engine serve: {error}", file=sys.stderr)
        return 1
    finally:
        if told is not None:
            told.unlink(missing_ok=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    console.print("stopped")
    return 0


def banner(fleet: EngineFleet) -> str:
    """Where the engines are reached, what they have room for, and how a run uses them."""
    lines = [""]
    if fleet.router is not None:
        lines.append(f"router    {fleet.url}")
    for part in fleet.engines:
        if part.command.url:
            kind = "" if part.command.kind == "regular" else f"{part.command.kind}, "
            lines.append(f"{part.command.name:9} {part.command.url}  {kind}{part.pools}")
    lines += ["", "A run uses them with", "  [rollout]", '  engine = "sglang"', f"  urls = {json.dumps(fleet.workers)}"]
    if fleet.router is not None:
        lines.append(f"  router_url = {json.dumps(fleet.url)}")
    return "\n".join([*lines, "", "Ctrl-C ends them."])


def window(model: Path) -> int:
    """The longest text that a model was made for, tokens; 2048 where its files do not say.

    Raises:
        ConfigError: the folder has no config.json.
    """
    try:
        facts: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: no model is here: config.json cannot be read ({error})") from None
    length = facts.get("max_position_embeddings") or facts.get("text_config", {}).get("max_position_embeddings")
    return length if isinstance(length, int) else 2048


def _model(name: str, console: Console) -> Path:
    """A folder as it is; anything else is found or converted first, in a process of its own."""
    folder = Path(name).expanduser().absolute()
    return folder if folder.is_dir() else resolve_model(ModelConfig(path=name), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palestra engine serve",
        description="Starts SGLang engines and a router, and keeps them up. --sglang-X VALUE and --router-X VALUE go straight through to "
        "them (after MODEL); docs/engines.md says more.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder in Hugging Face form, a hub id, or a packaged model")
    for name, (_, kind, about) in FIELDS.items():
        parser.add_argument(f"--{name}", type=kind, help=about)
    parser.add_argument("--host", default=HERE, help="address to listen on; this machine only unless given")
    parser.add_argument(
        "--port", type=int, default=0, help="of the router, or of the only engine; a free one unless given"
    )
    parser.add_argument(
        "--node", action="append", default=[], metavar="ADDRESS", help="another machine for engines; repeatable"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of each machine; 8 unless given")
    parser.add_argument(
        "--deadline", type=float, default=600.0, metavar="S", help="seconds until all is ready; 600 unless given"
    )
    parser.add_argument(
        "--announce", metavar="FILE", help="JSON with URLs, pools and pids, for programs; written when all are ready"
    )
    parser.add_argument("--log", metavar="DIR", help="folder for logs; runs/engines-PORT/log unless given")
    return parser


def _plain(name: str) -> str:
    return name.replace("-", "_")
