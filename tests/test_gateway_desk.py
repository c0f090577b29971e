"""Request ids: the same request under the same id is one call, whatever becomes of its connections; another request is another call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from palestra.server.gateway import calls
from tests.fakes.engine import Fail, Stage, service_on_fake
from tests.live import wait_for


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with service_on_fake(tmp_path_factory.mktemp("desk"), deadline_s=20.0, max_turns=100) as stage:
        stage.live.service.engine.retry_s = 0.1
        yield stage


def post(stage: Stage, key: str, text: str, request_id: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": request_id}
    body = {"messages": question(text)}
    return stage.http.post(f"{stage.live.url}/v1/chat/completions", json=body, headers=headers)


def turns(stage: Stage, rollout: str) -> int:
    return len(stage.live.service.log.reader.read_trajectory(rollout).turns)


def test_one_id_and_one_request_are_one_call_also_while_it_runs(stage: Stage) -> None:
    key = stage.open("twice")
    stage.engine.hold()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(post, stage, key, "q", "one") for _ in range(2)]
        session = stage.live.service.sessions.by_id("twice")
        wait_for(lambda: any(call.waiters == 2 for call in session.calls.values()), "both callers")
        stage.engine.release()
        first, second = (reply.result(20).json() for reply in both)
    assert first == second == post(stage, key, "q", "one").json()
    assert turns(stage, "twice") == 1


def test_an_id_of_the_caller_s_own_tracing_does_not_join_other_requests(stage: Stage) -> None:
    key = stage.open("traced")
    replies = [post(stage, key, text, "trace").json()["id"] for text in ("a", "b", "b", "a")]
    assert turns(stage, "traced") == 3, "only the third repeats the one before it"
    assert replies[1] == replies[2]


def test_a_call_that_failed_is_made_again(stage: Stage) -> None:
    key = stage.open("failed")
    stage.engine.then(Fail(400))
    assert post(stage, key, "q", "one").status_code == 400
    assert post(stage, key, "q", "one").status_code == 200
    assert turns(stage, "failed") == 1


def test_only_the_newest_ended_calls_are_kept(stage: Stage) -> None:
    key = stage.open("many")
    for number in range(calls.KEPT + 6):
        assert post(stage, key, str(number), f"id{number}").status_code == 200
    kept = stage.live.service.sessions.by_id("many").calls
    assert len(kept) == calls.KEPT
    assert all(isinstance(call.body, int) for call in kept.values()), "bodies are let go"
    plain = stage.open("plain")
    for number in range(5):
        assert stage.chat(plain, question(str(number))).status_code == 200
    assert stage.live.service.sessions.by_id("plain").calls == {}


def test_the_last_turn_of_a_budget_is_given_again_after_a_restart(stage: Stage) -> None:
    """Its reply may have been lost with the former process. Whoever asks for more is told that the budget is spent."""
    key = stage.open("spent", limits={"max_turns": 1})
    told = stage.chat(key, question("q"))
    assert told.status_code == 200

    async def found_again() -> int:
        return stage.live.service.desk.recover()

    assert stage.live.run(found_again()) >= 1
    more = stage.chat(key, question("another"))
    assert (more.status_code, more.json()["error"]["code"]) == (400, "budget_exceeded")
    again = stage.chat(key, question("q"))
    assert (again.status_code, again.json()["id"]) == (200, told.json()["id"])
    assert again.json()["choices"] == told.json()["choices"]
    assert stage.chat(key, question("q")).status_code == 400, "it is given once"


def test_a_session_whose_time_is_over_ends_with_what_was_posted_or_with_nothing(stage: Stage) -> None:
    service = stage.live.service
    for name, posted in (("late", None), ("rewarded", 0.75)):
        key = stage.open(name, limits={"deadline_s": 30.0})
        assert stage.chat(key, question("q")).status_code == 200
        if posted is not None:
            stage.admin("POST", f"/v1/sessions/{name}/reward", {"reward": posted})
        service.sessions.by_id(name).opened_at -= 31.0
        refused = stage.chat(key, question("more"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "budget_exceeded")
        stage.live.run(service.desk.expire())
        assert stage.chat(key, question("more")).status_code == 401
        outcome = service.log.reader.read_sessions(rollout_id=name)[0].outcome
        assert outcome is not None
        assert (outcome.reward, outcome.stop_reason, outcome.truncated) == (posted, "deadline", True)


def test_long_requests_are_not_remembered(stage: Stage) -> None:
    key = stage.open("long", limits={"max_context": 200_000})
    first = stage.live.service.core.prompts
    before = len(first._first)
    assert stage.chat(key, question("word " * 20_000)).status_code == 200
    assert len(first._first) == before
    assert stage.chat(key, question("a short one that is new")).status_code == 200
    assert len(first._first) == before + 1
