"""Other ways to go through a run: playing without training, training without engines, and one batch again.

In: flags of `palestra train`. Out: the overrides that they stand for, refusals before anything starts, and the supervisor that fits.
`--replay` is no run: see `palestra.cli.replay`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import ClassVar

from palestra.cli.config import ConfigError, RunConfig
from palestra.cli.launch.types import Launcher
from palestra.cli.progress import Progress
from palestra.cli.supervisor import Supervisor
from palestra.trainer.dumps import batch_files


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The modes, of which one can be asked for."""
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--rollout-only",
        type=Path,
        metavar="DUMP",
        help="play only, and write the batches of each step into this folder",
    )
    modes.add_argument(
        "--train-only",
        type=Path,
        metavar="DUMP",
        help="train on the batches of this folder, without engines and service",
    )
    modes.add_argument(
        "--replay",
        type=Path,
        metavar="DUMP",
        help="train one batch of this run again (a file, or the last of a folder) and compare",
    )


def overrides_of(flags: argparse.Namespace) -> list[str]:
    """What the flags stand for; a folder is named by its whole path, since roles and later commands may be elsewhere."""
    for mode, folder in (("rollout_only", flags.rollout_only), ("train_only", flags.train_only)):
        if folder is not None:
            return [f"--run.mode={json.dumps(mode)}", f"--run.dump={json.dumps(str(folder.expanduser().resolve()))}"]
    return []


def check_mode(config: RunConfig, resume: bool) -> list[str]:
    """What has to be known about a run's mode before it starts: a line for each thing that it leaves out.

    Raises:
        ConfigError: there is nothing to train on, or something where batches are to be written.
    """
    run = config.run
    if run.dump is None:
        return []
    folder = run.dump.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dump: {folder} is no folder")
    found = batch_files(folder)
    if run.mode != "train_only":
        if found and not resume:
            raise ConfigError(f"run.dump: {folder} has batches already ({found[0].name}); choose another folder")
        return []
    if not found:
        raise ConfigError(f"run.dump: {folder} has no batches (step-00000001.batch and so on) to train on")
    left = ["[eval]: nothing is evaluated without engines"] if config.eval is not None else []
    if len(found) < run.steps:
        left.append(f"run.steps: {folder} has batches for {len(found)} of {run.steps} steps")
    return left


def supervisor_of(folder: Path, config: RunConfig, launcher: Launcher, progress: Progress) -> Supervisor:
    """Who runs the roles that the mode needs."""
    kind = TrainerAlone if config.run.mode == "train_only" else Supervisor
    return kind(folder, config, launcher, progress)


class TrainerAlone(Supervisor):
    """A run whose rollouts are on the disk: it has one role, and nobody who could be evaluated."""

    order: ClassVar[tuple[str, ...]] = ("trainer",)  # type: ignore[assignment]  # of its base, mypy infers four roles

    def __init__(self, folder: Path, config: RunConfig, launcher: Launcher, progress: Progress) -> None:
        super().__init__(folder, config, launcher, progress)
        self.evals = None
