"""The run's folder: made for a new run, checked for one that goes on.

In: a configuration. Out: a folder with `run.toml`, `meta.json` and the keys. A training run's folder that exists is only used with
`--resume`, and then nothing that shapes the data or the model may have changed; a service goes on in its folder whenever it is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from palestra.cli.config import (
    AnyConfig,
    ConfigError,
    RunConfig,
    ServeConfig,
    dump_toml,
    kind_of,
    read_run,
)
from palestra.cli.roles.context import write_atomically
from palestra.cli.sections import ModelConfig
from palestra.server.store.lock import FileLock
from palestra.server.types import StoreError

MAY_CHANGE = frozenset(
    {
        "run.steps",
        "run.dump",
        "run.save_every",
        "run.keep_checkpoints",
        "run.start_deadline_s",
        "schedule.deadline_s",
        "env.concurrency",
    }
)
"""Keys that a resumed run may have another value of."""
MAY_CHANGE_TABLES = frozenset({"eval", "hardware", "workload"})
"""Tables of which it may have all otherwise: an evaluation changes no training, and the others only tell the planner."""


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of this key."""
    return key in MAY_CHANGE or key.split(".")[0] in MAY_CHANGE_TABLES


SERVICE_KEEPS = frozenset({"model.path", "rollout.context_len"})
"""Fields that a service cannot have otherwise than before: its open sessions are told in this model's tokens, within this window."""


@contextlib.contextmanager
def owned(folder: Path, lock_name: str) -> Iterator[None]:
    """While the context is open no other process runs in this folder. The lock ends with its process, however that ends.

    Raises:
        ConfigError: one does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / lock_name)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None
    except StoreError as error:
        raise ConfigError(f"this folder is run or served already, or cannot be written: {error}") from None
    try:
        yield
    finally:
        lock.release()


def prepare(config: RunConfig, model_folder: Path, resume: bool) -> Path:
    """A training run's folder, ready for its roles.

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
        _check_kind(folder, "train")
        # A run that only plays, or only trains, is its batches; one that does both may keep them or not.
        fixed = {"run.dump"} if config.run.mode != "train" else set()
        if changed := [line for key, line in _changes(folder, config) if key in fixed or not may_change(key)]:
            raise ConfigError(
                f"a resumed run cannot change {', '.join(changed)}; start a new run under another --run.name"
            )
    _furnish(folder, config, model_folder, "train", ("log", "roles", "store", "steps", "checkpoints"))
    return folder


def prepare_service(config: ServeConfig, model_folder: Path) -> Path:
    """A service's folder, ready for its roles; one that has served before goes on.

    Raises:
        ConfigError: it has a training run, or was served with another model or window.
    """
    folder = config.folder.resolve()
    if (folder / "run.toml").is_file():
        _check_kind(folder, "serve")
        if changed := [line for key, line in _changes(folder, config) if key in SERVICE_KEEPS]:
            raise ConfigError(f"{folder} cannot go on with other {', '.join(changed)}; choose another --name")
    _furnish(folder, config, model_folder, "serve", ("log", "roles", "store"))
    if config.serve.agent_key:
        _make_key(folder / "roles" / "agent.key")
    return folder


def resolve_model(model: ModelConfig, console: Console) -> Path:
    """The model's folder; a packaged model is converted on its first use, in a process of its own (it needs torch).

    Raises:
        ConfigError: there is no such model; the message says what to do.
    """
    cache = Path(model.cache).expanduser()
    command = [sys.executable, "-m", "palestra.trainer.packaged", model.path, "--cache", str(cache)]
    with console.status(f"preparing the model {model.path}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(f"model.path: {lines[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def _furnish(folder: Path, config: AnyConfig, model_folder: Path, kind: str, parts: Sequence[str]) -> None:
    for part in parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
    # Only a folder with a run has files of roles that are ours to take away.
    for stale in (folder / "roles").glob("*.json") if (folder / "run.toml").is_file() else ():
        stale.unlink()
    _make_key(folder / "roles" / "admin.token")
    meta = {
        "kind": kind,
        "model_folder": str(model_folder),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "palestra": version("palestra"),
        "python": platform.python_version(),
    }
    write_atomically(folder / "meta.json", json.dumps(meta, indent=1))
    # Last: a folder that has it has all of the others.
    write_atomically(folder / "run.toml", dump_toml(config))


def _make_key(path: Path) -> None:
    """A random key that only this user can read, there whole or not at all; one that is there stays."""
    if path.is_file() and path.stat().st_size:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


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


def _check_kind(folder: Path, kind: str) -> None:
    if (found := kind_of(folder)) != kind:
        raise ConfigError(f"{folder} is the folder of `palestra {found}`; choose another name")


def _changes(folder: Path, now: AnyConfig) -> list[tuple[str, str]]:
    """(field, what became of it) of all that the folder's configuration has otherwise."""
    old, new = dict(_flat(read_run(folder).model_dump(mode="json"))), dict(_flat(now.model_dump(mode="json")))
    return [
        (key, f"{key} (was {old.get(key)!r}, is {new.get(key)!r})")
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
