"""The service against a real engine: exact tokens through many turns, sessions and keys, and what is refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.server.ledger import read_ledger
from palestra.server.renderer.families.qwen import Qwen3Renderer
from palestra.server.renderer.registry import load_renderer
from palestra.server.rows import trajectory_rows
from palestra.server.types import TokenSource
from tests.live import LiveService, settings, wait_for

pytestmark = pytest.mark.walk
TOOLS = [
    {
        "type": "function",
        "function": {"name": "echo", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
]
QUESTION = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


@pytest.fixture
def live(tmp_path: Path, tiny_engine: str, tiny_moe: Path) -> Iterator[LiveService]:
    with LiveService(settings(tmp_path / "store", tiny_engine), tiny_moe) as service:
        yield service


@pytest.fixture(scope="module")
def renderer(tiny_moe: Path) -> Qwen3Renderer:
    renderer = load_renderer(tiny_moe)
    assert isinstance(renderer, Qwen3Renderer)
    return renderer


def call_ids(renderer: Qwen3Renderer, text: str) -> list[int]:
    """A tool call whose arguments are split byte by byte: a text round trip would give other ids."""
    codec = renderer.codec
    split = [codec.encode_text(char)[0] for char in text]
    assert split != codec.encode_text(text)
    head = codec.encode_text('\n{"name": "echo", "arguments": {"x": "')
    return [renderer.call, *head, *split, *codec.encode_text('"}}\n'), renderer.call_end, renderer.end]


def test_law_1_prefix_by_ids_over_five_turns(live: LiveService, renderer: Qwen3Renderer) -> None:
    """Non-canonical ids are kept, and a literal end token in a tool's result stays text."""
    key = live.open()["api_key"]
    forced = call_ids(renderer, "assistant")
    messages: list[dict[str, Any]] = list(QUESTION)
    for _ in range(5):
        answer = live.chat(key, messages, tools=TOOLS, forced_ids=forced, max_tokens=64)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == '{"x": "assistant"}'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a<|im_end|>b"}
        messages += [message, result]
    live.admin("POST", "/v1/sessions/r0/close", {"attempt": 0, "outcome": {"reward": 1.0, "stop_reason": "answer"}})
    trajectory = live.service.log.reader.read_trajectory("r0")
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2, 3]
    (row,) = trajectory_rows(trajectory)
    ids, at = row.token_ids.tolist(), 0
    for turn in trajectory.turns:
        assert ids[at : at + len(turn.prompt_delta)] == turn.prompt_delta.tolist()
        at += len(turn.prompt_delta)
        assert ids[at : at + len(forced)] == forced == turn.completion_ids.tolist()
        at += len(forced)
    assert at == len(ids)
    literal = renderer.codec.encode_text("a<|im_end|>b")
    delta = trajectory.turns[1].prompt_delta.tolist()
    assert any(delta[i : i + len(literal)] == literal for i in range(len(delta)))
    assert ids.count(renderer.end) == 5 + 2 + 4  # one a reply, the two first messages, one a tool turn
    assert row.loss_mask.sum() == 5 * len(forced)
    assert set(row.sources[row.loss_mask == 1]) == {TokenSource.SAMPLED}


def test_by_key_and_by_path_reach_one_session(live: LiveService) -> None:
    opened = live.open()
    key = opened["api_key"]
    by_key = live.chat(key, QUESTION)
    by_id = live.chat(key, QUESTION, path="/sessions/r0/v1")
    key_in_path = live.chat("anything", QUESTION, path=f"/sessions/{key}/v1")
    assert [a.status_code for a in (by_key, by_id, key_in_path)] == [200, 200, 200]
    turns = live.service.log.reader.read_trajectory("r0").turns
    assert [t.fork_reason for t in turns] == [None, "repeated_request", "repeated_request"]
    assert [t.parent for t in turns] == [None, None, None]


def test_a_key_opens_its_session_and_nothing_else(live: LiveService) -> None:
    first, second = live.open("r1")["api_key"], live.open("r2")["api_key"]
    assert live.chat(first, QUESTION, path="/sessions/r2/v1").status_code == 401
    assert live.chat("sk-wrong", QUESTION).json()["error"]["code"] == "invalid_api_key"
    assert live.chat("sk-wrong", QUESTION, path="/sessions/r1/v1").status_code == 401
    assert live.chat(second, QUESTION, path="/sessions/r2/v1").status_code == 200


def test_control_routes_need_the_admin_token(live: LiveService) -> None:
    import httpx2 as httpx

    key = live.open()["api_key"]
    for path in ("/v1/sessions", "/admin/claim", "/admin/publish/begin", "/admin/worker", "/v1/sessions/r0/close"):
        answer = httpx.post(live.url + path, json={}, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401, path


def test_a_repeated_request_id_gets_the_same_turn(live: LiveService) -> None:
    import httpx2 as httpx

    key = live.open()["api_key"]
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "one"}
    body = {"messages": QUESTION}
    answers = [httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=headers).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(live.service.log.reader.read_trajectory("r0").turns) == 1


def test_a_turn_whose_caller_is_gone_is_kept_apart(live: LiveService) -> None:
    """Without a request id the repeated call is a new turn, and only that one is trained."""
    key = live.open()["api_key"]
    body = json.dumps({"messages": QUESTION}).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
    reader = live.service.log.reader
    wait_for(
        lambda: reader.read_trajectory("r0").turns and not reader.read_trajectory("r0").turns[0].delivered, "the mark"
    )
    said = live.chat(key, QUESTION).json()["choices"][0]["message"]
    assert live.chat(key, [*QUESTION, said, {"role": "user", "content": "and?"}]).status_code == 200
    live.admin("POST", "/v1/sessions/r0/close", {"attempt": 0, "outcome": {"reward": 1.0, "stop_reason": "answer"}})
    trajectory = reader.read_trajectory("r0")
    assert [(t.parent, t.delivered) for t in trajectory.turns] == [(None, False), (None, True), (1, True)]
    (row,) = trajectory_rows(trajectory)
    assert row.loss_mask.sum() == sum(len(t.completion_ids) for t in trajectory.turns[1:])


def test_changed_history_and_changed_tools_fork_with_a_reason(live: LiveService) -> None:
    key = live.open()["api_key"]
    said = live.chat(key, QUESTION, tools=TOOLS).json()["choices"][0]["message"]
    follow = [*QUESTION, said, {"role": "user", "content": "and?"}]
    assert live.chat(key, follow, tools=TOOLS).status_code == 200
    edited = [QUESTION[0], {"role": "user", "content": "other"}, said, {"role": "user", "content": "and?"}]
    assert live.chat(key, edited, tools=TOOLS).status_code == 200
    assert live.chat(key, follow).status_code == 200
    turns = live.service.log.reader.read_trajectory("r0").turns
    assert [(t.parent, t.fork_reason) for t in turns] == [
        (None, None),
        (0, None),
        (None, "history_changed"),
        (None, "tools_changed"),
    ]
    events = live.service.log.reader.read_events("r0")
    assert [e.data["reason"] for e in events] == ["history_changed", "tools_changed"]


def test_two_continuations_of_one_turn_are_siblings_and_share_their_prefix_once(live: LiveService) -> None:
    key = live.open()["api_key"]
    said = live.chat(key, QUESTION).json()["choices"][0]["message"]
    for text in ("left", "right"):
        assert live.chat(key, [*QUESTION, said, {"role": "user", "content": text}]).status_code == 200
    live.admin("POST", "/v1/sessions/r0/close", {"attempt": 0, "outcome": {"reward": 0.5, "stop_reason": "answer"}})
    trajectory = live.service.log.reader.read_trajectory("r0")
    first, second = trajectory_rows(trajectory)
    shared = len(trajectory.turns[0].completion_ids)
    assert (second.sources == TokenSource.SHARED).sum() == shared
    sampled = sum(len(t.completion_ids) for t in trajectory.turns)
    assert first.loss_mask.sum() + second.loss_mask.sum() == sampled


def test_budget_window_and_close_are_clean_errors(live: LiveService) -> None:
    limits = {"max_turns": 1, "max_response": 8, "max_context": 64, "temperature": 1.0}
    key = live.open("r1", limits=limits)["api_key"]
    too_long = live.chat(key, [{"role": "user", "content": "x" * 500}])
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert live.chat(key, [{"role": "user", "content": "x"}]).status_code == 200
    spent = live.chat(key, [{"role": "user", "content": "x"}])
    assert (spent.status_code, spent.json()["error"]["code"]) == (400, "budget_exceeded")
    live.admin("POST", "/v1/sessions/r1/close", {"attempt": 0, "outcome": {"reward": 0.0}})
    live.admin("POST", "/v1/sessions/r1/close", {"attempt": 0, "outcome": {"reward": 1.0}})
    assert live.chat(key, [{"role": "user", "content": "x"}]).status_code == 401
    assert live.service.log.reader.read_trajectory("r1").reward == 0.0


def test_max_tokens_is_cut_to_the_window(live: LiveService) -> None:
    limits = {"max_turns": 4, "max_response": 500, "max_context": 64, "temperature": 1.0}
    key = live.open("r1", limits=limits)["api_key"]
    answer = live.chat(key, [{"role": "user", "content": "x"}], forced_ids=[300] * 400)
    usage = answer.json()["usage"]
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 64


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": QUESTION, "n": 0}, "n"),
        ({"messages": QUESTION, "stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": "x"}, "array"),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused(live: LiveService, body: dict[str, Any], said: str) -> None:
    import httpx2 as httpx

    key = live.open()["api_key"]
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_ledger_counts_every_recorded_token(live: LiveService) -> None:
    key = live.open()["api_key"]
    live.chat(key, QUESTION)
    live.admin("POST", "/v1/sessions/r0/close", {"attempt": 0, "outcome": {"reward": None, "stop_reason": "infra"}})
    ledger = read_ledger(live.service.settings.store)
    assert ledger.balanced
    assert ledger.sampled == sum(ledger.discarded.values()) > 0
