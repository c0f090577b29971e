"""The Buffer Protocol, held to by the durable buffer and by its fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.types import Buffer
from tests.conformance.buffer_suite import BufferSuite, Clock
from tests.fakes.memory_buffer import MemoryBuffer


class TestMemoryBuffer(BufferSuite):
    @pytest.fixture
    def buffer(self, clock: Clock) -> Buffer:
        return MemoryBuffer(clock)


class TestEmbeddedBuffer(BufferSuite):
    @pytest.fixture
    def buffer(self, clock: Clock, tmp_path: Path) -> Iterator[Buffer]:
        buffer = EmbeddedBuffer(tmp_path, clock=clock)
        yield buffer
        buffer.close()
