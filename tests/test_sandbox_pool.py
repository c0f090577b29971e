"""The pool: one episode per box, order, room, faults, and nothing left whatever is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.sandbox import making
from palestra.sandbox.admission import SHARE, Admission, memory_here
from palestra.sandbox.pool import REFILLS, Pool
from palestra.sandbox.types import (
    MIB,
    Box,
    BoxSpec,
    Limits,
    SandboxBusyError,
    SandboxError,
    SandboxUnavailableError,
)
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests.fakes.boxes import Boxes, MemoryBox

SMALL = BoxSpec(Limits(memory_bytes=64 * MIB))
LARGE = BoxSpec(Limits(memory_bytes=192 * MIB))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "PAUSES_S", (0.0, 0.0, 0.0))


@asynccontextmanager
async def pool_of(backend: Boxes, boxes: int = 4, warm: int = 2, memory_bytes: int = 1 << 40) -> AsyncIterator[Pool]:
    pool = Pool(backend, SMALL, boxes=boxes, warm=warm, memory_bytes=memory_bytes)
    await pool.start()
    await settled(pool)
    try:
        yield pool
    finally:
        await pool.close()
        assert not backend.living
        figures = pool.figures()
        assert [figures[name] for name in ("in_use", "warm", "creating", "closing", "waiting", "memory_bytes")] == [
            0
        ] * 6


async def until(what: Callable[[], bool]) -> None:
    """Turns of the event loop until it is so."""
    for _ in range(10_000):
        if what():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be")


async def settled(pool: Pool) -> None:
    """Until the pool neither makes nor ends a box."""
    await asyncio.sleep(0)
    await until(lambda: not pool.figures()["creating"] and not pool.figures()["closing"])


async def waiting(pool: Pool, spec: BoxSpec | None = None) -> asyncio.Task[Box]:
    """Somebody who asked, and stands in the queue."""
    task = asyncio.create_task(pool.acquire(spec))
    await asyncio.sleep(0)
    return task


async def test_a_box_is_warm_is_used_once_and_another_takes_its_place() -> None:
    backend = Boxes()
    async with pool_of(backend) as pool:
        assert pool.figures()["warm"] == 2
        async with pool.box() as box:
            assert box in backend.living
            await settled(pool)
            assert pool.figures()["warm"] == 2
        assert box not in backend.living
        async with pool.box() as other:
            assert other is not box
        figures = pool.figures()
        assert (figures["warm_hits_total"], figures["acquired_total"]) == (2, 3)  # the start asked too
        assert backend.most <= 4


async def test_a_box_of_another_spec_is_made_on_request_and_warm_ones_make_room() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=2, warm=2) as pool:
        async with pool.box(LARGE) as box:
            assert box.spec == LARGE
        await settled(pool)
        assert pool.figures()["warm"] == 2
        assert backend.most <= 2


async def test_who_asked_first_has_it_first_also_where_the_first_needs_more_room() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=4, warm=1, memory_bytes=256 * MIB) as pool:
        held = [await pool.acquire() for _ in range(4)]
        order: list[str] = []

        async def ask(name: str, spec: BoxSpec) -> None:
            async with pool.box(spec):
                order.append(name)

        tasks = []
        for name, spec in (("large", LARGE), ("small", SMALL), ("second small", SMALL)):
            tasks.append(asyncio.create_task(ask(name, spec)))
            await asyncio.sleep(0)
        for box in held:  # the first ones to be released would be enough for the small ones
            await pool.release(box)
        await asyncio.gather(*tasks)
        assert order == ["large", "small", "second small"]
        assert backend.most_bytes <= 256 * MIB


async def test_who_waits_too_long_is_told_where_the_boxes_are() -> None:
    async with pool_of(Boxes(), boxes=1, warm=0) as pool:
        async with pool.box():
            with pytest.raises(
                SandboxBusyError, match=r"1 of at most 1 boxes are in use, 0 warm.*oldest has been with"
            ):
                await pool.acquire(timeout=0.01)
        assert pool.figures()["busy_total"] == 1
        async with pool.box(timeout=0.01):  # a box is free again: no deadline for what is there at once is needed
            assert pool.figures()["in_use"] == 1


async def test_a_spec_that_can_never_fit_is_refused_at_once() -> None:
    async with pool_of(Boxes(), memory_bytes=128 * MIB) as pool:
        with pytest.raises(SandboxUnavailableError, match="192 MiB, where all boxes together may have 128 MiB"):
            await pool.acquire(LARGE)


async def test_creation_is_tried_again_and_those_who_wait_hear_of_the_last_failure() -> None:
    backend = Boxes()
    async with pool_of(backend, warm=0) as pool:
        backend.refusals = [SandboxError("one"), OSError("two"), ValueError("three")]
        async with pool.box():
            assert pool.figures()["create_failures_total"] == 3
        backend.refusals = [SandboxError("no more processes")] * making.TRIES
        with pytest.raises(SandboxError, match="in 4 tries; the last one: no more processes"):
            await pool.acquire()
        backend.refusals = [SandboxUnavailableError("no such image")]
        with pytest.raises(SandboxUnavailableError, match="no such image"):
            await pool.acquire()
        async with pool.box():
            assert pool.figures()["in_use"] == 1


async def test_a_broken_backend_is_known_at_the_start_and_is_not_asked_for_ever() -> None:
    backend = Boxes()
    backend.refusals = [SandboxError("broken")] * 1000
    pool = Pool(backend, SMALL, boxes=4, warm=2, memory_bytes=1 << 40)
    with pytest.raises(SandboxError, match="broken"):
        await pool.start()
    await settled(pool)
    asked = 1000 - len(backend.refusals)
    assert asked <= (1 + REFILLS) * making.TRIES
    for _ in range(50):
        await asyncio.sleep(0)
    assert 1000 - len(backend.refusals) == asked
    backend.refusals.clear()
    async with pool.box():  # asking makes it try again, and what works is kept warm from then on
        await settled(pool)
        assert pool.figures()["warm"] == 2
    await pool.close()
    assert not backend.living


class OneUnlucky(Boxes):
    """The first who asks for a box never gets one."""

    unlucky: asyncio.Task[Any] | None = None

    async def create(self, spec: BoxSpec) -> MemoryBox:
        me = asyncio.current_task()
        self.unlucky = self.unlucky or me
        if me is self.unlucky:
            await asyncio.sleep(0)
            raise SandboxError("unlucky")
        return await super().create(spec)


async def test_one_failure_among_successes_ends_one_wait_and_failures_alone_end_all() -> None:
    async with pool_of(OneUnlucky(), boxes=3, warm=0) as pool:
        tasks = [await waiting(pool) for _ in range(3)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, SandboxError) for each in found) == 1
        for box in found:
            if not isinstance(box, BaseException):
                await pool.release(box)
    backend = Boxes()
    async with pool_of(backend, boxes=1, warm=0) as pool:
        backend.refusals = [SandboxError("broken")] * making.TRIES
        tasks = [await waiting(pool) for _ in range(3)]
        assert all(isinstance(each, SandboxError) for each in await asyncio.gather(*tasks, return_exceptions=True))


async def test_dead_warm_boxes_are_replaced_and_never_handed_out() -> None:
    backend = Boxes()
    async with pool_of(backend) as pool:
        for made in backend.made:
            made.lose()
        async with pool.box() as box:
            assert box.alive
            await settled(pool)
            assert (pool.figures()["warm"], pool.figures()["dead_warm_total"]) == (2, 2)


async def test_a_box_that_cannot_be_destroyed_is_counted_and_its_place_is_given_on() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=1, warm=0) as pool:
        backend.stuck = [SandboxError("device is busy")]
        async with pool.box():
            pass
        async with pool.box(timeout=5):
            assert pool.figures()["close_failures_total"] == 1
        backend.living.discard(backend.made[0])


async def test_refills_do_not_take_the_place_of_those_who_wait() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=2, warm=2) as pool:
        first, second = await pool.acquire(), await pool.acquire()
        tasks = [await waiting(pool, LARGE), await waiting(pool, LARGE)]
        await asyncio.gather(pool.release(first), pool.release(second))
        found = await asyncio.gather(*tasks)
        assert [box.spec for box in found] == [LARGE, LARGE]
        assert [box.spec for box in backend.made].count(SMALL) == 2
        for box in found:
            await pool.release(box)


async def test_close_tells_who_waits_destroys_what_is_used_and_what_is_being_made() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=3, warm=0) as pool:
        used = await pool.acquire()
        backend.gate = asyncio.Event()
        made = await waiting(pool)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        backend.gate.set()
        await asyncio.gather(closing, pool.close())
        assert not used.alive
        with pytest.raises(SandboxBusyError, match="was closed"):
            await made
        with pytest.raises(SandboxBusyError, match="is closed"):
            await pool.acquire()
        await pool.release(used)


async def test_releasing_twice_and_after_a_cancelled_release_destroys_once() -> None:
    backend = Boxes()
    backend.turns = 5
    async with pool_of(backend, warm=0) as pool:
        box = await pool.acquire()
        task = asyncio.create_task(pool.release(box))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.release(box)
        assert box not in backend.living
        assert pool.figures()["destroyed_total"] == 1


async def test_a_box_given_to_somebody_cancelled_in_the_same_moment_goes_to_the_next() -> None:
    backend = Boxes()
    async with pool_of(backend, boxes=1, warm=1) as pool:
        held = await pool.acquire()
        first = await waiting(pool)
        second = await waiting(pool)
        made = len(backend.made)
        backend.gate = asyncio.Event()
        releasing = asyncio.create_task(pool.release(held))
        await until(lambda: pool.figures()["creating"] > 0)
        backend.gate.set()
        await until(lambda: pool.figures()["in_use"] > 0)
        first.cancel()  # its future has the box already
        box = await second
        assert len(backend.made) == made + 1
        await releasing
        await pool.release(box)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), boxes=st.integers(1, 4), warm=st.integers(0, 4))
def test_whatever_is_cancelled_nothing_is_lost(seed: int, boxes: int, warm: int) -> None:
    """Users come and are cancelled at random moments while boxes fail to be made, to end, or die: room, leases and boxes balance."""
    asyncio.run(_storm(random.Random(seed), boxes, min(warm, boxes)))


async def _storm(dice: random.Random, boxes: int, warm: int) -> None:
    backend = Boxes()
    pool = Pool(backend, SMALL, boxes=boxes, warm=warm, memory_bytes=256 * MIB)
    ran = 0

    async def user() -> None:
        nonlocal ran
        async with pool.box(dice.choice((None, SMALL, LARGE)), timeout=dice.choice((0.0005, 5.0))) as box:
            ran += 1
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            if dice.random() < 0.1:
                box.lose()  # type: ignore[attr-defined]

    tasks = []
    for _ in range(40):
        backend.turns = dice.randrange(4)
        if dice.random() < 0.1:
            backend.refusals.append(dice.choice((SandboxError("odd"), SandboxBusyError("full"), OSError("no"))))
        tasks.append(asyncio.create_task(user()))
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        if dice.random() < 0.5:
            dice.choice(tasks).cancel()
        if backend.living and dice.random() < 0.05:
            dice.choice(sorted(backend.living, key=lambda box: box.id)).lose()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in done:
        assert outcome is None or isinstance(outcome, SandboxError | asyncio.CancelledError), outcome
    await settled(pool)
    figures = pool.figures()
    assert (figures["in_use"], figures["waiting"]) == (0, 0)
    assert len(backend.living) == figures["warm"] <= warm
    assert figures["memory_bytes"] == figures["warm"] * 64 * MIB
    assert backend.most <= boxes
    assert backend.most_bytes <= 256 * MIB
    await pool.close()
    assert not backend.living


async def test_the_memory_of_this_machine_bounds_the_pool_by_default() -> None:
    pool = Pool(Boxes(), SMALL, boxes=10)
    assert 0 < pool.figures()["memory_limit_bytes"] < 1 << 50
    remote = Boxes()
    remote.name = "remote"
    assert Pool(remote, SMALL, boxes=10).figures()["memory_limit_bytes"] == 0


def test_memory_is_what_is_available_or_what_the_cgroup_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    2000 kB\n")
    assert memory_here(tmp_path) == int(SHARE * 2000 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert memory_here(tmp_path) == int(SHARE * 2000 * 1024)
    (group / "memory.max").write_text("1001000\n")
    assert memory_here(tmp_path) == int(SHARE * 1_000_000)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\n")
    with pytest.raises(SandboxUnavailableError, match="MemAvailable"):
        memory_here(tmp_path)


@pytest.mark.parametrize(("boxes", "memory"), [(0, None), (1, 0)])
def test_room_for_nobody_is_refused(boxes: int, memory: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Admission(boxes, memory)


@pytest.mark.walk
async def test_a_pool_of_real_agents_runs_and_leaves_nothing() -> None:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    pool = Pool(backend, BoxSpec(), boxes=3, warm=1)
    try:
        await pool.start()

        async def one(number: int) -> bytes:
            async with pool.box() as box:
                return (await box.run_python(f"print({number} ** 2)")).stdout

        found = await asyncio.gather(*(one(number) for number in range(6)))
        assert found == [f"{number**2}\n".encode() for number in range(6)]
        assert pool.figures()["acquired_total"] == 7
    finally:
        await pool.close()
        await backend.close()
    assert pool.figures()["memory_bytes"] == 0
