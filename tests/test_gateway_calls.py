"""Callers that lose patience or their connection: they find their own call again, no token is sampled twice, and none is lost."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from palestra.agents.types import SessionHandle
from palestra.server.client import ServiceClient
from palestra.server.gateway import calls
from palestra.server.renderer.registry import load_renderer
from palestra.server.rows import trajectory_rows
from tests.live import TOKEN, LiveService, settings, wait_for

pytestmark = pytest.mark.walk
QUESTION: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_engine: str, tiny_moe: Path) -> Iterator[LiveService]:
    limits = {"max_turns": 64, "max_response": 700}
    with LiveService(settings(tmp_path_factory.mktemp("calls") / "store", tiny_engine, **limits), tiny_moe) as service:
        yield service


@pytest.fixture
def service(live: LiveService) -> Iterator[ServiceClient]:
    client = ServiceClient(live.url, TOKEN)
    yield client
    client.close()


def post(handle: SessionHandle, body: dict[str, Any], **headers: str) -> httpx.Response:
    told = {"Authorization": f"Bearer {handle.api_key}", **{name.replace("_", "-"): v for name, v in headers.items()}}
    return httpx.post(f"{handle.base_url}/chat/completions", json=body, headers=told, timeout=60)


def leave(live: LiveService, handle: SessionHandle, body: dict[str, Any], until: threading.Event) -> None:
    """Sends a request and closes the connection once `until` is set."""
    raw = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as caller:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {handle.api_key}\r\n"
        caller.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert until.wait(30)


def test_a_caller_that_runs_out_of_patience_comes_back_to_its_own_call(service: ServiceClient) -> None:
    """The engine stands still for longer than the client waits: the official client's own retry gets the one reply."""
    handle = service.open()
    client = openai.OpenAI(base_url=handle.base_url, api_key=handle.api_key, timeout=2.0, max_retries=3)
    service.freeze()
    try:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(client.chat.completions.create, model="m", messages=QUESTION, max_tokens=12)
            assert not reply.cancel()
            threading.Event().wait(2.5)  # longer than the client's patience: this wait is the subject
            service.thaw()
            assert reply.result(30).choices[0].finish_reason in ("stop", "length", "tool_calls")
    finally:
        service.thaw()
    (turn,) = service.trajectory(handle).turns
    assert turn.delivered


def test_without_a_retry_the_answer_says_to_come_back(service: ServiceClient) -> None:
    handle = service.open()
    service.freeze()
    try:
        waiting = post(handle, {"messages": QUESTION, "max_tokens": 8}, x_stainless_read_timeout="1.2")
    finally:
        service.thaw()
    assert waiting.status_code == 503
    assert waiting.json()["error"]["code"] == "still_generating"
    assert waiting.headers["x-should-retry"] == "true"


def test_a_lost_connection_is_found_again_by_the_retry(service: ServiceClient, live: LiveService) -> None:
    handle, body, gone = service.open(), {"messages": QUESTION, "max_tokens": 12}, threading.Event()
    service.freeze()
    try:
        lost = threading.Thread(target=leave, args=(live, handle, body, gone))
        lost.start()
        session = live.service.sessions.by_id(handle.rollout_id)
        wait_for(lambda: session.calls, "the call")
        gone.set()
        lost.join(30)
        wait_for(lambda: all(not call.wanted for call in session.calls.values()), "the caller's leaving")
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(post, handle, body, x_stainless_retry_count="1")
            wait_for(lambda: any(call.wanted for call in session.calls.values()), "the caller's return")
            service.thaw()
            assert again.result(30).status_code == 200
    finally:
        service.thaw()
    (turn,) = service.trajectory(handle).turns
    assert turn.delivered


def test_a_reply_that_was_lost_on_its_way_counts_once_the_caller_goes_on_from_it(
    service: ServiceClient, live: LiveService
) -> None:
    handle = service.open()
    said = post(handle, {"messages": QUESTION, "max_tokens": 12}).json()["choices"][0]["message"]
    session = live.service.sessions.by_id(handle.rollout_id)
    assert session.tree.find(0) is not None
    live.run(live.service.core.mark(session, (0,), False))
    assert not service.trajectory(handle).turns[0].delivered
    post(handle, {"messages": [*QUESTION, said, {"role": "user", "content": "and?"}], "max_tokens": 8})
    first, second = service.trajectory(handle).turns
    assert (first.delivered, second.parent) == (True, 0)
    (row,) = trajectory_rows(service.trajectory(handle))
    assert (row.sources == 19).sum() == len(first.completion_ids) + len(second.completion_ids)


def test_a_caller_that_never_comes_back_is_given_up(
    service: ServiceClient, live: LiveService, monkeypatch: pytest.MonkeyPatch, tiny_moe: Path
) -> None:
    """Its request is taken off the engine; what was sampled is on record, and not trained."""
    monkeypatch.setattr(calls, "GRACE_S", 0.05)
    letter = load_renderer(tiny_moe).codec.encode_text("a")[0]
    handle, gone = service.open(), threading.Event()
    body = {"messages": QUESTION, "max_tokens": 700, "forced_ids": [letter] * 700}
    lost = threading.Thread(target=leave, args=(live, handle, body, gone))
    lost.start()
    wait_for(lambda: live.service.engine.on_wire, "the request's way to the engine")
    gone.set()
    lost.join(30)
    wait_for(lambda: service.trajectory(handle).turns, "the turn")
    (turn,) = service.trajectory(handle).turns
    assert not turn.delivered
    assert len(turn.completion_ids) < 700
    assert service.ledger()["balanced"]


def test_frozen_replies_go_on_whole(service: ServiceClient, live: LiveService, tiny_moe: Path) -> None:
    """Eight callers, three freezes in the middle of their replies: each gets its whole reply, id for id."""
    letters = load_renderer(tiny_moe).codec.encode_text("abcdefghij")
    forced = [letters[i % len(letters)] for i in range(400)]
    handles = [service.open() for _ in range(8)]
    body = {"messages": QUESTION, "max_tokens": 400, "forced_ids": forced}
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(post, handle, body) for handle in handles]
        for _ in range(3):
            wait_for(lambda: live.service.engine.on_wire or all(r.done() for r in replies), "running requests")
            service.freeze()
            wait_for(lambda: not live.service.engine.on_wire, "the engine's rest")
            service.thaw()
        assert [reply.result(60).status_code for reply in replies] == [200] * 8
    for handle in handles:
        (turn,) = service.trajectory(handle).turns
        assert turn.completion_ids.tolist() == forced
        assert turn.finish_reason == "length"
        assert (turn.spans[0].start, turn.spans[-1].end) == (0, 400)
