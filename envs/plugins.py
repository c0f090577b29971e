"""Environments of installed packages: the entry points of group `palestra.envs`.

A package names a module under that group, and importing the module registers its ids with gymnasium. `load` imports them all, once per
process; one that fails is kept with its error and stops no other. Waits for nothing but the imports.
"""

from __future__ import annotations

import importlib.metadata
import threading
from dataclasses import dataclass

import gymnasium as gym

GROUP = "palestra.envs"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point."""

    name: str
    module: str
    """What is imported."""
    package: str
    """The distribution that brings it, and its version."""
    ids: tuple[str, ...] = ()
    """What it registered."""
    error: str | None = None
    """Why it could not be imported."""


_lock = threading.RLock()
_loaded: tuple[Plugin, ...] | None = None


def load() -> tuple[Plugin, ...]:
    """Imports every plugin, in the order of their names; done once, later calls give the same answer. A plugin that asks while it is
    imported itself is told of none.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = ()
            found = importlib.metadata.entry_points(group=GROUP)
            _loaded = tuple(_load(entry) for entry in sorted(found, key=lambda entry: (entry.name, entry.value)))
        return _loaded


def faults() -> str:
    """Plugins that failed, as a clause for a message; "" where none did."""
    failed = [f"{plugin.name} ({plugin.package}): {plugin.error}" for plugin in load() if plugin.error is not None]
    return "; plugins that could not be imported: " + "; ".join(failed) if failed else ""


def _load(entry: importlib.metadata.EntryPoint) -> Plugin:
    package = "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    known = set(gym.registry)
    try:
        entry.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's module: whatever it raises, the others are loaded
        return Plugin(entry.name, entry.value, package, error=f"{type(error).__name__}: {error}")
    root = entry.module.partition(".")[0]
    ids = {name for name, spec in gym.registry.items() if name not in known or _root_of(spec.entry_point) == root}
    return Plugin(entry.name, entry.value, package, tuple(sorted(ids)))


def _root_of(entry_point: object) -> str:
    """The top-level package that an environment is made by: its module may have been imported before."""
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return str(module).partition(":")[0].partition(".")[0]
