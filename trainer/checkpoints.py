"""Checkpoints of a run: `checkpoints/step_N/`, there whole or not at all.

A folder is written aside, flushed, then renamed; it counts only once it has its name and its meta.json. So a process that is killed at any
point leaves the newest whole one to go on from. Nothing is waited for but the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from palestra.trainer.durable import folder_aside, remove_unfinished
from palestra.trainer.randomness import read_generators, write_generators
from palestra.trainer.types import Backend, CheckpointError

NAME = re.compile(r"step_(\d+)")
META, STATE, GENERATORS = "meta.json", "state", "generators.safetensors"


@dataclass(frozen=True, slots=True)
class Meta:
    """What a checkpoint is of."""

    train_step: int
    policy_version: int
    """Of the weights in it."""
    optimizer_steps: int
    """Optimizer steps of the reinforcement phase so far; the learning rate depends on it."""
    fingerprint: str
    """Of the model's configuration."""
    config_hash: str
    """Of the run's configuration, for the reader."""
    group_ids: tuple[str, ...] = ()
    """Groups that were trained in this very step: a process killed before it commits them must not train them again."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on the disk."""

    id: str
    path: Path
    meta: Meta


def model_fingerprint(folder: Path) -> str:
    """A hash of the model's config.json; two folders of the same shape have the same one."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


class Checkpoints:
    """The checkpoints folder of one run. One process writes it."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.root, self._keep = root, keep

    def save(self, backend: Backend, meta: Meta) -> Checkpoint:
        """Writes a checkpoint durably, then removes all but the newest ones.

        Raises:
            CheckpointError: the disk refused (full, read-only); earlier checkpoints are untouched.
        """
        target = self.root / f"step_{meta.train_step}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with folder_aside(target) as aside:
                backend.save(aside / STATE)
                write_generators(aside / GENERATORS)
                (aside / META).write_text(json.dumps(dataclasses.asdict(meta), indent=1), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"checkpoint {target} could not be written: {error}") from error
        self._prune()
        return Checkpoint(target.name, target, meta)

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if NAME.fullmatch(path.name) and (meta := _read_meta(path / META)) is not None:
                found.append(Checkpoint(path.name, path, meta))
        return sorted(found, key=lambda each: each.meta.train_step)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        return found[-1] if (found := self.all()) else None

    def load(self, backend: Backend, checkpoint: Checkpoint, fingerprint: str) -> None:
        """Puts a checkpoint's state into the backend, and the random generators where they were.

        Raises:
            CheckpointError: it is of another model, or damaged.
        """
        if checkpoint.meta.fingerprint != fingerprint:
            raise CheckpointError(f"{checkpoint.path} is of another model than this run's; start a new run folder")
        backend.load(checkpoint.path / STATE)
        if (generators := checkpoint.path / GENERATORS).is_file():  # a checkpoint without it is whole all the same
            read_generators(generators)

    def _prune(self) -> None:
        remove_unfinished(self.root)
        for old in self.all()[: -self._keep]:
            # The name goes first: a removal that is cut short must not leave a folder that looks whole.
            doomed = old.path.with_name(f".tmp-{old.path.name}-old")
            shutil.rmtree(doomed, ignore_errors=True)
            old.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _read_meta(path: Path) -> Meta | None:
    """None where the file is missing or unreadable: the folder is not whole."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Meta(**{**told, "group_ids": tuple(told["group_ids"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
