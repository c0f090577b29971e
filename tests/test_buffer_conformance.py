"""What every buffer keeps, held to by the embedded one and, in the part without files, by its fake."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.buffer.retention import Retention
from palestra.server.types import Buffer
from tests.conformance.buffer_suite import BufferSuite, Clock
from tests.conformance.run_buffer_suite import RunBufferSuite
from tests.fakes.memory_buffer import MemoryBuffer


class TestMemoryBuffer(BufferSuite):
    @pytest.fixture
    def buffer(self, clock: Clock) -> Buffer:
        return MemoryBuffer(clock)


class EmbeddedStore:
    """A segment for each group, so that what is deleted is a group, as in a database."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock

    def open(self, retention: Retention = Retention()) -> EmbeddedBuffer:  # noqa: B008 (frozen)
        return EmbeddedBuffer(self.folder, segment_bytes=1, retention=retention, clock=self.clock)

    def reader(self) -> BufferReader:
        return BufferReader(self.folder)

    def damage(self, group_id: str) -> None:
        reader = self.reader()
        (shelf,) = [entry.shelf for entry in reader.entries() if entry.group_id == group_id]
        reader.close()
        assert shelf is not None
        path = self.folder / "segments" / shelf
        data = bytearray(path.read_bytes())
        data[30] ^= 1
        path.write_bytes(data)


class TestEmbeddedBuffer(RunBufferSuite):
    @pytest.fixture
    def store(self, tmp_path: Path, clock: Clock) -> EmbeddedStore:
        return EmbeddedStore(tmp_path, clock)
