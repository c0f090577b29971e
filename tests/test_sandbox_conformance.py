"""Every backend keeps the interface: the same suites, on real boxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import docker
from palestra.sandbox.container_labels import OWNER, owner
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
    address = ""
    """Of the container engine, where there is one."""

    @classmethod
    def opened(cls, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Backend]:
        factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
        folder: Path = factory.mktemp(cls.name)
        if cls.name == "docker":
            cls.address = str(request.getfixturevalue("dockerd"))
        return sandbox_backends.started(cls.name, cls.address, folder)


def containers_of_ours(address: str) -> list[str]:
    """Names of containers that this process made and that are still there."""
    client = docker.APIClient(base_url=address)
    try:
        labels = {"label": f"{OWNER}={owner()}"}
        return [str(found["Names"]) for found in client.containers(all=True, filters=labels)]
    finally:
        client.close()


@pytest.mark.ci
class TestBubblewrap(RealSuite):
    name = "bubblewrap"


@pytest.mark.ci
class TestDocker(RealSuite):
    name = "docker"
    quick_runs = 300
    many = 12
    connections = 12

    async def leftovers(self, backend: Backend) -> list[str]:
        return await asyncio.to_thread(containers_of_ours, self.address)


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
    connections = 64
