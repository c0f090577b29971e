"""`palestra eval ENV ...`: plays what is owed, and says what came of it.

In: options. Out: a folder, a table or JSON on stdout, an exit status. It waits for the episodes; the first Ctrl-C lets those that are
under way end, the second leaves at once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from rich.console import Console

from palestra.agents.chat import close_client
from palestra.agents.evaluation.calls import Meter
from palestra.agents.evaluation.folder import Opened, header_of, open_folder
from palestra.agents.evaluation.parquet import load_pyarrow, write_parquet
from palestra.agents.evaluation.plan import model_seed
from palestra.agents.evaluation.players import PlainHost, eval_player, request_defaults
from palestra.agents.evaluation.records import owed
from palestra.agents.evaluation.report import write_report
from palestra.agents.evaluation.run import Evaluation, Pace
from palestra.agents.evaluation.summary import summarise
from palestra.agents.evaluation.types import EvalError, EvalSpec
from palestra.agents.group import Players
from palestra.agents.types import AgentError, SessionHost
from palestra.cli.config import ConfigError
from palestra.cli.evaluation.live import Live
from palestra.cli.evaluation.options import folder_of, parser, spec_of
from palestra.cli.evaluation.table import print_json, print_table
from palestra.envs import boxes
from palestra.envs.registry import make_env, open_tasks
from palestra.envs.sandboxes import SandboxConfig
from palestra.envs.tasks import TaskSource
from palestra.envs.types import EnvError, TaskError

LOG = "eval.log"
"""In the folder: faults with their traces. For people; nothing reads it."""


def main(argv: Sequence[str]) -> int:
    """Evaluates."""
    options = parser().parse_args(list(argv))
    folder = folder_of(options)
    try:
        if options.parquet:
            load_pyarrow()
        source = _source(options)
        spec = spec_of(options, len(source))
        header = header_of(spec, source)
        opened = open_folder(folder, header, resume=options.resume, allow_changed=options.allow_changed)
    except (ConfigError, EvalError, EnvError, TaskError) as error:
        print(f"palestra eval: {error}", file=sys.stderr)
        return 2
    console = Console(stderr=True, soft_wrap=True)
    with opened.log:
        try:
            with _logged(folder):
                evaluation, stopped = _played(options, folder, opened, source, console)
        except (ConfigError, AgentError) as error:
            print(f"palestra eval: {error}", file=sys.stderr)
            return 2
        return _finish(options, folder, evaluation, stopped)


def _source(options: argparse.Namespace) -> TaskSource:
    from palestra.cli.evaluation.options import settings

    return open_tasks(options.env, settings(options.set)["args"], options.tasks)


def _played(
    options: argparse.Namespace, folder: Path, opened: Opened, source: TaskSource, console: Console
) -> tuple[Evaluation, bool]:
    """Plays what is owed; whether the user stopped it."""
    spec, meter = opened.header.spec, Meter()
    keys = owed(opened.header, opened.rows, retry_errors=options.retry_errors)
    with ExitStack() as stack:
        boxes.configure(SandboxConfig.model_validate(dict(spec.sandbox)))
        stack.callback(boxes.close_all)
        host = stack.enter_context(_host(options, spec, meter))
        pace = Pace(options.concurrency, options.max_errors)
        evaluation = Evaluation(opened.header, source, host, opened.log, opened.rows, meter, pace)
        player = eval_player(spec, meter, evaluation.key_of, evaluation.leaving, folder / "workspaces")
        players = Players(lambda: make_env(spec.env, spec.args), player)
        console.print(
            f"evaluation {folder}: {len(keys)} of {len(opened.header.keys)} episodes to play", highlight=False
        )
        live = stack.enter_context(Live(console))
        stack.enter_context(_stoppable(evaluation, live))
        evaluation.run(keys, players, live.tick)
        stack.callback(close_client)
    return evaluation, evaluation.draining.is_set() and evaluation.fault is None


@contextlib.contextmanager
def _host(options: argparse.Namespace, spec: EvalSpec, meter: Meter) -> Iterator[SessionHost]:
    """Where sessions are opened. Agents that play by themselves find its URL where their clients look for any other."""
    chat = spec.agent.get("kind") == "chat"
    if spec.service:
        from palestra.cli.evaluation.served import ServedHost, served

        client, url = served(Path(spec.service))
        try:
            if not chat:
                _point_at(url.removesuffix("/v1"))
            yield ServedHost(client, spec)
        finally:
            client.close()
        return
    key = os.environ.get(options.api_key_env) or "none"
    if chat:
        yield PlainHost(spec.base_url, key)
        return
    from palestra.agents.evaluation.relay import Relay, Upstream

    upstream = Upstream(spec.base_url, key, request_defaults(spec), spec.max_turns, spec.request_timeout_s)
    seeds = (lambda task, k: {"seed": model_seed(spec.seed, task, k)}) if spec.model_seed else (lambda task, k: {})
    with Relay(upstream, meter, seeds) as relay:
        _point_at(relay.url)
        yield relay


def _point_at(url: str) -> None:
    from palestra.cli.roles.worker import point_at

    point_at(url)


@contextlib.contextmanager
def _stoppable(evaluation: Evaluation, live: Live) -> Iterator[None]:
    """The first SIGINT drains, the second leaves."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if evaluation.draining.is_set():
            evaluation.leaving.set()
            return
        evaluation.draining.set()
        live.note("stopping: what is under way is played to its end; Ctrl-C again leaves at once")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Faults go into the folder's log, not over the live line."""
    handler = logging.FileHandler(folder / LOG, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _finish(options: argparse.Namespace, folder: Path, evaluation: Evaluation, stopped: bool) -> int:
    """Shows the figures; the exit status."""
    rows, header = evaluation.rows, evaluation.header
    summary = summarise(header, rows)
    (print_json if options.json else print_table)(folder, header, summary)
    try:
        if options.parquet:
            write_parquet(folder, [rows[key] for key in header.keys if key in rows])
        if options.html is not None:
            write_report(options.html, header, rows)
    except (EvalError, OSError) as error:
        print(f"palestra eval: {error}", file=sys.stderr)
        return 1
    if evaluation.fault is not None:
        print(f"palestra eval: it cannot go on: {evaluation.fault}", file=sys.stderr)
        return 1
    if stopped and summary.owed:
        print(
            f"{summary.owed} episodes are owed: the same command with --out {folder} --resume plays them",
            file=sys.stderr,
        )
        return 130
    return 3 if summary.errors else 0
