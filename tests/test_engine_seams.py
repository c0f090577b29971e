"""The seams between parts of one completion, and engines that break their word, against an engine whose every answer is scripted.

Aborts cut a reply anywhere: in a stop text, between versions, three times in a row. What a part says must be joined without a gap, and
an answer that breaks the contract must be an error of the engine, with nothing on record.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from palestra.server.engine import EngineClient
from palestra.server.engine_wire import EngineSampling, Joined, Prompt, read_answer
from palestra.server.rows import trajectory_rows
from palestra.server.types import Completion, EngineError, EngineRefused, VersionSpan
from tests.fakes.engine import Fail, FakeEngine, Raw, Say, Stage, experts_of, logprob_of, service_on_fake
from tests.live import wait_for

PROMPT = list(range(30, 40))
RID = "0123456789abcdef" * 2
QUESTION: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    limits = {"max_turns": 1000, "max_context": 4000}
    with service_on_fake(tmp_path_factory.mktemp("seams"), deadline_s=20.0, **limits) as stage:
        stage.live.service.engine.retry_s = 0.2
        yield stage


@pytest.fixture
def engine(stage: Stage) -> FakeEngine:
    stage.engine.heard.clear()
    return stage.engine


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[EngineClient]:
    decode = stage.live.service.renderer.codec.decode
    client = EngineClient(stage.engine.url, deadline_s=10.0, retry_s=2.0, decode=decode)
    await client.open()
    yield client
    await client.close()


def ids_of(stage: Stage, text: str) -> list[int]:
    return stage.live.service.renderer.codec.encode_text(text)


def whole(done: Completion, prompt: list[int]) -> None:
    """Arrays of one completion fit each other, and each logprob is that of its id at its place."""
    assert len(done.logprobs) == len(done.token_ids) == done.spans[-1].end
    assert done.spans[0].start == 0
    assert all(one.end == other.start for one, other in zip(done.spans, done.spans[1:], strict=False))
    places = range(len(prompt), len(prompt) + len(done.token_ids))
    assert list(done.logprobs) == pytest.approx(
        [logprob_of(i, at) for i, at in zip(done.token_ids, places, strict=True)]
    )


async def test_three_aborted_parts_are_one_completion(client: EngineClient, engine: FakeEngine) -> None:
    """verl#6029: the experts of a resumed request speak of the whole sequence, so the last part's replace those before."""
    engine.then(
        Say([41, 42], "abort", "1"),
        Say([], "abort", "2"),
        Say([43], "abort", "2"),
        Say([44, 45], "abort", "3"),
        Say([46]),
    )
    sampling = EngineSampling(1.0, 20, (), seed=5, top_logprobs=2, routed_experts=True)
    done = await client.generate(Prompt.of(PROMPT), sampling, rid=RID, key="k")
    assert done.token_ids == (41, 42, 43, 44, 45, 46)
    whole(done, PROMPT)
    assert done.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3), VersionSpan(3, 3, 5), VersionSpan(0, 5, 6))
    assert [[pair[1] for pair in place] for place in done.top_logprobs] == [[i, i + 1] for i in done.token_ids]
    assert done.routed_experts is not None
    assert done.routed_experts.shape[0] == len(PROMPT) + 6 - 1
    assert np.array_equal(done.routed_experts, experts_of(len(PROMPT) + 6, len(PROMPT) + 5))
    asked = [(h.prompt, h.params["max_new_tokens"], h.params["sampling_seed"]) for h in engine.heard]
    answered = [0, 2, 2, 3, 5]
    assert asked == [([*PROMPT, *done.token_ids[:n]], 20 - n, 5) for n in answered]
    assert len({h.rid for h in engine.heard}) == 5


def test_experts_without_a_shape_are_read_as_sglang_writes_them() -> None:
    """int32 of all layers, base64: only the model says how many there are."""
    rows = np.arange((len(PROMPT) + 1) * 6, dtype=np.int32).reshape(-1, 3, 2)
    said = {"routed_experts": base64.b64encode(rows.tobytes()).decode()}
    joined = Joined((3, 2))
    meta = read_answer(meta_of([41, 42], prompt_tokens=len(PROMPT), **said))
    joined.add(meta, RID)
    found = joined.completion("stop", 0, meta).routed_experts
    assert found is not None
    assert np.array_equal(found, rows)
    with pytest.raises(EngineError, match="the model's is not known"):
        Joined().completion("stop", 0, meta)
    with pytest.raises(EngineError, match="not understood"):
        Joined((5, 7)).completion("stop", 0, meta)


async def test_a_budget_that_a_part_used_up_is_the_end(client: EngineClient, engine: FakeEngine) -> None:
    engine.then(Say([41, 42], "abort"), Say([43], "abort"))
    done = await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 3, ()), rid=RID, key="k")
    assert (done.token_ids, done.finish_reason) == ((41, 42, 43), "length")


async def test_a_stop_text_that_an_abort_cut_in_two_is_found(
    client: EngineClient, engine: FakeEngine, stage: Stage
) -> None:
    head, tail = ids_of(stage, "one EN"), ids_of(stage, "D two")
    engine.then(Say(head, "abort"), Say(tail, "length"))
    done = await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 40, (), stop=("END", "two")), rid=RID, key="k")
    assert (done.finish_reason, done.stop_text) == ("stop", "END")
    assert done.token_ids == (*head, *tail)
    decode = stage.live.service.renderer.codec.decode
    assert "END" in decode(done.token_ids[: done.kept])
    assert "END" not in decode(done.token_ids[: done.kept - 1])


async def test_a_stop_text_in_a_later_part_alone_is_the_engines_own(
    client: EngineClient, engine: FakeEngine, stage: Stage
) -> None:
    ids = ids_of(stage, "a STOP")
    engine.then(Say([41], "abort"), Say(ids, meta={"finish_reason": {"type": "stop", "matched": "STOP"}}))
    done = await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 40, (), stop=("STOP",)), rid=RID, key="k")
    assert (done.stop_text, done.kept) == ("STOP", len(done.token_ids))


def test_tokens_past_a_stop_text_are_on_record_and_not_shown(stage: Stage, engine: FakeEngine) -> None:
    head, tail = ids_of(stage, "one EN"), ids_of(stage, "D two three")
    engine.then(Say(head, "abort", "1"), Say(tail, "length", "2"))
    key = stage.open("seam-core")
    done = stage.chat(key, QUESTION, stop=["END"], logprobs=True, top_logprobs=1).json()
    (choice,) = done["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    first, rest = stage.turns("seam-core")
    assert [*first.completion_ids, *rest.completion_ids] == [*head, *tail]
    assert stage.live.service.renderer.codec.decode(first.completion_ids.tolist()).endswith("END")
    assert (first.delivered, rest.delivered, rest.parent) == (True, False, None)
    assert rest.prompt_delta.tolist() == [*first.prompt_delta, *first.completion_ids]
    assert done["usage"]["completion_tokens"] == len(first.completion_ids)
    assert len(choice["logprobs"]["content"]) == len(first.completion_ids)
    at = len(first.prompt_delta)
    expected = [logprob_of(i, at + n) for n, i in enumerate([*head, *tail])]
    assert [*first.logprobs, *rest.logprobs] == pytest.approx(expected)
    assert [s.version for s in (*first.spans, *rest.spans)] == [1, 2, 2]
    follow = [*QUESTION, choice["message"], {"role": "user", "content": "and?"}]
    assert stage.chat(key, follow).status_code == 200
    third = stage.turns("seam-core")[2]
    assert (third.parent, third.close_tokens) == (0, 1)
    assert engine.heard[-1].prompt == [*first.prompt_delta, *first.completion_ids, *third.prompt_delta]
    stage.admin("POST", "/v1/sessions/seam-core/close", {"outcome": {"reward": 1.0}})
    ledger = stage.admin("GET", "/admin/ledger")
    assert ledger["balanced"]
    assert ledger["discarded"]["undelivered"] == len(rest.completion_ids)
    (row,) = trajectory_rows(stage.live.service.log.reader.read_trajectory("seam-core"))
    assert row.loss_mask.sum() == len(first.completion_ids) + len(third.completion_ids)


def _span(start: int, end: int) -> dict[str, Any]:
    return {"version": "1", "start": start, "end": end}


def meta_of(ids: list[int], **changes: Any) -> bytes:
    """An answer by hand."""
    logprobs = [[logprob_of(i, 0), i, None] for i in ids]
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 1,
        "completion_tokens": len(ids),
        "weight_version": "1",
        "output_token_logprobs": logprobs,
    }
    return orjson.dumps({"output_ids": ids, "meta_info": {**meta, **changes}})


BROKEN: dict[str, tuple[bytes, str]] = {
    # dynamo#14302: the end token is missing from the ids, and the logprobs are one longer.
    "fewer ids than logprobs": (meta_of([41, 42, 43], completion_tokens=2), "2 tokens but gives 3"),
    "more ids than logprobs": (meta_of([41, 42], completion_tokens=3), "3 tokens but gives 2"),
    # rllm#816: an engine without token ids; text is never encoded again to stand in for them.
    "no ids": (orjson.dumps({"text": "hello", "meta_info": {"finish_reason": {"type": "stop"}}}), "not understood"),
    "null for a logprob": (meta_of([41], output_token_logprobs=[[None, 41, None]]), "not understood"),
    "NaN for a logprob": (
        meta_of([41], output_token_logprobs=[[0.5, 41, None]]).replace(b"0.5", b"NaN"),
        "not understood",
    ),
    "an infinite logprob": (meta_of([41], output_token_logprobs=[[0.5, 41, None]]).replace(b"0.5", b"-1e999"), "not"),
    "a version that is none": (meta_of([41], weight_version="v-seven"), "no policy version"),
    "experts without a shape": (meta_of([41], routed_experts="AAAA"), "the model's is not known"),
    "an answer with fewer ids than its versions": (meta_of([41], weight_versions=[_span(0, 2)]), "version spans"),
    "versions that leave a gap": (meta_of([41, 42, 43], weight_versions=[_span(0, 1), _span(2, 3)]), "version"),
    "versions that end early": (meta_of([41, 42, 43], weight_versions=[_span(0, 2)]), "version"),
    "a version below 0": (meta_of([41], weight_version="-1"), "version"),
    "an id below 0": (meta_of([-41]), "-41"),
    "an id beyond 32 bits": (meta_of([2**40]), str(2**40)),
    "experts that do not fill their shape": (
        meta_of([41], routed_experts="AAAA", routed_experts_shape=[4, 2, 2]),
        "experts",
    ),
    "experts that are no base64": (meta_of([41], routed_experts="\u2603", routed_experts_shape=[1]), "experts"),
    "fewer alternatives than ids": (meta_of([41, 42], output_top_logprobs=[[[-1.0, 41, None]]]), "alternatives"),
    "no JSON": (b"<html>", "not understood"),
    "nothing": (b"", "not understood"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_the_contract_is_an_engine_error(
    client: EngineClient, engine: FakeEngine, name: str
) -> None:
    raw, said = BROKEN[name]
    engine.then(Raw(raw))
    with pytest.raises(EngineError, match=said) as broken:
        await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 20, ()), rid=RID, key="k")
    assert not isinstance(broken.value, EngineRefused)
    assert client.running == client.on_wire == 0


@pytest.mark.parametrize("name", BROKEN)
def test_nothing_of_a_broken_answer_is_recorded_and_the_session_goes_on(
    stage: Stage, engine: FakeEngine, name: str
) -> None:
    rollout = f"broken-{list(BROKEN).index(name)}"
    key = stage.open(rollout)
    engine.then(Say([41, 42], "abort"), Raw(BROKEN[name][0]))
    answer = stage.chat(key, QUESTION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    session = stage.live.service.sessions.by_id(rollout)
    assert (session.started, session.sampled, session.reserved, session.turns) == (0, 0, 0, 0)
    assert stage.turns(rollout) == ()
    assert stage.chat(key, QUESTION).status_code == 200
    assert [turn.index for turn in stage.turns(rollout)] == [0]


async def test_503_is_retried_and_400_never(client: EngineClient, engine: FakeEngine) -> None:
    """slime#1328."""
    engine.then(Fail(503), Fail(502), Say([41]))
    done = await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 20, ()), rid=RID, key="k")
    assert (done.token_ids, client.faults, len(engine.heard)) == ((41,), 2, 3)
    engine.then(Fail(400, "too long"))
    with pytest.raises(EngineRefused, match="too long"):
        await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 20, ()), rid=RID, key="k")
    assert (client.faults, len(engine.heard)) == (2, 4)


def test_what_the_engine_refuses_is_the_callers_400_and_what_it_cannot_is_503(stage: Stage, engine: FakeEngine) -> None:
    key = stage.open("refused")
    engine.then(Fail(400, "too long"))
    answer = stage.chat(key, QUESTION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engine_refused")
    engine.then(*[Fail(503)] * 20)
    answer = stage.chat(key, QUESTION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    engine._script.clear()
    assert stage.turns("refused") == ()
    assert stage.chat(key, QUESTION).status_code == 200


async def test_a_part_that_fails_takes_the_whole_completion_with_it(client: EngineClient, engine: FakeEngine) -> None:
    engine.then(Say([41, 42], "abort"), Fail(400, "gone wrong"))
    with pytest.raises(EngineRefused, match="gone wrong"):
        await client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 20, ()), rid=RID, key="k")


async def test_a_request_ends_by_its_name_before_and_after_a_seam(client: EngineClient, engine: FakeEngine) -> None:
    """A resumed part runs under a name of its own: ending the request must reach that one."""
    engine.heard.clear()
    for parts in (0, 1, 2):
        engine.hold()
        task = asyncio.create_task(client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 400, ()), rid=RID, key="k"))
        for _ in range(parts):
            await asyncio.to_thread(wait_for, lambda: engine.running, "the part")
            seen = len(engine.heard)
            await client.control("/abort_request", {"abort_all": True})
            await asyncio.to_thread(wait_for, lambda seen=seen: len(engine.heard) > seen, "the next part")
        await asyncio.to_thread(wait_for, lambda: engine.running, "the last part")
        await client.cancel(RID)
        done = await asyncio.wait_for(task, 10)
        assert done.finish_reason == "abort"
        assert not engine.running
        engine.release()


async def test_a_request_that_is_held_back_ends_without_another_part(client: EngineClient, engine: FakeEngine) -> None:
    engine.hold()
    task = asyncio.create_task(client.generate(Prompt.of(PROMPT), EngineSampling(1.0, 400, ()), rid=RID, key="k"))
    await asyncio.to_thread(wait_for, lambda: engine.running, "the request")
    await client.freeze()
    await asyncio.to_thread(wait_for, lambda: not engine.running, "its first part's end")
    await client.cancel(RID)
    engine.release()
    client.thaw()
    done = await asyncio.wait_for(task, 10)
    assert (done.finish_reason, len(engine.heard)) == ("abort", 1)
    assert list(done.token_ids) == engine.heard[0].ids


def test_logprobs_of_the_fake_are_finite_and_below_zero() -> None:
    assert all(logprob_of(i, at) < 0 and math.isfinite(logprob_of(i, at)) for i in range(50) for at in range(50))
