"""A verdict on what a model left, which the model cannot forge.

In: the box it worked in (or the files of its answer), a pool, and a check. Out: a `Grade`. The model's processes are killed, the declared
files alone are carried into a box that nothing ran in, tests come there last, and the check runs. A fault of ours is tried again in
another box; it ends as no verdict, never as a failed one (law 4). Waits for boxes and for the check, each with a deadline.

Checks, the strongest first:

    checks.Cases     the work is a program; what it should print never enters the box
    calls.Calls      the work is functions; the test runs out here, and literals cross
    checks.Command   tests run in the box: work that is loaded into the tests' process can lie to them, if it is made to
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from palestra.sandbox.artifacts import MOST_BYTES, TESTS, ArtifactError, check_names, read_artifacts
from palestra.sandbox.types import (
    Box,
    BoxProtocolError,
    BoxSpec,
    ExecResult,
    SandboxBusyError,
    SandboxError,
    SandboxUnavailableError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grade:
    """What became of a check."""

    verdict: bool | None
    """None: no verdict could be had, by a fault of ours. It must not become a reward of 0."""
    reason: str
    """For people: what failed first, or why there is no verdict."""
    passed: int = 0
    """Cases (or calls answered) until then."""
    total: int = 0
    """Cases there are; 0 where the check does not count."""
    tries: int = 0
    """Boxes that it took; 0 where it never came to one."""
    result: ExecResult | None = None
    """Of the last run."""


class Check(Protocol):
    """A way to look at the work. It may run several times, each time in a box of its own."""

    async def run(self, box: Box, timeout: float) -> Grade:
        """Looks at the artifacts in this box's home; tests are in its folder `artifacts.TESTS`. At most `timeout` seconds.

        Raises:
            SandboxError: a fault of ours; it is tried again.
        """
        ...


class Boxes(Protocol):
    """Where fresh boxes come from: a `Pool`."""

    def box(self, spec: BoxSpec | None = None, timeout: float = 60.0) -> AbstractAsyncContextManager[Box]: ...


async def grade(
    box: Box | None,
    pool: Boxes,
    *,
    artifacts: Sequence[str] | Mapping[str, bytes],
    check: Check,
    tests: Mapping[str, bytes] | None = None,
    timeout: float = 60.0,
    wait: float = 60.0,
    tries: int = 3,
    spec: BoxSpec | None = None,
    allowed: Collection[str] = (),
    max_bytes: int = MOST_BYTES,
) -> Grade:
    """Grades the work.

    Args:
        box: where the model worked; None where `artifacts` has contents. It stays its owner's.
        artifacts: paths below the box's home, or contents by path.
        tests: files for the folder of the tests, by path. Code of the model can read them while the check runs.
        timeout: most seconds for the check, from its start.
        wait: most seconds to wait for a fresh box.
        tries: fresh boxes to take before it is given up.
        spec: of the fresh box; None: the pool's own.
        allowed: artifacts that may have names which steer test runners.
        max_bytes: most bytes of all artifacts.

    Raises:
        ValueError: a name that may not cross (see `artifacts.check_names`), or a test that passes what is no literal.
        SandboxUnavailableError: such a box cannot be had.
    """
    if tries < 1:
        raise ValueError(f"tries is {tries}; it must be at least 1")
    names = list(artifacts)
    check_names(names, allowed)
    _check_tests(tests or {})
    if isinstance(artifacts, Mapping):
        files = dict(artifacts)
    elif box is None:
        raise ValueError("artifacts are paths, but there is no box to read them from")
    else:
        work = await _work_of(box, names, max_bytes)
        if isinstance(work, Grade):
            return work
        files = work
    return await _in_fresh_boxes(pool, spec, files, tests or {}, check, timeout, wait, tries)


async def _work_of(box: Box, names: list[str], max_bytes: int) -> dict[str, bytes] | Grade:
    """The work, or why there is none."""
    try:
        await box.kill_processes()
        return await read_artifacts(box, names, max_bytes)
    except (ArtifactError, BoxProtocolError) as error:
        return Grade(False, str(error))
    except SandboxError as error:
        logger.warning("the work in box %s is lost: %s", box.id, error)
        return Grade(None, f"the work is lost: {error}")


async def _in_fresh_boxes(
    pool: Boxes,
    spec: BoxSpec | None,
    files: Mapping[str, bytes],
    tests: Mapping[str, bytes],
    check: Check,
    timeout: float,
    wait: float,
    tries: int,
) -> Grade:
    reason = ""
    for number in range(1, tries + 1):
        try:
            async with pool.box(spec, wait) as fresh:
                for path, data in files.items():
                    await fresh.put(path, data)
                for path, data in tests.items():
                    await fresh.put(f"{TESTS}/{path}", data, mode=0o444)
                return replace(await check.run(fresh, timeout), tries=number)
        except SandboxUnavailableError:
            raise
        except SandboxBusyError as error:
            return Grade(None, f"no verdict: {error}", tries=number - 1)
        except SandboxError as error:
            reason = str(error)
            logger.warning("grading, try %d of %d: %s", number, tries, reason)
    return Grade(None, f"no verdict in {tries} tries; the last one: {reason}", tries=tries)


def _check_tests(tests: Mapping[str, bytes]) -> None:
    for path in tests:
        if not path or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"test {path!r}: give a path below the folder of the tests")
