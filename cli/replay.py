"""`palestra train RUN/run.toml --replay DUMP`: one batch of a run trained again, and compared bit for bit with what was recorded.

In: a run's folder and a dumped batch of it. Out: figures on the console, and an exit status: 0 the same, 1 something differs or nothing was
recorded. Nothing is written, and no role is started: torch is loaded here.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from palestra.cli.config import ConfigError, RunConfig
from palestra.cli.roles.context import RoleContext
from palestra.cli.roles.trainer import settings_of
from palestra.cli.runfolder import read_metrics
from palestra.trainer.dumps import choose_batch
from palestra.trainer.types import TrainerError

SHOWN = (
    "train/loss",
    "train/grad_norm",
    "train/ratio/max",
    "train/abs_dlogp/max",
    "train/tokens",
    "train/lr",
    "reward/mean",
)
"""Figures that are printed; all are compared."""


def replay_run(config: RunConfig, model: Path, dump: Path, console: Console) -> int:
    """Trains the batch again and says what came of it.

    Raises:
        ConfigError: the run, the batch or a checkpoint that leads to it is not there, or not of one kind.
    """
    folder = config.folder.resolve()
    if not (folder / "run.toml").is_file():
        raise ConfigError(
            f"{folder} has no run whose checkpoints a batch could be replayed from; --replay takes RUN/run.toml"
        )
    settle_threads(config)
    from palestra.trainer.records import read_step
    from palestra.trainer.replay import differences, replay
    from palestra.trainer.settings import make_backend

    settings = settings_of(RoleContext("trainer", folder, config, model))
    try:
        path = choose_batch(dump)
        done = replay(settings, make_backend(settings), folder, config.run.name, path)
    except TrainerError as error:
        raise ConfigError(str(error)) from error
    origin = done.batch.origin
    console.print(f"{path.name}: step {origin.step} of run {origin.run}, again from {done.checkpoint}", highlight=False)
    if origin.config_hash != settings.config_hash:
        console.print("warning the batch was dumped under another configuration than this one", highlight=False)
    for name in SHOWN:
        if name in done.result.metrics:
            console.print(f"  {name:<22} {done.result.metrics[name]!r}", highlight=False)
    recorded = next((entry for entry in read_metrics(folder) if entry["train_step"] == origin.step), None)
    if recorded is None:
        console.print(f"not compared: the run has no record of step {origin.step}", highlight=False)
        return 1
    found = differences(done.result, recorded, read_step(folder, origin.step))
    for line in found:
        console.print(f"differs: {line}", highlight=False)
    rows = len(done.result.records)
    console.print(
        f"{len(found)} differences" if found else f"the same bit for bit: all figures and the logprobs of {rows} rows",
        highlight=False,
    )
    return 1 if found else 0


def settle_threads(config: RunConfig) -> None:
    """Gives this process the surroundings that the supervisor gives a trainer: sums depend on the number of threads that add them up. It
    comes before torch is loaded.
    """
    os.environ.update({"OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"})
    if config.train.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.train.threads)
