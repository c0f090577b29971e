"""What is due and what is done, in the `evals` folder of a run.

A `Due` and a `Done` go in, files come out: `evals/step_N/{due,done}.json`, `evals/step_N/weights` while they are needed, and a line of
`evals.jsonl`. The trainer writes what is due, the evaluator what is done; while neither runs, the supervisor settles both
(`settling.py`). Nothing is waited for but the disk.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from palestra.server.evaluating.types import Done, Due, EvaluatingError

FOLDER, LINES = "evals", "evals.jsonl"
DUE, DONE, WEIGHTS, ABANDONED = "due.json", "done.json", "weights", "abandoned"
_STEP = re.compile(r"step_(\d+)")
T = TypeVar("T", Due, Done)


class EvalDesk:
    """The evaluations of one run."""

    def __init__(self, run: Path) -> None:
        self.root, self.lines = run / FOLDER, run / LINES

    def folder(self, step: int) -> Path:
        """Of the evaluation of one train step: what `palestra eval show` reads."""
        return self.root / f"step_{step}"

    def weights(self, step: int) -> Path:
        """Where the weights of that evaluation are kept while it is due."""
        return self.folder(step) / WEIGHTS

    def ask(self, due: Due) -> None:
        """Puts an evaluation on the desk, durably.

        Raises:
            EvaluatingError: the disk refused.
        """
        _write(self.folder(due.step) / DUE, due)

    def due(self, step: int) -> Due | None:
        """What was asked for that step; None where nothing was."""
        return _read(self.folder(step) / DUE, Due)

    def done(self, step: int) -> Done | None:
        """What came of it; None where it was not asked for or goes on."""
        return _read(self.folder(step) / DONE, Done)

    def asked(self) -> list[Due]:
        """All that was asked for, by train step."""
        return [due for step in self._steps() if (due := self.due(step)) is not None]

    def pending(self) -> list[Due]:
        """What was asked for and is not done, by train step. Cheap enough to be polled: of what is done nothing is read."""
        left = (step for step in self._steps() if not (self.folder(step) / DONE).exists())
        return [due for step in left if (due := self.due(step)) is not None]

    def _steps(self) -> list[int]:
        names = (_STEP.fullmatch(path.name) for path in self.root.iterdir()) if self.root.is_dir() else ()
        return sorted(int(name[1]) for name in names if name)

    def finish(self, done: Done) -> None:
        """Writes what came of an evaluation: first its line, so that a kill in between repeats the line and loses none.

        Raises:
            EvaluatingError: the disk refused.
        """
        self._append(done)
        _write(self.folder(done.step) / DONE, done)

    def void(self, due: Due, done: Done) -> None:
        """Takes an evaluation out that belongs to no surviving weights: its line stays, its folder gets another name.

        Raises:
            EvaluatingError: the disk refused.
        """
        self._append(done)
        folder, aside = self.folder(due.step), self.root / ABANDONED
        try:
            aside.mkdir(exist_ok=True)
            base = f"{folder.name}-v{due.version}"
            taken = {path.name for path in aside.iterdir()}
            name = next(name for k in range(len(taken) + 1) if (name := f"{base}-{k}" if k else base) not in taken)
            folder.rename(aside / name)
        except OSError as error:
            raise EvaluatingError(f"{folder} cannot be put aside: {error}") from error

    def outcomes(self) -> list[dict[str, Any]]:
        """The lines of `evals.jsonl`, as they were written; the last one of a step counts."""
        return lines_of(self.lines)

    def _append(self, done: Done) -> None:
        line = {
            "time": done.at,
            "eval/train_step": done.step,
            "eval/version": done.version,
            "on": done.on,
            "state": str(done.state),
            "reason": done.reason,
            **done.metrics,
        }
        raw = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            with self.lines.open("ab+") as stream:
                if stream.tell() and not _whole(stream):
                    raw = b"\n" + raw  # a writer that was killed left half a line
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise EvaluatingError(f"{self.lines} cannot be written: {error}") from error


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON objects; one that a kill cut is left out."""
    found = []
    for raw in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            value = json.loads(raw)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _whole(stream: Any) -> bool:
    stream.seek(-1, os.SEEK_END)
    return bool(stream.read(1) == b"\n")


def _write(path: Path, value: Due | Done) -> None:
    """A reader sees the old file or the new one, whole; it is on the disk when this returns."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as stream:
            stream.write(msgspec.json.encode(value) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError as error:
        raise EvaluatingError(f"{path} cannot be written: {error}") from error


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise EvaluatingError(f"{path} cannot be read: {error}") from error
