"""The real routers in front of prefill and decode engines: stand-in engines that only answer, so that no GPU is needed for it."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from palestra.cli.engines.commands import RouterKind, router_command
from palestra.cli.engines.environment import find, has_smg
from palestra.cli.engines.ports import free_ports
from palestra.cli.engines.types import EngineCommand, WorkerType

pytestmark = [pytest.mark.ci, pytest.mark.timeout(120)]
BOOTSTRAP = 8998
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
PROMPT = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}


@dataclass
class StandIn:
    """An engine of one kind, as far as a router sees it."""

    kind: WorkerType
    heard: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    url: str = ""

    async def generate(self, request: web.Request) -> web.Response:
        self.heard.append(await request.json())
        meta = {
            "id": "r",
            "prompt_tokens": 3,
            "finish_reason": {"type": "length", "length": 2},
            "input_token_logprobs": [],
        }
        if self.kind == "decode":
            meta |= {"completion_tokens": 2, "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]]}
        return web.json_response({"text": "", "output_ids": [8, 9], "meta_info": meta}, status=self.status)

    async def about(self, request: web.Request) -> web.Response:
        said = {
            "model_path": "/m",
            "served_model_name": "m",
            "disaggregation_mode": self.kind,
            "tp_size": 1,
            "dp_size": 1,
        }
        return web.json_response(said)


@asynccontextmanager
async def standing(stand_in: StandIn) -> AsyncIterator[StandIn]:
    app = web.Application()
    app.router.add_post("/generate", stand_in.generate)
    for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/loads"):
        app.router.add_get(path, stand_in.about)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports("127.0.0.1", 1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stand_in.url = f"http://127.0.0.1:{port}"
    try:
        yield stand_in
    finally:
        await runner.cleanup()


@asynccontextmanager
async def routed(kind: RouterKind, engines: list[StandIn], log: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a router that has all of them for healthy."""
    environment = find()
    if kind == "smg" and not has_smg(environment):
        pytest.skip("smg is not in the engines' environment: palestra engine install --smg")
    commands = [
        EngineCommand(f"engine-{index}", (), {}, each.url, each.kind, BOOTSTRAP if each.kind == "prefill" else None)
        for index, each in enumerate(engines)
    ]
    port, figures = free_ports("127.0.0.1", 2)
    command = router_command(commands, environment, port=port, prometheus_port=figures, kind=kind)
    process = started(command, log)
    try:
        async with aiohttp.ClientSession(command.url) as client, asyncio.timeout(60):
            while not await healthy(client, len(engines)):
                assert process.poll() is None, "the router ended while it started"
                await asyncio.sleep(0.1)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def started(command: EngineCommand, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env={**os.environ, **command.env}
        )


async def healthy(client: aiohttp.ClientSession, count: int) -> bool:
    try:
        async with client.get("/workers") as answer:
            workers = (await answer.json())["workers"]
    except (aiohttp.ClientError, ValueError):
        return False
    return sum(bool(worker["is_healthy"]) for worker in workers) == count


@pytest.mark.parametrize("kind", ["sglang-router", "smg"])
async def test_each_request_goes_to_both_with_where_to_meet_and_is_never_repeated(
    kind: RouterKind, tmp_path: Path
) -> None:
    stand_ins = [StandIn("prefill"), StandIn("decode"), StandIn("decode")]
    async with (
        standing(stand_ins[0]) as prefill,
        standing(stand_ins[1]) as one,
        standing(stand_ins[2]) as other,
        routed(kind, [prefill, one, other], tmp_path / "router.log") as client,
    ):
        for group in ("a", "b", "a", "b", "a"):
            async with client.post("/generate", json=PROMPT, headers={"X-SMG-Routing-Key": group}) as answer:
                assert answer.status == 200, await answer.text()
                # sglang-router leaves the content type out here.
                reply = await answer.json(content_type=None)
            assert reply["output_ids"] == [8, 9]
            assert [logprob[0] for logprob in reply["meta_info"]["output_token_logprobs"]] == [-0.5, -0.25]
        decoded = one.heard + other.heard
        assert len(prefill.heard) == len(decoded) == 5
        meetings = {tuple(body[name] for name in ROOM) for body in prefill.heard}
        assert meetings == {tuple(body[name] for name in ROOM) for body in decoded}
        assert len({meeting[2] for meeting in meetings}) == 5
        assert {meeting[:2] for meeting in meetings} == {("127.0.0.1", BOOTSTRAP)}
        assert {tuple(body["input_ids"]) for body in (*prefill.heard, *decoded)} == {(5, 6, 7)}
        # Keys stay with their engine: two groups of three and two turns, apart or together.
        assert {len(one.heard), len(other.heard)} <= {0, 2, 3, 5}

        for engine in (one, other):
            engine.status = 500
        async with client.post("/generate", json=PROMPT, headers={"X-SMG-Routing-Key": "c"}) as answer:
            assert answer.status >= 500
        assert len(prefill.heard) == len(one.heard) + len(other.heard) == 6


async def test_the_router_asks_for_an_engines_model_and_not_for_its_health(tmp_path: Path) -> None:
    asked: list[str] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        asked.append(request.path)
        answer: web.StreamResponse = await handler(request)
        return answer

    stand_in = StandIn("regular")
    app = web.Application(middlewares=[note])
    app.router.add_get("/{any:.*}", stand_in.about)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports("127.0.0.1", 1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stand_in.url = f"http://127.0.0.1:{port}"
    try:
        async with routed("sglang-router", [stand_in], tmp_path / "router.log") as client:
            registered = len(asked)
            async with asyncio.timeout(30):
                for _ in itertools.count():
                    if "/model_info" in asked[registered:]:
                        break
                    await asyncio.sleep(0.1)
            assert await healthy(client, 1)
            assert "/health" not in asked[registered:]
    finally:
        await runner.cleanup()
