"""`palestra buffer show RUN GROUP`: the rows of one group as the trainer gets them, in runs of equal mask, source and version.

In: a run folder, live or not, and a group's id. Out: a table per row, with the text where the model's tokenizer is at hand; or JSON lines.
Exit status 0; 1 where there is no such group, or its arrays are not stored. Waits for the disk or the database.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from palestra.cli.buffers.words import options_of, reading, token_versions
from palestra.cli.evaluation.table import console
from palestra.cli.inspect import STYLE
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.types import ServerError, TokenSource, TrainingSample

SNIPPET = 60
"""Characters of a run's text in a table."""


def main(argv: Sequence[str]) -> int:
    """Shows."""
    parser = options_of("show", "The rows of one group.")
    parser.add_argument("group", help="the group's id (g000012)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of tables")
    options = parser.parse_args(argv)
    try:
        with reading(options.run) as reader:
            group = reader.read_group(options.group)
            (entry,) = (each for each in reader.entries() if each.group_id == options.group)
    except (ServerError, OSError) as error:
        print(f"palestra buffer show: {error}", file=sys.stderr)
        return 1
    codec = codec_of(options.run)
    if options.json:
        for row in group.samples:
            print(json.dumps(described(row, codec), ensure_ascii=False))
        return 0
    out = console()
    state = str(entry.state) + (f" ({entry.reason})" if entry.reason else "")
    out.print(f"{group.group_id}: task {group.task_id}, {state}", highlight=False, markup=False)
    for row in group.samples:
        out.print(headline(row), highlight=False, markup=False)
        out.print(runs_table(row, codec))
    return 0


def codec_of(run: Path) -> TokenCodec | None:
    """The tokenizer of the run's model; None where it is no longer there: then ids are all there is."""
    try:
        return TokenCodec(Path(json.loads((run / "meta.json").read_text())["model_folder"]))
    except (ServerError, OSError, ValueError, KeyError, TypeError) as error:
        logging.getLogger(__name__).warning("no text is shown: the tokenizer of the run cannot be read: %s", error)
        return None


def headline(row: TrainingSample) -> str:
    """What a row is, on a line."""
    reward = "unknown" if row.reward is None else f"{row.reward:.3f}"
    turns = " ".join("-" if each is None else f"{each:.2f}" for each in row.turn_rewards)
    return (
        f"\n{row.rollout_id} attempt {row.attempt} branch {row.branch}: reward {reward}"
        + (f" (turns {turns})" if len(row.turn_rewards) > 1 else "")
        + f", stop {row.stop_reason}, temperature {row.temperature:g}, {len(row.token_ids)} tokens, "
        + f"{int(row.loss_mask.sum())} trained"
    )


def runs_of(row: TrainingSample, codec: TokenCodec | None) -> list[dict[str, Any]]:
    """Stretches of equal source, mask and version; `logprob` is the mean of those that are known."""
    kinds = np.stack([row.sources, row.loss_mask, token_versions(row)])
    cuts = [0, *(np.flatnonzero((np.diff(kinds) != 0).any(axis=0)) + 1).tolist(), len(row.token_ids)]
    runs = []
    for start, end in itertools.pairwise(cuts):
        known = row.logprobs[start:end][~np.isnan(row.logprobs[start:end])]
        version = int(kinds[2, start])
        runs.append(
            {
                "start": start,
                "end": end,
                "source": TokenSource(int(row.sources[start])).name.lower(),
                "mask": int(row.loss_mask[start]),
                "version": None if version < 0 else version,
                "logprob": round(float(known.mean()), 6) if len(known) else None,
                "text": None if codec is None else codec.decode(row.token_ids[start:end].tolist()),
            }
        )
    return runs


def described(row: TrainingSample, codec: TokenCodec | None) -> dict[str, Any]:
    """One row, for JSON."""
    return {
        "rollout": row.rollout_id,
        "attempt": row.attempt,
        "branch": row.branch,
        "task": row.task_id,
        "reward": row.reward,
        "turn_rewards": list(row.turn_rewards),
        "stop": row.stop_reason,
        "temperature": row.temperature,
        "token_ids": row.token_ids.tolist(),
        "runs": runs_of(row, codec),
    }


def runs_table(row: TrainingSample, codec: TokenCodec | None) -> Table:
    """A line per stretch, coloured by its source."""
    table = Table(box=None)
    for name in ("at", "tokens", "source", "mask", "version", "logprob", "text"):
        table.add_column(name, justify="left" if name in ("source", "text") else "right", no_wrap=True)
    for run in runs_of(row, codec):
        text = "" if run["text"] is None else repr(run["text"])
        cut = text if len(text) <= SNIPPET else f"{text[: SNIPPET // 2]} ... {text[-SNIPPET // 2 :]}"
        table.add_row(
            str(run["start"]),
            str(run["end"] - run["start"]),
            run["source"],
            str(run["mask"]),
            "" if run["version"] is None else str(run["version"]),
            "" if run["logprob"] is None else f"{run['logprob']:.4f}",
            Text(cut),
            style=STYLE.get(TokenSource[run["source"].upper()], "red"),
        )
    return table
