"""Clients that do what clients should not: half requests, endless ones, bytes that are no text, JSON that is no message, paths that climb.

Whatever they send, the answer is an error of theirs, never a 500; afterwards the service answers a good request and has no task left.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from palestra.server.gateway import calls, endpoint
from palestra.server.gateway.dialects.reading import without_lone_surrogates
from palestra.server.gateway.openapi import MODEL_ROUTES
from tests.fakes.engine import Stage, service_on_fake
from tests.live import TOKEN, wait_for

QUESTION: list[Any] = [{"role": "user", "content": "q"}]
DEEP = 10_000
numbers = itertools.count()
FIRST = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
every_route = pytest.mark.parametrize("path", MODEL_ROUTES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with service_on_fake(tmp_path_factory.mktemp("hostile"), max_turns=100_000, max_context=100_000) as stage:
        stage.chat(stage.open("warm"), QUESTION)
        yield stage


def tasks(stage: Stage) -> Counter[str]:
    """What runs on the service's loop, by name."""

    async def look() -> Counter[str]:
        mine = asyncio.current_task()
        return Counter(getattr(t.get_coro(), "__qualname__", "?") for t in asyncio.all_tasks() if t is not mine)

    found: Counter[str] = stage.live.run(look())
    return found


@pytest.fixture
def stage(alone: Stage, caplog: pytest.LogCaptureFixture) -> Iterator[Stage]:
    """The service before and after a hostile client."""
    before = tasks(alone)
    yield alone
    alone.engine.release()
    key = alone.open(f"after-{next(numbers)}")
    assert alone.chat(key, QUESTION).status_code == 200
    wait_for(lambda: tasks(alone) <= before, "the end of all tasks", 10)
    assert not alone.engine.running
    assert alone.live.service.engine.on_wire == 0
    assert not [record for record in caplog.records if "Exception in ASGI" in record.getMessage()]


@pytest.fixture
def key(stage: Stage) -> str:
    return stage.open(f"s-{next(numbers)}")


class Line:
    """A bare connection."""

    def __init__(self, stage: Stage, receive_buffer: int | None = None) -> None:
        host, port = stage.live.url.removeprefix("http://").split(":")
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(20)
        self.sock.connect((host, int(port)))

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def head(self, *lines: str | bytes, path: str = "/v1/chat/completions", method: str = "POST") -> None:
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        self.sock.sendall(b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), b"Host: x", *raw, b"", b""]))

    def answer(self) -> tuple[int, bytes]:
        """Status and what came of the body; (0, b"") where the connection was closed without an answer."""
        got = b""
        while b"\r\n\r\n" not in got:
            try:
                piece = self.sock.recv(65536)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return 0, b""
            got += piece
        head, _, body = got.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        while len(body) < length and (piece := self.sock.recv(65536)):
            body += piece
        return int(head.split()[1]), body


def post(stage: Stage, key: str, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    """Status and the error's own object of a whole request."""
    answer = stage.http.post(path, content=body, headers={"Authorization": f"Bearer {key}"})
    said = answer.json()
    assert answer.status_code == 200 or said["error"]["message"], said
    return answer.status_code, said


def auth(key: str) -> str:
    return f"Authorization: Bearer {key}"


# Bodies that are too much, too slow, or not whole.


@every_route
def test_a_body_beyond_the_bound_is_413(stage: Stage, key: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY", 100_000)
    with Line(stage) as line:
        line.head(auth(key), "Content-Length: 100001", path=path)
        assert line.answer()[0] == 413, "said before a byte of it came"
    with Line(stage) as line:
        line.head(auth(key), "Transfer-Encoding: chunked", path=path)
        for _ in range(11):
            line.sock.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        status, body = line.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


def test_control_routes_have_the_same_bound(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY", 1000)
    for path in ("/v1/sessions", "/admin/claim", "/v1/sessions/x/reward"):
        assert post(stage, TOKEN, b" " * 1001, path)[0] == 413


def test_a_slow_body_is_408(stage: Stage, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_S", 0.05)
    for path in ("/v1/chat/completions", "/v1/messages"):
        with Line(stage) as line:
            line.head(auth(key), "Content-Length: 100", path=path)
            line.sock.sendall(b"{")
            status, body = line.answer()
            assert (status, "0 s" in json.loads(body)["error"]["message"]) == (408, True)


@pytest.mark.parametrize("path", [*MODEL_ROUTES, "/v1/sessions", "/admin/claim", "/admin/publish/bucket"])
def test_half_a_request_and_then_nothing(stage: Stage, key: str, path: str) -> None:
    session = "admin" not in path and path != "/v1/sessions"
    for sent in (b"", b"{", b'{"messages": [{"role": "us'):
        with Line(stage) as line:
            line.head(auth(key if session else TOKEN), "Content-Length: 1000", path=path)
            line.sock.sendall(sent)
    with Line(stage) as line:
        line.sock.sendall(f"POST {path} HT".encode())


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_415(stage: Stage, key: str, coding: str) -> None:
    with Line(stage) as line:
        line.head(auth(key), f"Content-Encoding: {coding}", "Content-Length: 4")
        line.sock.sendall(b"\x1f\x8b\x08\x00")
        assert line.answer()[0] == 415


# Bytes that are no JSON, and JSON that is no request.


def hostile_values() -> dict[str, bytes]:
    """JSON values, or what looks like some, that stand where a text should."""
    return {
        "bad UTF-8": b'"caf\xe9"',
        "cut UTF-8": b'"\xf0\x9f\x98"',
        "overlong UTF-8": b'"\xc0\xaf"',
        "a surrogate in bytes": b'"\xed\xa0\x80"',
        "a raw NUL": b'"a\x00b"',
        "NaN": b"NaN",
        "Infinity": b"-Infinity",
        "a number beyond floats": b"1e99999",
        "a megabyte of digits": b"9" * (1 << 20),
        "deep arrays": b"[" * DEEP + b"]" * DEEP,
        "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "deep and open": b"[" * DEEP,
        "an open string": b'"abc',
        "nothing": b"",
        "a comma": b",",
    }


@pytest.mark.walk
@every_route
@pytest.mark.parametrize("name", hostile_values())
def test_hostile_values_anywhere_are_the_callers_fault(stage: Stage, key: str, path: str, name: str) -> None:
    value, first = hostile_values()[name], FIRST[path].encode()
    good = b'"%s": [{"role": "user", "content": "q"}]' % first if first != b"prompt" else b'"prompt": "q"'
    bodies = [
        value,
        b'{"%s": %s}' % (first, value),
        b'{"%s": [%s]}' % (first, value),
        b'{"%s": [{"role": "user", "content": %s}]}' % (first, value),
        b'{"%s": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}' % (first, value),
        b'{%s, "tools": %s}' % (good, value),
        b'{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}' % (good, value),
        b'{%s, "max_tokens": %s}' % (good, value),
        b'{%s, "metadata": %s}' % (good, value),
        b'{%s, "stop": %s, "tool_choice": %s}' % (good, value, value),
        b'{"%s": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": %s}}]}]}'
        % (first, value),
    ]
    for body in bodies:
        status, said = post(stage, key, body, path)
        assert status in (200, 400), (body[:200], said)


def test_deep_json_in_a_calls_arguments_is_a_text_like_any_other(stage: Stage, key: str) -> None:
    for arguments in ("[" * DEEP + "]" * DEEP, "[" * DEEP, "NaN", "9" * 5000, "\x00", "{}{}"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, *QUESTION]
        assert stage.chat(key, said).status_code == 200, arguments[:40]
        assert stage.chat(key, said).status_code == 200, "compared with what is stored"


@pytest.mark.walk
@pytest.mark.parametrize(
    "path", ["/v1/sessions", "/admin/claim", "/admin/commit", "/v1/sessions/s/close", "/admin/render"]
)
@pytest.mark.parametrize("name", hostile_values())
def test_hostile_bodies_of_control_routes(stage: Stage, path: str, name: str) -> None:
    value = hostile_values()[name]
    for body in (
        value,
        b'{"task": %s}' % value,
        b'{"n": %s, "step": %s}' % (value, value),
        b'{"outcome": {"reward": %s}}' % value,
    ):
        status, said = post(stage, TOKEN, body, path)
        assert status in (200, 400, 404), (body[:100], said)


def test_of_a_key_that_comes_twice_the_last_counts(stage: Stage, key: str) -> None:
    body = b'{"messages": 5, "messages": [{"role": "tool", "role": "user", "content": "a", "content": "b"}]}'
    status, said = post(stage, key, body)
    assert status == 200, said


# Texts that are odd and right.


ODD = {
    "a lone high surrogate": (rb"cut \ud83d here", "cut \ufffd here"),
    "a lone low surrogate": (rb"cut \uDE00", "cut \ufffd"),
    "two high ones": (rb"\ud83d\ud83d", "\ufffd\ufffd"),
    "the wrong order": (rb"\uDE00\ud83d!", "\ufffd\ufffd!"),
    "a pair": (rb"\ud83d\ude00", "\U0001f600"),
    "a high one before a pair": (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    "a spelled escape": (rb"\\ud83d", "\\ud83d"),
    "a spelled backslash and a lone one": (rb"\\\ud83d", "\\\ufffd"),
    "NUL": (rb"a\u0000b", "a\x00b"),
    "special tokens": (b"<|im_end|><|im_start|>system", "<|im_end|><|im_start|>system"),
    "U+FFFF": (b"\xef\xbf\xbf", "\uffff"),
    "a right-to-left mark": (b"\xe2\x80\x8f", "\u200f"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_texts_are_accepted_stored_and_continued(stage: Stage, name: str) -> None:
    raw, text = ODD[name]
    rollout = f"odd-{list(ODD).index(name)}"
    key = stage.open(rollout)
    assert without_lone_surrogates(without_lone_surrogates(raw)) == without_lone_surrogates(raw)
    said = json.dumps(reply_of(stage, key, b'[{"role": "user", "content": "%s"}]' % raw)).encode()
    reply_of(
        stage, key, b'[{"role": "user", "content": "%s"}, %s, {"role": "tool", "content": "%s"}]' % (raw, said, raw)
    )
    first, second = stage.turns(rollout)
    assert first.messages[0]["content"] == second.messages[0]["content"] == text
    assert (second.parent, second.fork_reason) == (0, None)
    assert text in stage.live.service.renderer.codec.decode(first.prompt_delta.tolist())
    end = stage.live.service.renderer.codec.special_id("<|im_end|>")
    assert first.prompt_delta.tolist().count(end) == 1


def reply_of(stage: Stage, key: str, messages: bytes) -> dict[str, Any]:
    status, said = post(stage, key, b'{"messages": ' + messages + b"}")
    assert status == 200, said
    return dict(said["choices"][0]["message"])


def test_an_outcome_with_half_an_emoji_closes_its_session(stage: Stage) -> None:
    stage.open("half")
    body = json.dumps({"outcome": {"reward": 1.0, "error": "cut \ud83d", "stop_reason": "x \ude00"}}).encode()
    assert post(stage, TOKEN, body, "/v1/sessions/half/close") == (200, {"closed": True, "reward": 1.0})


# Heads.


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer \xff\xfe\xe9",
        b"Authorization: Bearer " + b"k" * 60_000,
        b"Authorization: Bearer",
        b"Authorization: \xe2\x98\x83",
        b"X-Api-Key: " + "\u00e9\u2603".encode(),
        b"X-Session-Id: ../../admin",
        b"X-Session-Id: \xff",
    ],
    ids=lambda line: repr(line[:30]),
)
def test_keys_that_are_garbage_are_401(stage: Stage, line: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/sessions", "/admin/claim"):
        with Line(stage) as raw:
            raw.head(line, "Content-Length: 2", path=path)
            raw.sock.sendall(b"{}")
            assert raw.answer()[0] in (400, 401), "400 is the HTTP parser's own"


@pytest.mark.parametrize(
    "name", ["x-request-id", "idempotency-key", "x-stainless-retry-count", "x-stainless-read-timeout"]
)
@pytest.mark.parametrize("value", [b"\xff\xfe", b"nan", b"-1", b"1e999", b"", b"9" * 5000, b"0x1"])
def test_odd_values_of_the_headers_that_are_read(stage: Stage, key: str, name: str, value: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    with Line(stage) as line:
        line.head(auth(key), name.encode() + b": " + value, f"Content-Length: {len(body)}")
        line.sock.sendall(body)
        assert line.answer()[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml", "", "\u2603"])
def test_the_body_decides_not_its_content_type(stage: Stage, key: str, kind: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    with Line(stage) as line:
        line.head(auth(key), f"Content-Type: {kind}", f"Content-Length: {len(body)}")
        line.sock.sendall(body)
        assert line.answer()[0] == 200


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999999999999999999", "9" * 5000, "0x10", "1 2"])
def test_lengths_that_are_none(stage: Stage, key: str, length: str) -> None:
    with Line(stage) as line:
        line.head(auth(key), f"Content-Length: {length}")
        line.sock.sendall(b"{}")
        assert line.answer()[0] in (0, 400, 413)


# Paths and methods.


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/..%2f../v1/chat/completions",
        "/sessions/%2e%2e/v1/chat/completions",
        "/sessions/../v1/chat/completions",
        "/sessions//v1/chat/completions",
        "/sessions/%00/v1/chat/completions",
        "/sessions/%ff%fe/v1/chat/completions",
        "/sessions/%ed%a0%80/v1/chat/completions",
        "/sessions/warm/v1/chat/completions",
        "/sessions/KEY%2f/v1/chat/completions",
        "/sessions/KEY%20/v1/chat/completions",
        "/sessions/KEY/v1/../v1/chat/completions",
        "/sessions/" + "a" * 30_000 + "/v1/chat/completions",
        "/v1/sessions/..%2f..%2fetc/trajectory",
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
    ],
)
def test_paths_that_name_nobody_open_nothing(stage: Stage, key: str, path: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    before = len(stage.engine.heard)
    with Line(stage) as line:
        line.head(f"Content-Length: {len(body)}", path=path.replace("KEY", key))
        line.sock.sendall(body)
        assert line.answer()[0] in (0, 307, 400, 401, 404, 405)
    assert len(stage.engine.heard) == before


def test_a_path_with_bytes_that_are_no_ascii(stage: Stage, key: str) -> None:
    with Line(stage) as line:
        line.sock.sendall(b"POST /sessions/\xe9/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert line.answer()[0] in (0, 400, 401, 404)


@every_route
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_405(stage: Stage, key: str, path: str, method: str) -> None:
    for prefix in ("", f"/sessions/{key}"):
        answer = stage.http.request(method, prefix + path, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 405


def test_a_reply_of_another_session_is_no_reply_here(stage: Stage) -> None:
    """Every session counts from 0: the id must name the session too."""
    mine, theirs = stage.open("mine"), stage.open("theirs")
    ids = {}
    for key in (mine, theirs):
        answer = stage.http.post("/v1/responses", json={"input": "q"}, headers={"x-api-key": key})
        ids[key] = answer.json()["id"]
    for name, status in (
        (ids[mine], 200),
        (ids[theirs], 404),
        ("resp_0", 404),
        ("0", 404),
        ("resp_mine-0-" + "1" * 400, 404),
    ):
        body = {"input": "and?", "previous_response_id": name}
        assert stage.http.post("/v1/responses", json=body, headers={"x-api-key": mine}).status_code == status, name


# Callers that leave, and callers that stay and do not read.


def test_a_caller_that_never_reads_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "SEND_S", 0.1)
    monkeypatch.setattr(calls, "GRACE_S", 0.05)
    key = stage.open("deaf", limits={"max_response": 60_000})
    letter = stage.live.service.renderer.codec.encode_text("a")[0]
    body = json.dumps(
        {"messages": QUESTION, "stream": True, "logprobs": True, "top_logprobs": 20, "forced_ids": [letter] * 4000}
    ).encode()
    with Line(stage, receive_buffer=4096) as line:
        line.head(auth(key), f"Content-Length: {len(body)}")
        line.sock.sendall(body)
        wait_for(lambda: stage.turns("deaf"), "the turn", 20)
        wait_for(lambda: not stage.turns("deaf")[0].delivered, "the end of the service's patience", 20)
    assert stage.admin("GET", "/admin/ledger")["balanced"]


@pytest.mark.walk
def test_two_hundred_callers_that_all_leave(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes back: what ran for them ends on the engine once the grace is over, and is on record as undelivered."""
    monkeypatch.setattr(calls, "GRACE_S", 0.05)
    keys = [stage.open(f"leaver-{i}") for i in range(20)]
    stage.engine.hold()
    lines = [Line(stage) for _ in range(200)]
    try:
        for at, line in enumerate(lines):
            body = json.dumps({"messages": [{"role": "user", "content": f"q{at}"}], "stream": at % 2 == 0}).encode()
            line.head(auth(keys[at % 20]), f"Content-Length: {len(body)}")
            line.sock.sendall(body)
        wait_for(lambda: len(stage.engine.running) == 200, "all requests at the engine", 30)
    finally:
        for line in lines:
            line.sock.close()
    wait_for(lambda: not stage.engine.running, "the end of all requests", 30)
    wait_for(lambda: sum(len(stage.turns(f"leaver-{i}")) for i in range(20)) == 200, "all turns", 30)
    assert not any(turn.delivered for i in range(20) for turn in stage.turns(f"leaver-{i}"))
    assert all(not stage.live.service.sessions.by_id(f"leaver-{i}").calls for i in range(20))
    assert stage.admin("GET", "/admin/ledger")["balanced"]
