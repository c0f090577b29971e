"""The gate lets the oldest request through first; the busy clock adds up what engines have to do."""

from __future__ import annotations

import asyncio

import pytest

from palestra.server.busy import BusyClock
from palestra.server.gate import Gate


def test_who_began_first_goes_first_whenever_it_came_back() -> None:
    async def scenario() -> list[str]:
        gate, order = Gate(), list[str]()

        async def request(name: str, began: float) -> None:
            await gate.wait(began)
            order.append(name)

        gate.clear()
        waiting = [asyncio.create_task(request(name, began)) for name, began in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
        await asyncio.sleep(0)
        gone = asyncio.create_task(request("gone", 0.5))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not gate.is_set()
        gate.set()
        await asyncio.gather(*waiting)
        await request("late", 0.0)
        return order

    assert asyncio.run(scenario()) == ["a", "b", "c", "late"]


def test_a_gate_that_closes_again_holds_whoever_did_not_run_yet() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.clear()
        waiter = asyncio.create_task(gate.wait())
        await asyncio.sleep(0)
        gate.set()
        gate.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiter.done()
        gate.set()
        await waiter

    asyncio.run(scenario())


def test_busy_and_load_are_integrals() -> None:
    now = [0.0]
    clock = BusyClock(4, lambda: now[0])
    now[0] = 1.0
    clock.change(1)
    before = clock.read()
    now[0] = 3.0
    clock.change(9)  # ten requests, four places
    now[0] = 4.0
    clock.change(-10)
    now[0] = 6.0
    passed = clock.read().since(before)
    assert (passed.seconds, passed.busy_s, passed.load_s) == (5.0, 3.0, 6.0)
    assert passed.share == pytest.approx(0.6)
    assert passed.idle_share(4) == pytest.approx(1 - 6 / 20)
    assert before.since(before).share == 0.0
    assert before.since(before).idle_share(4) == 0.0
