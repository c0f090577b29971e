"""Every backend keeps the interface: the same suites, on real boxes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from palestra.sandbox.types import Backend
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests import sandbox_backends
from tests.conformance.sandbox import ConfinedSuite, HarmlessSuite


@contextlib.asynccontextmanager
async def unsafe_subprocess() -> AsyncIterator[Backend]:
    backend = UnsafeSubprocess(i_understand=True)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


@pytest.mark.walk
class TestUnsafeSubprocess(HarmlessSuite):
    quick_runs = 200
    many = 8

    @classmethod
    def opened(cls, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Backend]:
        return unsafe_subprocess()


class RealSuite(ConfinedSuite):
    """A backend of the ci tier, by its name."""

    name: str

    @classmethod
    def opened(cls, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Backend]:
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        folder: Path = factory.mktemp(cls.name)
        dockerd = str(request.getfixturevalue("dockerd")) if cls.name == "docker" else ""
        return sandbox_backends.started(cls.name, dockerd, folder)


@pytest.mark.ci
class TestBubblewrap(RealSuite):
    name = "bubblewrap"


@pytest.mark.ci
class TestDocker(RealSuite):
    name = "docker"
    quick_runs = 300
    many = 12


@pytest.mark.ci
class TestLandlock(RealSuite):
    name = "landlock"
    quick_runs = 300

    def mount_target(self, source: str) -> str:
        return source


@pytest.mark.ci
class TestRemote(RealSuite):
    name = "remote"
    quick_runs = 300
