"""`palestra inspect RUN [ID]`: a run, one of its groups, or one of its rollouts, token by token.

In: a run folder, of a live, finished or killed run; only its files are read. Out: tables on the console, or JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from palestra.cli.config import ConfigError, RunConfig, read_run
from palestra.cli.progress import summary
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.rows import trajectory_rows
from palestra.server.store.reader import StoreReader
from palestra.server.store.types import StoredSession
from palestra.server.types import ServerError, SessionError, TokenSource, TrainingSample, Trajectory

STYLE = {
    TokenSource.PROMPT: "dim",
    TokenSource.SAMPLED: "green",
    TokenSource.OBSERVATION: "cyan",
    TokenSource.CLOSE: "yellow",
}


def main(argv: Sequence[str]) -> int:
    """Shows; 1 where there is nothing of that name."""
    parser = argparse.ArgumentParser(prog="palestra inspect")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("id", nargs="?", help="a group (g000012) or a rollout (g000012-3)")
    parser.add_argument("--attempt", type=int, help="of the rollout; the newest one unless given")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    options = parser.parse_args(argv)
    # A pipe has no width: nothing is cut there.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 240)
    try:
        reader = StoreReader(options.run / "store")
        if options.id is None:
            show_run(options.run, reader, console, options.json)
        elif not show_group(reader, options.id, console, options.json):
            show_rollout(options.run, reader, options.id, options.attempt, console, options.json)
    except (ServerError, ConfigError, OSError) as error:
        print(f"palestra inspect: {error}", file=sys.stderr)
        return 1
    return 0


def show_run(run: Path, reader: StoreReader, console: Console, as_json: bool) -> None:
    """Every group with its rewards, then the steps and the ledger."""
    rewards: dict[str, list[float | None]] = {}
    tasks: dict[str, str] = {}
    for session in reader.read_sessions():
        if session.outcome is not None:
            rewards.setdefault(session.record.group_id, []).append(session.outcome.reward)
            tasks[session.record.group_id] = session.record.task_id
    groups = reader.read_groups()
    if as_json:
        for group in groups:
            print(
                json.dumps({"group": group.group_id, "state": group.state, "rewards": rewards.get(group.group_id, [])})
            )
        return
    table = _table("group", "task", "state", "rewards")
    for group in groups:
        listed = " ".join("-" if r is None else f"{r:.2f}" for r in rewards.get(group.group_id, []))
        table.add_row(group.group_id, tasks.get(group.group_id, ""), str(group.state), listed)
    console.print(table)
    config = read_run(run)
    summary(run, config.run.steps if isinstance(config, RunConfig) else 0, console, over=False)


def _table(*names: str) -> Table:
    """Columns side by side; the first one, which is what the next command needs, is never cut."""
    table = Table(box=None)
    for at, name in enumerate(names):
        table.add_column(name, no_wrap=True, min_width=12 if at == 0 else None)
    return table


def show_group(reader: StoreReader, group_id: str, console: Console, as_json: bool) -> bool:
    """The rollouts of a group; False where there is no such group."""
    sessions = reader.read_sessions(group_id=group_id)
    if not sessions:
        return False
    if as_json:
        for session in sessions:
            print(json.dumps(_session_entry(session)))
        return True
    table = _table("rollout", "attempt", "state", "turns", "tokens", "reward", "stop", "components")
    for session in sessions:
        entry = _session_entry(session)
        parts = " ".join(f"{key}={value:g}" for key, value in entry["components"].items())
        reward = "-" if entry["reward"] is None else f"{entry['reward']:.2f}"
        table.add_row(
            entry["rollout"],
            str(entry["attempt"]),
            entry["state"],
            str(entry["turns"]),
            str(entry["tokens"]),
            reward,
            entry["stop"],
            parts,
        )
    console.print(table)
    return True


def show_rollout(
    run: Path, reader: StoreReader, rollout_id: str, attempt: int | None, console: Console, as_json: bool
) -> None:
    """The rollout's tokens: id, text, source, mask, logprob and policy version of each; a table per branch.

    Raises:
        SessionError: there is no such rollout, or it has no turns yet.
    """
    trajectory = reader.read_trajectory(rollout_id, attempt)
    rows = trajectory_rows(trajectory)
    if not rows:
        raise SessionError(f"{rollout_id} has no delivered turns", 404, "not_found")
    if not as_json:
        for note in _notes(trajectory):
            console.print(note, highlight=False)
    codec = TokenCodec(Path(json.loads((run / "meta.json").read_text())["model_folder"]))
    for row in rows:
        if as_json:
            for entry in token_entries(row, codec):
                print(json.dumps(entry, ensure_ascii=False))
            continue
        reward = "unknown" if row.reward is None else f"{row.reward:.3f}"
        console.print(
            f"{row.rollout_id} attempt {row.attempt} branch {row.branch}: task {row.task_id}, reward {reward}, "
            f"stop {row.stop_reason}, {len(row.token_ids)} tokens, {int(row.loss_mask.sum())} trained",
            highlight=False,
        )
        console.print(_coloured(row, codec))
        console.print(_token_table(row, codec))


def _notes(trajectory: Trajectory) -> Iterator[str]:
    """What is out of the ordinary in its turns, a line each."""
    for turn in trajectory.turns:
        if turn.fork_reason is not None:
            yield f"turn {turn.index} starts a branch: {turn.fork_reason}"
        if turn.ill_formed is not None:
            yield f"turn {turn.index} is ill-formed: {turn.ill_formed}"
        if not turn.delivered:
            yield f"turn {turn.index} was not delivered: its {len(turn.completion_ids)} tokens are not trained"


def token_entries(row: TrainingSample, codec: TokenCodec) -> Iterator[dict[str, Any]]:
    """One entry a token."""
    versions = [-1] * len(row.token_ids)
    for span in row.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    for at, token in enumerate(row.token_ids.tolist()):
        logprob = float(row.logprobs[at])
        yield {
            "branch": row.branch,
            "at": at,
            "id": token,
            "text": codec.token_text(token),
            "source": TokenSource(int(row.sources[at])).name.lower(),
            "mask": int(row.loss_mask[at]),
            "logprob": None if math.isnan(logprob) else round(logprob, 6),
            "version": None if versions[at] < 0 else versions[at],
        }


def _token_table(row: TrainingSample, codec: TokenCodec) -> Table:
    table = Table(box=None)
    for name in ("at", "id", "text", "source", "mask", "logprob", "version"):
        table.add_column(name, justify="left" if name in ("text", "source") else "right", no_wrap=True)
    for entry in token_entries(row, codec):
        logprob = "" if entry["logprob"] is None else f"{entry['logprob']:.4f}"
        version = "" if entry["version"] is None else str(entry["version"])
        style = STYLE.get(TokenSource[entry["source"].upper()], "red")
        table.add_row(
            str(entry["at"]),
            str(entry["id"]),
            repr(entry["text"]),
            entry["source"],
            str(entry["mask"]),
            logprob,
            version,
            style=style,
        )
    return table


def _coloured(row: TrainingSample, codec: TokenCodec) -> Text:
    text = Text()
    for token, source in zip(row.token_ids.tolist(), row.sources.tolist(), strict=True):
        text.append(codec.token_text(token), style=STYLE.get(TokenSource(source), "red"))
    return text


def _session_entry(session: StoredSession) -> dict[str, Any]:
    outcome = session.outcome
    return {
        "rollout": session.record.rollout_id,
        "attempt": session.record.attempt,
        "state": str(session.state) + (f" ({session.discard_reason})" if session.discard_reason else ""),
        "turns": session.turns,
        "tokens": session.sampled_tokens,
        "reward": None if outcome is None else outcome.reward,
        "stop": "" if outcome is None else outcome.stop_reason,
        "components": {} if outcome is None else dict(outcome.components),
        "error": None if outcome is None else outcome.error,
    }
