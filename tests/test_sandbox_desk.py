"""The sandbox host's desk, on boxes whose agent is a function: numbers and kept answers, leases, and what is said of a lost box."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from palestra.sandbox.box import AgentBox, read_result
from palestra.sandbox.channel import Counts
from palestra.sandbox.inside.frames import pack
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import (
    BackendName,
    BoxLostError,
    BoxProtocolError,
    BoxSpec,
    Enforced,
    SandboxUnavailableError,
)
from palestra.sandbox.wire import read_frame
from palestra.server.sandbox_host import desk as desks
from palestra.server.sandbox_host.desk import BoxDesk
from palestra.server.sandbox_host.types import HostRefusal, HostSettings, Reply
from tests.live import until

Agent = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LIST = pack({"op": "list", "path": "."})
RUN = pack({"op": "exec", "argv": "x", "timeout": 5.0, "keep": 9, "most": 9})
RESULT = {"why": "", "exit": 0, "stdout": b"", "stderr": b"", "total": 0, "truncated": False, "wall_s": 0, "cpu_s": 0}


class FunctionChannel:
    """A channel whose agent is a function."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self.alive = agent, True

    async def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:  # noqa: ASYNC109 - the interface
        return {**await self._agent(request), "id": 1}

    async def close(self) -> None:
        self.alive = False


class FunctionBackend:
    """Boxes with the agent that is set."""

    name: BackendName = "bubblewrap"

    def __init__(self) -> None:
        self.agent: Agent = self.echo
        self.calls: list[dict[str, Any]] = []
        self.open = 0

    async def echo(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"said": len(self.calls)} if request["op"] == "list" else dict(RESULT)

    async def start(self) -> None: ...

    def enforced(self) -> Enforced:
        return Enforced()

    async def create(self, spec: BoxSpec) -> AgentBox:
        if spec.preload:
            raise SandboxUnavailableError("no such module")

        async def asked(request: dict[str, Any]) -> dict[str, Any]:
            self.calls.append(request)
            return await self.agent(request)

        async def destroy() -> None:
            self.open -= 1

        self.open += 1
        return AgentBox("function", spec, FunctionChannel(asked), self, destroy)

    async def reap(self) -> int:
        return 0

    async def close(self) -> None: ...


@asynccontextmanager
async def desk_on(backend: FunctionBackend, **changes: Any) -> AsyncIterator[BoxDesk]:
    """A started desk; what it leaves is looked at."""
    settings = HostSettings(**{"boxes": 2, "queue": 1, **changes})
    desk = BoxDesk(Pool(backend, BoxSpec(), boxes=settings.boxes, warm=0, memory_bytes=1 << 40), settings)
    await desk.start()
    try:
        yield desk
    finally:
        await desk.close()
        assert backend.open == 0


async def replied(desk: BoxDesk, box: str, number: int | None, body: bytes) -> Reply:
    found = await desk.call(box, number, body, 5.0)
    assert isinstance(found, Reply)
    return found


async def test_a_known_number_gets_its_answer_and_runs_nothing() -> None:
    backend = FunctionBackend()
    async with desk_on(backend) as desk:
        box = (await desk.open("a", BoxSpec(), 0)).id
        first = await replied(desk, box, 1, LIST)
        assert read_frame(first.body) == {"said": 1}
        assert await replied(desk, box, 1, LIST) is first
        assert await replied(desk, box, 1, b"") is first
        assert read_frame((await replied(desk, box, 2, LIST)).body) == {"said": 2}
        assert [len(backend.calls), desk.figures.events["repeated_total"]] == [2, 2]
        assert read_frame((await replied(desk, box, None, LIST)).body) == {"said": 3}


async def test_an_answer_that_is_kept_no_more_is_refused_and_not_made_again() -> None:
    backend = FunctionBackend()
    async with desk_on(backend, keep_bytes=1200) as desk:
        box = (await desk.open("a", BoxSpec(), 0)).id
        for number in range(1, 6):
            await replied(desk, box, number, LIST)
        with pytest.raises(HostRefusal, match="request 2 is kept no more") as caught:
            await desk.call(box, 2, LIST, 5.0)
        assert caught.value.status == 409
        assert (await replied(desk, box, 5, LIST)).body
        assert len(backend.calls) == 5
        assert "palestra_sandbox_kept_bytes 1" in desk.metrics()
        await desk.end(box)
        assert "palestra_sandbox_kept_bytes 0" in desk.metrics()


async def test_answers_are_kept_for_a_while_only() -> None:
    backend = FunctionBackend()
    async with desk_on(backend, keep_s=0.0) as desk:
        box = (await desk.open("a", BoxSpec(), 0)).id
        await replied(desk, box, 1, LIST)
        with pytest.raises(HostRefusal, match="request 1 is kept no more"):
            await desk.call(box, 1, LIST, 5.0)


async def test_ctrl_c_that_overtakes_its_cell_waits_for_it_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FunctionBackend()
    interrupt = pack({"op": "interrupt", "session": 1})
    async with desk_on(backend) as desk:
        box = (await desk.open("a", BoxSpec(), 0)).id
        early = asyncio.create_task(replied(desk, box, 2, interrupt))
        await asyncio.sleep(0)
        assert backend.calls == []
        await asyncio.gather(replied(desk, box, 1, RUN), early)
        assert [call["op"] for call in backend.calls] == ["exec", "interrupt"]
        monkeypatch.setattr(desks, "ORDER_S", 0.01)
        await replied(desk, box, 4, interrupt)  # what was sent before it never comes
        assert len(backend.calls) == 3


async def test_what_is_not_over_says_whether_it_runs_and_what_only_asks_passes() -> None:
    backend, gate = FunctionBackend(), asyncio.Event()

    async def slow(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "exec":
            await gate.wait()
            return dict(RESULT)
        return {}

    backend.agent = slow
    async with desk_on(backend, poll_s=0.02) as desk:
        box = (await desk.open("a", BoxSpec(), 0)).id
        assert await desk.call(box, 1, RUN, 5.0) == "running"
        assert await desk.call(box, 2, RUN, 5.0) == "waiting"
        assert await desk.call(box, 1, b"", 5.0) == "running"
        assert read_frame((await replied(desk, box, 3, pack({"op": "interrupt", "session": 1}))).body) == {}
        assert [call["op"] for call in backend.calls] == ["exec", "interrupt"]
        gate.set()
        for number in (1, 2):
            assert read_result(read_frame((await replied(desk, box, number, b"")).body)).status == "ok"
        assert [call["op"] for call in backend.calls] == ["exec", "interrupt", "exec"]


@pytest.mark.parametrize(
    ("error", "oom", "status", "code"),
    [
        (TimeoutError(), 0, "timeout", "box_lost"),
        (BoxProtocolError("nonsense"), 0, "session_lost", "protocol"),
        (BoxLostError("went away"), 1, "oom", "box_lost"),
        (BoxLostError("went away"), 0, "", "box_lost"),
    ],
)
async def test_a_run_on_a_lost_box_is_told_as_the_code_s_doing_only_where_it_was(
    monkeypatch: pytest.MonkeyPatch, error: Exception, oom: int, status: str, code: str
) -> None:
    backend = FunctionBackend()

    async def fail(request: dict[str, Any]) -> dict[str, Any]:
        raise error

    backend.agent = fail
    monkeypatch.setattr(AgentBox, "counts", lambda box: Counts(oom_kills=oom, peak_bytes=77))
    async with desk_on(backend) as desk:
        for body in (RUN, LIST):
            box = (await desk.open(str(body), BoxSpec(), 0)).id
            reply = await replied(desk, box, 1, body)
            assert reply.lost
            if body is RUN and status:
                result = read_result(read_frame(reply.body))
                assert (result.status, result.usage.oom_kills, reply.code) == (status, oom, "")
            else:
                assert reply.code == code
            assert await replied(desk, box, 1, body) is reply
            assert desk.alive([box, "nobody's"]) == [box, "nobody's"]
            await desk.end(box)
        assert desk.figures.events["infra_errors_total"] == (1 if status else 2)


async def test_the_same_key_finds_the_box_that_it_got_and_another_one_after_its_end() -> None:
    backend = FunctionBackend()
    async with desk_on(backend) as desk:
        one, same = await asyncio.gather(desk.open("a", BoxSpec(), 0), desk.open("a", BoxSpec(), 0))
        assert one is same is await desk.open("a", BoxSpec(), 0)
        await desk.end(one.id)
        assert (await desk.open("a", BoxSpec(), 0)).id != one.id
        with pytest.raises(HostRefusal, match="there is no box"):
            await desk.end(one.id)


async def test_what_cannot_be_had_is_refused_by_kind() -> None:
    backend = FunctionBackend()
    async with desk_on(backend) as desk:
        with pytest.raises(HostRefusal, match="no such module") as caught:
            await desk.open("a", BoxSpec(preload=("nix",)), 0)
        assert caught.value.status == 422
        for key in "ab":
            await desk.open(key, BoxSpec(), 0)
        with pytest.raises(HostRefusal, match="all 2 boxes are taken") as caught:
            await desk.open("c", BoxSpec(), 0)
        assert (caught.value.status, caught.value.code) == (429, "full")
        waits = asyncio.create_task(desk.open("d", BoxSpec(), 5))
        await until(lambda: desk.room < 0, "the one that waits")
        with pytest.raises(HostRefusal, match="1 requests wait") as caught:
            await desk.open("e", BoxSpec(), 5)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        await desk.close()
        with pytest.raises(HostRefusal) as caught:
            await waits
        assert caught.value.status == 503
        with pytest.raises(HostRefusal, match="is closing"):
            await desk.open("f", BoxSpec(), 5)


async def test_one_that_waits_in_vain_is_told_in_time_and_its_place_is_free_again() -> None:
    backend = FunctionBackend()
    async with desk_on(backend) as desk:
        for key in "ab":
            await desk.open(key, BoxSpec(), 0)
        for _ in range(3):
            with pytest.raises(HostRefusal) as caught:
                await asyncio.wait_for(desk.open("c", BoxSpec(), 0.02), 20)
            assert (caught.value.status, desk.room) == (503, 0)


async def test_boxes_of_silent_clients_end_and_those_of_others_stay() -> None:
    backend = FunctionBackend()
    async with desk_on(backend, lease_s=1.0) as desk:
        silent, heard = await desk.open("a", BoxSpec(), 0), await desk.open("b", BoxSpec(), 0)
        gone: list[str] = []

        def ended() -> bool:
            gone[:] = desk.alive([heard.id])
            return len(desk.leases()) == 1

        await until(ended, "the end of the silent client's lease")
        assert gone == []
        assert (desk.leases()[0]["box"], silent.box.alive, heard.box.alive) == (heard.id, False, True)
        assert desk.figures.events["expired_total"] == 1
