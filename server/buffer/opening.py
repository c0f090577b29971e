"""Opens a run's buffer, or a reader of it, wherever the run keeps its groups: in files of its own folder, or in PostgreSQL.

In: the run's store folder, and what the configuration says. Out: a `RunBuffer` or a `RunBufferReader`. PostgreSQL's driver is imported only
where it is asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.pg_place import place_path, read_place
from palestra.server.buffer.reader import BufferReader
from palestra.server.buffer.retention import Retention
from palestra.server.buffer.schema import buffer_path
from palestra.server.buffer.types import RunBuffer, RunBufferReader
from palestra.server.types import StoreError


def open_buffer(
    folder: Path,
    url: str | None,
    run: str,
    *,
    retention: Retention = Retention(),  # noqa: B008 (frozen)
) -> RunBuffer:
    """The buffer of the one service that owns `folder`; made where it is not there. With a `url`, it lies in that database under the name
    `run`, and `buffer.json` in the folder says so.

    Raises:
        StoreError: another service owns it, it cannot be opened, the run has its groups elsewhere, or the driver is not installed.
    """
    if url is not None:
        buffer: RunBuffer = _module("postgres").PostgresBuffer(url, run, folder=folder, retention=retention)
        return buffer
    if (place := read_place(folder)) is not None:
        raise StoreError(
            f"{place_path(folder)}: this run's groups lie in {place.url}; a run keeps its buffer: set buffer.url to it"
        )
    return EmbeddedBuffer(folder, retention=retention)


def open_buffer_reader(folder: Path) -> RunBufferReader:
    """A view of the buffer that belongs to `folder`, beside its service or after it.

    Raises:
        StoreError: there is none, it cannot be read, or the driver is not installed.
    """
    if read_place(folder) is None:
        return BufferReader(folder)
    reader: RunBufferReader = _module("pg_reader").PostgresReader(folder)
    return reader


def has_buffer(folder: Path) -> bool:
    """Whether anything was ever put into a buffer of this folder's run."""
    return buffer_path(folder).is_file() or place_path(folder).is_file()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"palestra.server.buffer.{name}")
    except ImportError as error:
        raise StoreError(f"buffer.url needs PostgreSQL's driver: pip install 'palestra[postgres]' ({error})") from error
