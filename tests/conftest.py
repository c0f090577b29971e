"""Fixtures that several test modules share: tiny models, and one engine process for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import engine_process
from tests.tiny import make_tiny_moe


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-MoE."""
    return make_tiny_moe(tmp_path_factory.mktemp("tiny-moe"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_moe: Path) -> Iterator[str]:
    """The URL of an embedded engine on `tiny_moe`, which accepts forced ids."""
    with engine_process(tiny_moe, "--context-length", "1024", "--allow-forced-ids") as url:
        yield url
