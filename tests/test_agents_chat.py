"""The chat policy against a server on loopback: what it sends, what it makes of answers and errors, retries and
deadlines.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from palestra.agents.chat import ChatPolicy, close_client
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import PolicyPlayer
from palestra.agents.types import (
    AgentError,
    GroupAssignment,
    Limits,
    PolicyStop,
    SamplingParams,
    SessionHandle,
)
from palestra.envs.calculator import Calculator, calls
from palestra.envs.types import Episode, Message, StopReason, Task
from tests.conformance.policy_suite import CONVERSATION, TOOLS, PolicySuite


def completion(message: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def failure(code: str | None, message: str = "no", param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": code, "param": param}}


@dataclass
class Server:
    """An OpenAI endpoint whose answers a test sets: (status, body), "drop" the connection, or "hang"."""

    answers: list[Any] = field(default_factory=list)
    """Used up in order; the last one stays."""
    requests: list[tuple[Mapping[str, str], dict[str, Any]]] = field(default_factory=list)
    url: str = ""
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.headers, json.loads(await request.read())))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request, self.requests[-1][1])
        if answer == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer == "hang":
            await self.hung.wait()
            return web.Response()
        status, body = answer
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)

    def handle(self, key: str = "key") -> SessionHandle:
        return SessionHandle("r", 0, self.url, key)


@pytest.fixture
def server() -> Iterator[Server]:
    loop, kept = asyncio.new_event_loop(), Server([(200, completion({"role": "assistant", "content": "42"}))])
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", kept.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        kept.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield kept
    close_client()
    loop.call_soon_threadsafe(kept.hung.set)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def policy(server: Server) -> ChatPolicy:
    return ChatPolicy(server.handle(), SamplingParams(temperature=0.7, max_tokens=32))


class TestChat(PolicySuite):
    pass


class TestRequests:
    def test_what_is_sent(self, server: Server, policy: ChatPolicy) -> None:
        policy.act(CONVERSATION, TOOLS, 10.0)
        headers, body = server.requests[0]
        assert headers["Authorization"] == "Bearer key"
        assert headers["Content-Type"] == "application/json"
        assert len(headers["X-Request-Id"]) == 32
        assert body == {
            "model": "policy",
            "temperature": 0.7,
            "max_tokens": 32,
            "messages": list(CONVERSATION),
            "tools": list(TOOLS),
        }

    def test_a_seed_and_no_tools(self, server: Server) -> None:
        ChatPolicy(server.handle(), SamplingParams(seed=5), model="m").act(CONVERSATION, (), 10.0)
        body = server.requests[0][1]
        assert (body["seed"], body["model"]) == (5, "m")
        assert "tools" not in body

    def test_each_call_has_an_id_of_its_own_and_letters_are_kept(self, server: Server, policy: ChatPolicy) -> None:
        said = ({"role": "user", "content": "日本 \u2028 \U0001f600"},)
        for _ in range(2):
            policy.act(said, TOOLS, 10.0)
        assert server.requests[0][0]["X-Request-Id"] != server.requests[1][0]["X-Request-Id"]
        assert server.requests[0][1]["messages"] == list(said)

    def test_sessions_share_the_client_and_keep_their_keys(self, server: Server) -> None:
        policies = [ChatPolicy(server.handle(f"key-{number}"), SamplingParams()) for number in range(3)]
        for one in policies:
            one.act(CONVERSATION, (), 10.0)
        assert [headers["Authorization"] for headers, _ in server.requests] == [f"Bearer key-{n}" for n in range(3)]

    def test_what_is_no_json_is_refused(self, policy: ChatPolicy) -> None:
        with pytest.raises(AgentError, match="cannot be written as JSON"):
            policy.act(({"role": "user", "content": "lone \ud800"},), (), 10.0)


class TestReplies:
    def test_calls_and_extra_keys_are_kept_and_nulls_dropped(self, server: Server, policy: ChatPolicy) -> None:
        message = {**calls("12+30"), "content": None, "reasoning_content": "hm", "refusal": None}
        server.answers = [(200, completion(message, "tool_calls"))]
        reply = policy.act(CONVERSATION, TOOLS, 10.0)
        assert reply.message == {**calls("12+30"), "reasoning_content": "hm"}
        assert reply.finish_reason == "tool_calls"

    def test_a_cut_reply_without_content_is_still_a_message(self, server: Server, policy: ChatPolicy) -> None:
        server.answers = [(200, completion({"role": "assistant", "content": None, "tool_calls": []}, "length"))]
        reply = policy.act(CONVERSATION, TOOLS, 10.0)
        assert (reply.message, reply.finish_reason) == ({"role": "assistant", "content": ""}, "length")

    @pytest.mark.parametrize("body", ["no json", "[]", '{"choices": []}', '{"choices": [{"message": null}]}'])
    def test_what_is_no_completion_is_a_fault(self, server: Server, policy: ChatPolicy, body: str) -> None:
        server.answers = [(200, body)]
        with pytest.raises(AgentError, match="no chat completion"):
            policy.act(CONVERSATION, TOOLS, 10.0)


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "body", "reason"),
        [
            (400, failure("context_length_exceeded"), StopReason.CONTEXT),
            (400, failure("budget_exceeded", "the budget of 8 turns is spent"), StopReason.MAX_TURNS),
            (400, failure("budget_exceeded", "spent", "max_tokens"), StopReason.MAX_TOKENS),
            (400, failure("budget_exceeded", "the session's 600 s are over"), StopReason.DEADLINE),
            (409, failure("session_closed"), StopReason.CANCELLED),
            (409, failure("cancelled"), StopReason.CANCELLED),
        ],
    )
    def test_ends_that_are_no_fault(
        self, server: Server, policy: ChatPolicy, status: int, body: dict[str, Any], reason: StopReason
    ) -> None:
        server.answers = [(status, body)]
        with pytest.raises(PolicyStop) as caught:
            policy.act(CONVERSATION, TOOLS, 10.0)
        assert caught.value.reason is reason

    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (500, failure("engine", "the engine died")),
            (503, failure("context_length_exceeded", "not a client's error")),
            (502, "<html>bad gateway</html>"),
            (400, failure(None, "unknown field")),
            (401, failure("invalid_api_key", "no such session")),
            (404, "not found"),
            (422, {"detail": "what"}),
        ],
    )
    def test_faults_are_answered_once_and_name_the_status(
        self, server: Server, policy: ChatPolicy, status: int, body: Any
    ) -> None:
        server.answers = [(status, body)]
        with pytest.raises(AgentError, match=f"HTTP {status}"):
            policy.act(CONVERSATION, TOOLS, 10.0)
        assert len(server.requests) == 1

    def test_a_dropped_connection_is_tried_again_under_the_same_id(self, server: Server, policy: ChatPolicy) -> None:
        server.answers = ["drop", "drop", (200, completion({"role": "assistant", "content": "42"}))]
        assert policy.act(CONVERSATION, TOOLS, 10.0).message["content"] == "42"
        assert len({headers["X-Request-Id"] for headers, _ in server.requests}) == 1
        assert len(server.requests) == 3

    def test_a_server_that_keeps_dropping_is_a_fault(self, server: Server, policy: ChatPolicy) -> None:
        server.answers = ["drop"]
        with pytest.raises(AgentError, match=r"APIConnectionError|APITimeoutError"):
            policy.act(CONVERSATION, TOOLS, 20.0)
        assert len(server.requests) == 4

    def test_nobody_listens(self, server: Server) -> None:
        handle = SessionHandle("r", 0, "http://127.0.0.1:9/v1", "key")
        with pytest.raises(AgentError, match=r"127\.0\.0\.1:9"):
            ChatPolicy(handle, SamplingParams()).act(CONVERSATION, TOOLS, 20.0)

    def test_the_episodes_deadline_is_no_fault(self, server: Server, policy: ChatPolicy) -> None:
        server.answers = ["hang"]
        with pytest.raises(PolicyStop) as caught:
            policy.act(CONVERSATION, TOOLS, 0.2)
        assert caught.value.reason is StopReason.DEADLINE

    def test_the_calls_own_timeout_is_a_fault(self, server: Server) -> None:
        server.answers = ["hang"]
        one = ChatPolicy(server.handle(), SamplingParams(), request_timeout_s=0.2)
        with pytest.raises(AgentError, match=r"no reply after 0\.2 s"):
            one.act(CONVERSATION, TOOLS, 10.0)

    def test_the_client_works_again_after_it_was_closed(self, server: Server, policy: ChatPolicy) -> None:
        policy.act(CONVERSATION, TOOLS, 10.0)
        close_client()
        assert policy.act(CONVERSATION, TOOLS, 10.0).message["content"] == "42"


class Host:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.closed: dict[str, Episode] = {}

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        return SessionHandle(f"r{index}", 0, self.server.url, f"key-{index}")

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        self.closed[handle.api_key] = episode

    def conversation(self, handle: SessionHandle) -> list[list[Message]]:
        raise AssertionError("a policy's conversation is the environment's")


def test_a_group_plays_over_http_more_connections_at_once_than_a_pool_has(server: Server) -> None:
    size, all_here = 105, asyncio.Event()

    def reply(request: web.Request, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return 200, completion({"role": "assistant", "content": body["messages"][-1]["content"]})
        return 200, completion(calls("12+30"), "tool_calls")

    waiting = 0

    async def hold(request: web.Request) -> web.StreamResponse:
        """Every follower's first call waits until all of them are connected: with a limit of 100 that would never
        be.
        """
        nonlocal waiting
        waiting += 1
        if waiting > 1:
            if waiting >= size:
                all_here.set()
            await all_here.wait()
        return await Server.chat(server, request)

    server.answers = [reply]
    server.chat = hold  # type: ignore[method-assign]
    task = Task("What is 12 plus 30?", 42, "t")
    host = Host(server)
    players = Players(Calculator, PolicyPlayer(lambda handle: ChatPolicy(handle, SamplingParams())))
    episodes = run_group(
        GroupAssignment("g", size, 0, task, 1), players, host, Limits(deadline_s=60), EpisodeThreads(size)
    )
    assert [episode.reward.value for episode in episodes] == [1.0] * size
    assert len(host.closed) == size
