"""What every backend of the sandbox keeps: the interface of `palestra.sandbox.types`, in full.

Subclass `HarmlessSuite` (nothing but what may be run anywhere) or `ConfinedSuite` and give `opened`; the suites' parts are in
`sandbox_runs`, `sandbox_files` and `sandbox_life`. One backend serves a class, each test has a box of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio

from palestra.sandbox.types import MIB, Backend, Box, BoxSpec, Limits
from tests import sandbox_sessions
from tests.conformance.sandbox_files import ConfinedFiles, FileCases
from tests.conformance.sandbox_life import ConfinedLife, LifeCases
from tests.conformance.sandbox_runs import ConfinedRuns, RunCases

SMALL = BoxSpec(
    limits=Limits(
        memory_bytes=128 * MIB,
        pids=32,
        disk_bytes=16 * MIB,
        file_bytes=16 * MIB,
        output_bytes=64 * 1024,
        total_output_bytes=2 * MIB,
    ),
    env=(("FROM_THE_SPEC", "yes"),),
)
SESSION_CASES = sorted(name for name in dir(sandbox_sessions) if name.startswith("check_"))


@pytest.mark.asyncio(loop_scope="class")
class HarmlessSuite(RunCases, FileCases, LifeCases):
    """What may be run where nothing confines it."""

    spec = SMALL

    @classmethod
    def opened(cls, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Backend]:
        """The backend, started, and closed at the end."""
        raise NotImplementedError

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def backend(cls, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
        async with cls.opened(request) as backend:
            yield backend

    @pytest_asyncio.fixture(loop_scope="class")
    async def box(self, backend: Backend) -> AsyncIterator[Box]:
        box = await backend.create(self.spec)
        try:
            yield box
        finally:
            await box.close()

    @pytest.mark.parametrize("name", [name for name in SESSION_CASES if name not in sandbox_sessions.CONFINED_ONLY])
    async def test_sessions(self, box: Box, name: str) -> None:
        await getattr(sandbox_sessions, name)(box)


class ConfinedSuite(ConfinedRuns, ConfinedFiles, ConfinedLife, HarmlessSuite):
    """The whole: with what must only be run where something holds it."""

    @pytest.mark.parametrize("name", [name for name in SESSION_CASES if name in sandbox_sessions.CONFINED_ONLY])
    async def test_sessions_that_must_be_confined(self, box: Box, name: str) -> None:
        await getattr(sandbox_sessions, name)(box)
