"""The folder of an evaluation: `run.json`, and `episodes.jsonl` with a line per finished episode. Nothing else is state.

A `Header` and `Row`s go in and come out. A run that was killed and one that is paused look the same: what is owed is what is planned and
has no row. The file of rows has one writer, which the kernel sees to; a line that a kill cut in two is dropped. Waits for the disk only.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from palestra.agents.evaluation.types import EvalError, Header, Key, Row
from palestra.envs.spaces import fresh
from palestra.envs.types import Reward

HEADER = "run.json"
EPISODES = "episodes.jsonl"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Row).decode


class RowLog:
    """The one writer of a folder's rows, from construction to `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Takes the file, makes it where there is none, and cuts off a torn last line.

        Raises:
            EvalError: another process writes it, or it cannot be opened.
        """
        self.path = folder / EPISODES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise EvalError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._lock = threading.Lock()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise EvalError(
                f"{folder}: another `palestra eval` writes here; wait for its end, or choose another --out"
            ) from None
        self._end = _whole_bytes(self._fd)
        os.ftruncate(self._fd, self._end)

    def append(self, row: Row) -> None:
        """Adds a row. Thread-safe; once it returns, a kill of this process loses nothing of it.

        Raises:
            EvalError: the disk took it in part or not at all; the file ends with the row before.
        """
        line = encode_row(row) + b"\n"
        with self._lock:
            if self._fd < 0:
                raise EvalError(f"{self.path}: was closed before this episode ended; it stays owed")
            try:
                if (written := os.pwrite(self._fd, line, self._end)) != len(line):
                    raise OSError(f"only {written} of {len(line)} bytes were written")
            except OSError as error:
                os.ftruncate(self._fd, self._end)
                raise EvalError(f"{self.path}: cannot be written: {error}") from error
            self._end += len(line)

    def close(self) -> None:
        """Brings the rows to the disk and gives the file back; more than once does no harm."""
        with self._lock:
            if self._fd >= 0:
                os.fsync(self._fd)
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole_bytes(fd: int) -> int:
    """Where the last whole line ends."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 65_536)
        if (at := os.pread(fd, end - start, start).rfind(b"\n")) >= 0:
            return start + at + 1
        end = start
    return 0


def encode_row(row: Row) -> bytes:
    """A row as one line of JSON, without its end. What JSON cannot hold (a lone surrogate, a number that is not finite, an object) is
    replaced, and never costs the episode.
    """
    row = _finite(row)
    try:
        return _encode(row)
    except (TypeError, ValueError, OverflowError):  # UnicodeEncodeError is a ValueError
        return _encode(plain(msgspec.to_builtins(row, enc_hook=str, str_keys=True)))


def _finite(row: Row) -> Row:
    parts = row.reward.components
    if all(math.isfinite(value) for value in parts.values()):
        return row
    kept = {name: value for name, value in parts.items() if math.isfinite(value)}
    lost = ", ".join(f"{name} is {value}" for name, value in parts.items() if name not in kept)
    note = "; ".join(part for part in (row.reward.note, lost) if part)
    return replace(row, reward=replace(row.reward, components=kept, note=note))


def plain(value: Any) -> Any:
    """The nearest value that JSON can hold."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {plain(str(key)): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    return plain(str(value))


def read_rows(folder: Path) -> list[Row]:
    """All rows, in the order in which they ended. Records end at a line feed and at nothing else; a last line without one is left out.

    Raises:
        EvalError: the file cannot be read, or a whole line is no row: says which.
    """
    path = folder / EPISODES
    try:
        raw = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise EvalError(f"{path}: cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            rows.append(_decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EvalError(f"{path}:{number}: is no episode: {error}") from None
    return rows


def latest(rows: Iterable[Row]) -> dict[Key, Row]:
    """The row that counts of each episode: the last one with a reward, or the last one where none has."""
    best: dict[Key, Row] = {}
    for row in rows:
        if (before := best.get(row.key)) is None or row.scored or not before.scored:
            best[row.key] = row
    return best


def owed(header: Header, rows: Mapping[Key, Row], *, retry_errors: bool) -> list[Key]:
    """Planned episodes that are still to be played: those without a row, and with `retry_errors` those without a reward."""
    return [
        key for key in header.keys if (row := rows.get(key)) is None or (retry_errors and not row.scored)
    ]  # fmt: skip


def write_header(folder: Path, header: Header) -> None:
    """Writes `run.json`; a reader sees the old one or the new one, never half of it.

    Raises:
        EvalError: it cannot be written.
    """
    text = json.dumps(msgspec.to_builtins(header), indent=1, ensure_ascii=False) + "\n"
    aside = folder / f".{HEADER}.{os.getpid()}"
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(folder / HEADER)
    except OSError as error:
        raise EvalError(f"{folder / HEADER}: cannot be written: {error.strerror}") from error


def has_header(folder: Path) -> bool:
    """Whether an evaluation was begun here."""
    return (folder / HEADER).is_file()


def read_header(folder: Path) -> Header:
    """Reads `run.json`.

    Raises:
        EvalError: there is none, or it is none of ours.
    """
    path = folder / HEADER
    try:
        return msgspec.json.decode(path.read_bytes(), type=Header)
    except OSError as error:
        raise EvalError(f"{folder} is no evaluation: {path.name}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EvalError(f"{path}: is no evaluation's header: {error}") from None


def with_reward(row: Row, reward: Reward) -> Row:
    """The row under another reward; its messages are not shared."""
    return replace(row, reward=reward, messages=tuple(fresh(row.messages)))
