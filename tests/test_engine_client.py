"""The engine client against a real engine: joined parts, versions, refusals, faults with a deadline."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from palestra.server.engine import EngineClient
from palestra.server.engine_wire import EngineSampling, Prompt, version_of
from palestra.server.types import EngineError, EngineRefused, VersionSpan
from palestra.server.workers.probe import ModelFacts, check_temperature
from tests.live import engine_process

pytestmark = pytest.mark.walk
PROMPT = list(range(20, 60))
LONG = EngineSampling(1.0, 400, ())


@pytest.fixture(scope="module")
def own_engine(tiny_moe: Path) -> Iterator[str]:
    with engine_process(tiny_moe, "--context-length", "1024", "--allow-forced-ids") as url:
        yield url


@pytest.fixture
async def client(own_engine: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(own_engine, deadline_s=60.0, retry_s=2.0)
    await client.open()
    yield client
    await client.close()


def rid() -> str:
    return uuid.uuid4().hex


async def running(client: EngineClient) -> None:
    """Until the engine has the request and made some tokens of it."""
    import aiohttp

    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        before: float | None = None
        while True:
            async with session.get(f"{client.url}/metrics") as reply:
                lines = [line for line in (await reply.text()).splitlines() if not line.startswith("#")]
            made = next(float(line.split()[-1]) for line in lines if "generation_tokens_total" in line)
            if before is not None and made > before:
                return
            before = made if before is None else before


def test_wire_versions() -> None:
    assert [version_of("default"), version_of("7"), version_of(3)] == [0, 7, 3]
    with pytest.raises(EngineError, match="no policy version"):
        version_of("v-seven")


async def test_ids_logprobs_and_version_of_one_request(client: EngineClient) -> None:
    said = tuple(range(60, 72))
    sampling = EngineSampling(0.7, 12, (), forced_ids=said)
    done = await client.generate(Prompt.of(PROMPT), sampling, rid=rid(), key="k")
    assert done.token_ids == said
    assert len(done.token_ids) == len(done.logprobs) == 12
    assert done.finish_reason == "length"
    assert all(lp <= 0 for lp in done.logprobs)
    assert done.spans[0].start == 0
    assert done.spans[-1].end == 12


async def test_routed_experts_have_a_row_per_token_but_the_last(client: EngineClient) -> None:
    sampling = EngineSampling(1.0, 5, (), routed_experts=True)
    done = await client.generate(Prompt.of(PROMPT), sampling, rid=rid(), key="k")
    assert done.routed_experts is not None
    assert done.routed_experts.shape == (len(PROMPT) + 4, 2, 2)
    assert set(np.unique(done.routed_experts)) <= set(range(4))


async def test_an_abort_from_elsewhere_goes_on_with_what_there_is(client: EngineClient) -> None:
    """A weight update in `abort` mode: the caller sees one long answer whose spans tell the versions."""
    forced = tuple(np.random.default_rng(0).integers(20, 400, 400).tolist())
    before = (await client.info())[0]["weight_version"]
    task = asyncio.create_task(
        client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 400, (), forced_ids=forced), rid=rid(), key="k")
    )
    await running(client)
    await client.control("/pause_generation", {"mode": "abort"})
    model = (await client.info())[0]["model_path"]
    await client.control(
        "/update_weights_from_disk", {"model_path": model, "weight_version": "41", "flush_cache": True}
    )
    await client.control("/continue_generation", {})
    done = await task
    assert done.token_ids == forced, "the parts are joined without a gap or a repetition"
    assert [span.version for span in done.spans] == [version_of(before), 41]
    assert done.spans[0].end == done.spans[1].start
    assert done.spans[1] == VersionSpan(41, done.spans[0].end, 400)


async def test_cancel_returns_the_partial(client: EngineClient) -> None:
    request = rid()
    task = asyncio.create_task(client.generate(Prompt.of(PROMPT), LONG, rid=request, key="k"))
    await running(client)
    await client.cancel(request)
    done = await task
    assert done.finish_reason == "abort"
    assert 0 < len(done.token_ids) < 400


async def test_a_refusal_is_not_repeated(client: EngineClient) -> None:
    before = client.faults
    with pytest.raises(EngineRefused, match="1024"):
        await client.generate(Prompt.of([20] * 2000), LONG, rid=rid(), key="k")
    assert client.faults == before


async def test_an_engine_that_is_not_there_is_a_fault_within_its_deadline() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = EngineClient(f"http://127.0.0.1:{port}", deadline_s=10.0, retry_s=0.5)
    await client.open()
    try:
        with pytest.raises(EngineError, match="did not answer"):
            await client.generate(Prompt.of(PROMPT), LONG, rid=rid(), key="k")
        assert client.faults > 1
    finally:
        await client.close()


async def test_a_sound_engine_is_taken_up(client: EngineClient, tiny_moe: Path) -> None:
    await client.start(ModelFacts.of(PROMPT, (), tiny_moe, None))
    (row,) = client.status()
    assert (row["state"], row["url"]) == ("serving", client.url)


async def test_logprobs_of_a_real_engine_follow_the_temperature(client: EngineClient) -> None:
    """The probe's own assumption, on an engine that is known to be right."""
    tops = []
    for temperature in (1.0, 0.5):
        sampling = EngineSampling(temperature, 1, (), top_logprobs=20)
        done = await client.generate(Prompt.of(PROMPT), sampling, rid=rid(), key="k")
        tops.append({token: logprob for logprob, token in done.top_logprobs[0]})
    best, *_, far = tops[0]
    assert next(iter(tops[1])) == best
    gaps = [top[best] - top[far] for top in tops]
    assert gaps[1] == pytest.approx(2 * gaps[0], rel=1e-3)
    check_temperature(client.url, *tops)


async def test_a_salt_keeps_caches_apart(client: EngineClient) -> None:
    prompt = list(range(60, 160))
    cached = []
    for salt in (None, None, "w1", "w1"):
        client.salt = salt
        cached.append(
            (await client.generate(Prompt.of(prompt), EngineSampling(1.0, 2, ()), rid=rid(), key="k")).cached_tokens
        )
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
    assert client.figures.group("k") == pytest.approx(sum(cached) / 400)
