"""`palestra train CONFIG.toml [--key.sub=value ...] [--resume] [--rollout-only | --train-only | --replay DUMP]`: a training job on this
machine.

In: a configuration. Out: a run folder, progress on the console, and an exit status: 0 done, 1 the run cannot go on, 2 the configuration is
wrong, 130 stopped by the user. The supervisor that this starts loads no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palestra.cli.config import ConfigError, RunConfig, check_config, read_tables
from palestra.cli.launch.local import LocalLauncher
from palestra.cli.launch.types import LaunchError
from palestra.cli.modes import add_flags, check_mode, overrides_of, supervisor_of
from palestra.cli.preflight import keep, preflight
from palestra.cli.progress import Progress, summary
from palestra.cli.replay import replay_run
from palestra.cli.runfolder import owned, prepare, resolve_model
from palestra.envs.registry import find_spec
from palestra.envs.tasksources import read_any_tasks
from palestra.envs.types import EnvError, TaskError
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.settling import settle
from palestra.server.evaluating.types import EvaluatingError
from palestra.trainer.checkpoints import Checkpoints
from palestra.trainer.megatron.passthrough import check_passthrough
from palestra.trainer.types import TrainerError


def main(argv: Sequence[str]) -> int:
    """Trains."""
    parser = argparse.ArgumentParser(
        prog="palestra train", description="Any field of the file can be given as --table.key=value."
    )
    parser.add_argument("config", type=Path, help="the run's TOML file")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the same folder")
    add_flags(parser)
    options, overrides = parser.parse_known_args(argv)
    if bad := [word for word in overrides if not word.startswith("--") or "=" not in word]:
        parser.error(f"unexpected {bad[0]!r}; overrides look like --table.key=value")
    if options.replay is not None and options.resume:
        parser.error("--replay goes on with no run: leave out --resume")
    console = Console(stderr=False, soft_wrap=True)
    try:
        tables = read_tables(options.config, [*overrides, *overrides_of(options)])
        config = check_config(tables, str(options.config))
        check_inputs(config)
        model = resolve_model(config.model, console)
        if options.replay is not None:
            return replay_run(config, model, options.replay, console)
        left_out = check_mode(config, options.resume)
        report = preflight(tables, model, str(options.config))
        with owned(config.folder.resolve(), "train.lock"):
            folder = prepare(config, model, options.resume)
            for line in [*keep(folder, report), *left_out]:
                console.print(f"warning {line}", highlight=False)
            if options.resume:
                settle_evaluations(folder, console)
            return run(folder, config, console)
    except (ConfigError, EnvError, TaskError, EvaluatingError) as error:
        print(f"palestra train: {error}", file=sys.stderr)
        return 2


def run(folder: Path, config: RunConfig, console: Console) -> int:
    """Runs a prepared folder to its end and shows what came of it."""
    console.print(f"run {folder}", highlight=False)
    try:
        with Progress(folder, config.run.steps, console) as progress:
            status = supervisor_of(folder, config, LocalLauncher(), progress).run()
    except LaunchError as error:
        print(f"palestra train: {error}", file=sys.stderr)
        return 1
    if config.run.mode != "train_only":  # which has sampled nothing that a ledger could show
        summary(folder, config.run.steps, console, over=status == 0)
    if status == 0:
        console.print(what_next(folder, config), highlight=False)
    return status


def settle_evaluations(folder: Path, console: Console) -> None:
    """Says which evaluations a resumed run cannot keep, or go on with.

    Raises:
        EvaluatingError: the disk refused.
    """
    newest = Checkpoints(folder / "checkpoints").latest()
    for done in settle(EvalDesk(folder), -1 if newest is None else newest.meta.train_step):
        console.print(
            f"evaluation of step {done.step} (version {done.version}) is void: {done.reason}", highlight=False
        )


def what_next(folder: Path, config: RunConfig) -> str:
    """Commands that can be copied as they are: under the name that this one was started by, with paths as short as they come."""
    name = sys.argv[0] if Path(sys.argv[0]).name == "palestra" else "palestra"
    run = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    twice = f"  {name} train {run}/run.toml --resume --run.steps={2 * config.run.steps}   twice as many steps"
    if config.run.mode == "train_only":
        return f"\nWhat next:\n{twice}, where there are batches for them"
    if config.run.mode == "rollout_only":
        return f"\nWhat next:\n  {name} train CONFIG --train-only {config.run.dump} --run.name=NAME   trains on these batches"
    return (
        f"\nWhat next:\n  {name} inspect {run}             its groups and rollouts\n"
        f"  {name} inspect {run} g000000-0   one rollout, token by token\n"
        f"{twice}"
    )


def check_inputs(config: RunConfig) -> None:
    """Everything that can be refused before a process starts.

    Raises:
        ConfigError, EnvError, TaskError: what is wrong and where.
    """
    find_spec(config.env.id)
    if config.env.tasks is not None:
        read_any_tasks(config.env.tasks)
    if config.eval is not None:
        find_spec(config.eval.env_id(config.env.id))
        if config.eval.tasks is not None:
            read_any_tasks(config.eval.tasks)
    if config.sft is not None and not Path(config.sft.data).is_file():
        raise ConfigError(f"sft.data: {config.sft.data} is no file")
    window = min(config.algo.max_context or config.rollout.context_len, config.rollout.context_len)
    if config.algo.max_response >= window:
        raise ConfigError(
            f"algo.max_response ({config.algo.max_response}) leaves no room for a prompt in {window} tokens"
        )
    try:
        check_passthrough(config.megatron)
    except TrainerError as error:
        raise ConfigError(str(error)) from None
