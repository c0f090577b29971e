"""The run's folder: made for a new run, checked for a resumed one.

In: a configuration. Out: a folder with `run.toml`, `meta.json` and the admin token. A folder that exists is only used with `--resume`, and
then nothing that shapes the data or the model may have changed.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from palestra.cli.config import ConfigError, RunConfig, dump_toml, load_config
from palestra.cli.roles.context import write_atomically

MAY_CHANGE = frozenset(
    {
        "run.steps",
        "run.save_every",
        "run.keep_checkpoints",
        "run.start_deadline_s",
        "schedule.deadline_s",
        "env.concurrency",
    }
)
"""Fields that a resumed run may have otherwise."""


def prepare(config: RunConfig, model_folder: Path, resume: bool) -> Path:
    """The run's folder, ready for its roles.

    Raises:
        ConfigError: it exists (or does not, with `resume`), or the configuration changed in what it must not.
    """
    folder = config.folder.resolve()
    exists = (folder / "run.toml").is_file()
    if exists and not resume:
        raise ConfigError(f"{folder} has a run already: go on with --resume, or choose another --run.name")
    if resume and not exists:
        raise ConfigError(f"{folder} has no run to resume")
    if resume:
        _check_unchanged(load_config(folder / "run.toml"), config)
    for part in ("log", "roles", "store", "steps", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for stale in (folder / "roles").glob("*.json"):
        stale.unlink()
    token = folder / "roles" / "admin.token"
    if not token.is_file():
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_urlsafe(32))
    write_atomically(folder / "run.toml", dump_toml(config))
    meta = {
        "model_folder": str(model_folder),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "palestra": version("palestra"),
        "python": platform.python_version(),
    }
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1))
    return folder


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, each once: a step that was trained again after a restore stands as it was trained last."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        if isinstance(entry, dict) and "train_step" in entry and "train/groups" in entry:
            steps[int(entry["train_step"])] = entry
    return [steps[step] for step in sorted(steps)]


def _check_unchanged(before: RunConfig, now: RunConfig) -> None:
    old, new = dict(_flat(before.model_dump(mode="json"))), dict(_flat(now.model_dump(mode="json")))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and key not in MAY_CHANGE]
    if changed:
        lines = ", ".join(f"{key} (was {old.get(key)!r}, is {new.get(key)!r})" for key in changed)
        raise ConfigError(f"a resumed run cannot change {lines}; start a new run under another --run.name")


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
