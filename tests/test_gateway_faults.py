"""Law 4 at the gateway: an agent that goes on after a fault of ours, or gives up because of it, is not scored for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from palestra.server.gateway import endpoint
from tests.fakes.engine import Fail, Raw, Stage, service_on_fake
from tests.live import wait_for

QUESTION: list[Any] = [{"role": "user", "content": "q"}]
NO_ANSWER = Raw(b'{"meta_info": 1}')


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with service_on_fake(tmp_path_factory.mktemp("faults"), deadline_s=20.0) as stage:
        stage.live.service.engine.retry_s = 0.1
        yield stage


def close(stage: Stage, rollout: str, reward: float, **more: Any) -> float | None:
    body = {"outcome": {"reward": reward, "stop_reason": "answer"}, **more}
    value = stage.admin("POST", f"/v1/sessions/{rollout}/close", body)["reward"]
    return None if value is None else float(value)


def test_an_environment_s_score_after_a_fault_is_unknown(stage: Stage) -> None:
    key = stage.open("broken")
    stage.engine.then(NO_ANSWER)
    assert stage.chat(key, QUESTION).status_code == 503
    assert close(stage, "broken", 0.0, infra_if_faulted=True) is None
    stored = stage.live.service.log.reader.read_sessions(rollout_id="broken")[0].outcome
    assert stored is not None
    assert (stored.reward, stored.stop_reason) == (None, "infra")
    assert "the last model call failed" in str(stored.error)


def test_an_agent_that_came_over_the_fault_is_scored(stage: Stage) -> None:
    key = stage.open("mended")
    stage.engine.then(NO_ANSWER)
    assert stage.chat(key, QUESTION).status_code == 503
    assert stage.chat(key, QUESTION).status_code == 200
    assert close(stage, "mended", 0.0, infra_if_faulted=True) == 0.0


def test_the_model_s_own_failures_and_an_outsider_s_word_stand(stage: Stage) -> None:
    """A window that is full is the policy's doing; whoever closes a session by hand knows what the reward is."""
    key = stage.open("full", limits={"max_context": 40})
    assert stage.chat(key, [{"role": "user", "content": "x" * 500}]).status_code == 400
    assert close(stage, "full", 0.0, infra_if_faulted=True) == 0.0
    key = stage.open("told")
    stage.engine.then(NO_ANSWER)
    assert stage.chat(key, QUESTION).status_code == 503
    assert close(stage, "told", 1.0) == 1.0


def test_a_fault_in_the_middle_of_a_stream_is_one_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PING_S", 0.05)
    key = stage.open("streamed")
    stage.engine.hold()
    stage.engine.then(Fail(400, "no"))
    url, headers = f"{stage.live.url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    body = {"messages": QUESTION, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": ping"
        stage.engine.release()
        rest = [line for line in lines if line and line != ": ping"]
    assert any('"error"' in line for line in rest)
    session = stage.live.service.sessions.by_id("streamed")
    assert session.fault is None, "a refusal (400) is no fault of ours"
    stage.engine.hold()
    stage.engine.then(NO_ANSWER)
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": ping"
        stage.engine.release()
        assert any('"engine_unavailable"' in line for line in lines)
    wait_for(lambda: session.fault, "the note of the fault")
    assert close(stage, "streamed", 0.5, infra_if_faulted=True) is None


def test_the_store_that_cannot_write_is_our_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from palestra.server.types import StoreError

    def broken(*_: Any) -> Any:
        raise StoreError("disk full")

    key = stage.open("unwritten")
    monkeypatch.setattr(stage.live.service.log, "append_turn", broken)
    refused = stage.chat(key, QUESTION)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "store_failed")
    assert close(stage, "unwritten", 0.0, infra_if_faulted=True) is None
