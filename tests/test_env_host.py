"""The environment host: its parts in one process, and real hosts whose environments crash, hang and grow."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import gymnasium as gym
import pytest

from palestra.envs.core import MessageEnv
from palestra.envs.registry import make_env
from palestra.envs.types import Task
from palestra.server.env_host import slots, wire
from palestra.server.env_host import websocket as ws
from palestra.server.env_host.channels import LENGTH, PipeChannel, WebSocketChannel
from palestra.server.env_host.guard import Guard
from palestra.server.env_host.main import main
from palestra.server.env_host.session import Session
from palestra.server.env_host.types import EnvRefusal, Phase, Served
from tests.env_hosts import EnvHostProcess, alive, children, write_naughty
from tests.live import until, wait_for


def client_frame(opcode: int, payload: bytes, last: bool = True) -> bytes:
    """A frame as clients send it: masked."""
    mask, size = b"\xa6$\x8b(", len(payload)  # fixed: the frames name test cases, which all workers have to agree on
    head = bytes([(0x80 if last else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


class TestFrames:
    def test_the_handshake_of_the_rfc(self) -> None:
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in ws.accepted(b"dGhlIHNhbXBsZSBub25jZQ==")

    @pytest.mark.parametrize("size", [0, 1, 3, 125, 126, 65535, 65536, 100_001])
    def test_a_message_of_any_size_arrives(self, size: int) -> None:
        payload = random.Random(size).randbytes(size)
        assert ws.Frames().feed(client_frame(ws.TEXT, payload)) == [(ws.TEXT, payload)]

    def test_bytes_in_any_pieces_and_messages_in_any_frames_give_the_same(self) -> None:
        whole = (
            client_frame(ws.TEXT, b"one")
            + client_frame(ws.TEXT, b"tw", last=False)
            + client_frame(ws.PING, b"hey")
            + client_frame(0, b"", last=False)
            + client_frame(0, b"o" * 200)
            + client_frame(ws.CLOSE, b"\x03\xe8")
        )
        wanted = [(ws.TEXT, b"one"), (ws.PING, b"hey"), (ws.TEXT, b"tw" + b"o" * 200), (ws.CLOSE, b"\x03\xe8")]
        for seed in range(20):
            dice, frames, found, at = random.Random(seed), ws.Frames(), list[tuple[int, bytes]](), 0
            while at < len(whole):
                step = dice.randint(1, 40)
                found += frames.feed(whole[at : at + step])
                at += step
            assert found == wanted

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (ws.frame(ws.TEXT, b"unmasked"), ws.PROTOCOL_ERROR),
            (b"\xc1\x80\x00\x00\x00\x00", ws.PROTOCOL_ERROR),
            (client_frame(3, b""), ws.PROTOCOL_ERROR),
            (client_frame(0, b"goes on with nothing"), ws.PROTOCOL_ERROR),
            (client_frame(ws.TEXT, b"a", last=False) + client_frame(ws.TEXT, b"b"), ws.PROTOCOL_ERROR),
            (client_frame(ws.PING, b"x" * 126), ws.PROTOCOL_ERROR),
            (client_frame(ws.PING, b"x", last=False), ws.PROTOCOL_ERROR),
            (b"\x81\xff" + (1 << 40).to_bytes(8, "big"), ws.TOO_BIG),
            (client_frame(ws.TEXT, b"x" * 60, last=False) + client_frame(0, b"x" * 60), ws.TOO_BIG),
        ],
    )
    def test_what_is_no_websocket_is_refused(self, data: bytes, code: int) -> None:
        with pytest.raises(ws.BrokenSocketError) as refused:
            ws.Frames(most=100 if code == ws.TOO_BIG else ws.MOST_BYTES).feed(data)
        assert refused.value.code == code


class TestChannels:
    @pytest.fixture
    def pair(self) -> Iterator[tuple[socket.socket, WebSocketChannel]]:
        client, server = socket.socketpair()
        client.settimeout(10)
        with client, server:
            yield client, WebSocketChannel(server)

    def test_messages_answers_and_pings(self, pair: tuple[socket.socket, WebSocketChannel]) -> None:
        client, channel = pair
        client.sendall(client_frame(ws.PING, b"p") + client_frame(ws.TEXT, b"first") + client_frame(ws.TEXT, b"second"))
        assert (channel.receive(), channel.receive()) == (b"first", b"second")
        channel.send(b"answer")
        wanted = ws.frame(ws.PONG, b"p") + ws.frame(ws.TEXT, b"answer")
        assert client.recv(100, socket.MSG_WAITALL if len(wanted) == 100 else 0) == wanted

    def test_a_ping_during_a_long_step_is_answered_and_what_came_meanwhile_is_kept(
        self, pair: tuple[socket.socket, WebSocketChannel]
    ) -> None:
        client, channel = pair
        client.sendall(client_frame(ws.TEXT, b"early") + client_frame(ws.PING, b"are you there"))
        thread = threading.Thread(target=channel.attend)
        thread.start()
        assert client.recv(100) == ws.frame(ws.PONG, b"are you there")
        thread.join()
        assert channel.receive() == b"early"

    def test_while_it_waits_for_a_message_there_is_nothing_to_attend_to(
        self, pair: tuple[socket.socket, WebSocketChannel]
    ) -> None:
        client, channel = pair
        found: list[bytes | None] = []
        thread = threading.Thread(target=lambda: found.append(channel.receive()))
        thread.start()
        wait_for(channel._lock.locked, "the reader", 10)
        channel.attend()
        client.sendall(client_frame(ws.TEXT, b"late"))
        thread.join(10)
        assert found == [b"late"]

    @pytest.mark.parametrize(
        ("sent", "last"),
        [
            (client_frame(ws.CLOSE, b"\x03\xe8bye"), ws.frame(ws.CLOSE, b"\x03\xe8")),
            (client_frame(ws.BINARY, b"x"), ws.closing(ws.NOT_ACCEPTED, "messages are JSON in text frames")),
            (ws.frame(ws.TEXT, b"unmasked")[:1] + b"\x01", None),
            (b"", b""),
        ],
    )
    def test_how_it_ends(self, pair: tuple[socket.socket, WebSocketChannel], sent: bytes, last: bytes | None) -> None:
        client, channel = pair
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert channel.receive() is None
        channel.close()
        said = client.recv(1000)
        assert said == last if last is not None else said[2:4] == (1002).to_bytes(2, "big")
        assert client.recv(1000) == b""

    def test_a_pipe(self) -> None:
        ours, theirs = socket.socketpair()
        channel = PipeChannel(theirs)
        with ours:
            ours.sendall(LENGTH.pack(3) + b"abc" + LENGTH.pack(2) + b"d")
            assert channel.receive() == b"abc"
            ours.sendall(b"e")
            assert channel.receive() == b"de"
            channel.send(b"x" * 10)
            assert ours.recv(100) == LENGTH.pack(10) + b"x" * 10
            ours.shutdown(socket.SHUT_WR)
            assert channel.receive() is None
            channel.close()

    def test_slots_are_seen_through_another_mapping(self) -> None:
        fd = slots.make(3)
        here, there = slots.attach(fd), slots.attach(fd)
        os.close(fd)
        slots.Slot(here, 2).mark(Phase.WORKING, 7)
        since, phase, steps = slots.Slot(there, 2).look()
        assert (phase, steps) == (Phase.WORKING, 7)
        assert 0 <= since < 10
        assert slots.Slot(there, 1).look()[1:] == (Phase.STARTING, 0)


@pytest.fixture
def naughty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.syspath_prepend(str(tmp_path))
    env_id = write_naughty(tmp_path)
    session = Session(make_env(env_id), Served(env_id))
    yield session
    session.close()
    del sys.modules["naughty_env"], gym.registry["test/Naughty-v0"]


def asked(session: Session, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer to a message as OpenEnv's client writes it."""
    answer = session.answer(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}).encode())
    assert answer is not None
    said: dict[str, Any] = json.loads(answer)
    assert said["type"] in ("observation", "state", "error")
    return said


class TestSession:
    def test_an_episode_as_openenvs_generic_client_plays_it(self, naughty: Session) -> None:
        """The messages are those that `GenericEnvClient` of openenv 0.10.0 sent to a host."""
        first = asked(naughty, "reset", {"seed": 3})["data"]
        assert (first["reward"], first["done"]) == (None, False)
        (prompt,) = first["observation"]["messages"]
        assert first["observation"]["text"] == prompt["content"]
        assert first["observation"]["tools"] == []
        step = asked(naughty, "step", {"message": "greet"})["data"]
        assert (step["observation"]["text"], step["reward"], step["done"]) == ("hello", 0.0, False)
        answer = prompt["content"].removeprefix("Say ").rstrip(".")
        last = asked(naughty, "step", {"message": {"role": "assistant", "content": answer}})["data"]
        assert (last["observation"]["messages"], last["reward"], last["done"]) == ([], 1.0, True)
        metadata = last["metadata"]
        assert (metadata["terminated"], metadata["truncated"], metadata["stop_reason"]) == (True, False, "answer")
        assert metadata["reward"] == {"value": 1.0, "components": {"said": 1.0}, "note": "a note"}
        state = asked(naughty, "state")["data"]
        assert (state["step_count"], state["palestra"]["tasks"]) == (2, 5)
        assert naughty.answer(b'{"type": "close"}') is None

    def test_equal_seeds_are_equal_episodes_and_a_task_can_be_chosen(self, naughty: Session) -> None:
        assert asked(naughty, "reset", {"seed": 5})["data"] == asked(naughty, "reset", {"seed": 5})["data"]
        assert asked(naughty, "reset", {"task": 4})["data"]["metadata"]["task_id"] == "naughty/4"
        own = {"prompt": "Mine?", "answer": "yes", "id": "mine", "meta": {}}
        assert asked(naughty, "reset", {"task": own, "episode_id": "e1"})["data"]["observation"]["text"] == "Mine?"
        assert asked(naughty, "state")["data"]["episode_id"] == "e1"
        assert asked(naughty, "step", {"role": "assistant", "content": "yes"})["data"]["reward"] == 1.0

    @pytest.mark.parametrize(
        ("raw", "code", "status"),
        [
            (b"{", "INVALID_JSON", 400),
            (b"[" * 100_000, "INVALID_JSON", 400),
            (b"[]", "VALIDATION_ERROR", 422),
            (b'{"type": 1}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": []}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": {"seeds": 1}}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": {"task": 5}}', "VALIDATION_ERROR", 422),
            (b'{"type": "reset", "data": {"task": {"prompt": 1}}}', "VALIDATION_ERROR", 422),
            (b'{"type": "step", "data": {"text": "x"}}', "VALIDATION_ERROR", 422),
            (b'{"type": "step", "data": {"message": {"role": "user", "content": "x"}}}', "VALIDATION_ERROR", 422),
            (b'{"type": "step", "data": {"message": {"content": 5}}}', "VALIDATION_ERROR", 422),
            (b'{"type": "step", "data": {"message": "x"}}', "SESSION_ERROR", 409),
            (b'{"type": "finish", "data": {"reason": "bored"}}', "VALIDATION_ERROR", 422),
            (b'{"type": "finish", "data": {}}', "SESSION_ERROR", 409),
            (b'{"type": "grade", "data": {"transcript": "x"}}', "VALIDATION_ERROR", 422),
            (b'{"type": "mcp", "data": {}}', "UNKNOWN_TYPE", 422),
        ],
    )
    def test_refusals_have_openenvs_codes(self, naughty: Session, raw: bytes, code: str, status: int) -> None:
        answer = naughty.answer(raw)
        assert answer is not None
        said = json.loads(answer)
        assert said["type"] == "error"
        assert (said["data"]["code"], said["data"]["status"]) == (code, status)
        assert said["data"]["message"]

    def test_a_fault_is_an_error_that_ends_the_episode_and_not_the_session(self, naughty: Session) -> None:
        asked(naughty, "reset")
        said = asked(naughty, "step", {"message": "fault"})["data"]
        assert (said["code"], said["status"]) == ("EXECUTION_ERROR", 500)
        assert "a fault" in said["message"]
        assert asked(naughty, "step", {"message": "on"})["data"]["status"] == 409
        assert asked(naughty, "reset")["type"] == "observation"

    @pytest.mark.parametrize("said", ["nan", "ungraded"])
    def test_an_unknown_reward_is_null_and_never_0(self, naughty: Session, said: str) -> None:
        asked(naughty, "reset")
        data = asked(naughty, "step", {"message": said})["data"]
        assert (data["reward"], data["done"], data["metadata"]["reward"]["value"]) == (None, True, None)

    def test_a_limit_of_the_clients_is_scored_and_so_is_an_agent_that_played_by_itself(self, naughty: Session) -> None:
        asked(naughty, "reset", {"task": 2})
        data = asked(naughty, "finish", {"reason": "deadline"})["data"]
        assert (data["metadata"]["truncated"], data["metadata"]["stop_reason"], data["reward"]) == (
            True,
            "deadline",
            0.0,
        )
        asked(naughty, "reset", {"task": 2})
        data = asked(naughty, "grade", {"transcript": [{"role": "assistant", "content": "2"}]})["data"]
        assert (data["metadata"]["terminated"], data["reward"]) == (True, 1.0)

    def test_half_a_surrogate_pair_goes_in_and_comes_out(self, naughty: Session) -> None:
        asked(naughty, "reset")
        asked(naughty, "step", {"message": "greet \ud800"})
        assert "\ud800" in json.loads(wire.write_json({"text": "\ud800"}))["text"]

    def test_only_message_environments_are_served(self) -> None:
        with pytest.raises(TypeError, match="MessageEnv"):
            Session(gym.make("CartPole-v1"), Served("CartPole-v1"))


class TestSmall:
    def test_what_is_not_finite_is_null(self) -> None:
        env = MessageEnv(tasks=[Task("q", id="t")])
        info = env.reset()[1]["step"]
        assert wire.observation((), math.nan, (True, False), info)["data"]["reward"] is None

    def test_who_may_come_in(self) -> None:
        Guard(None).check({})
        Guard("s").check({b"authorization": b"Bearer s", b"origin": b"http://here:1", b"host": b"here:1"})
        for headers, status in (
            ({}, 401),
            ({b"authorization": b"Bearer t"}, 401),
            ({b"authorization": b"Bearer s", b"origin": b"http://there", b"host": b"here:1"}, 403),
        ):
            with pytest.raises(EnvRefusal) as refused:
                Guard("s").check(headers)
            assert refused.value.status == status

    def test_a_listener_that_others_reach_needs_a_token(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["palestra/Calculator-v0", "--host", "0.0.0.0"]) == 2
        (tmp_path / "empty").write_text(" \n")
        assert main(["palestra/Calculator-v0", "--token-file", str(tmp_path / "empty")]) == 2
        said = capsys.readouterr().err
        assert "--token-file" in said
        assert "no token" in said


TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHostProcess]:
    folder = tmp_path_factory.mktemp("naughty")
    env_id = write_naughty(folder)
    (folder / "token").write_text("secret\n")
    limits = (
        "--max-envs",
        "4",
        "--step-s",
        "2",
        "--memory-bytes",
        str(256 << 20),
        "--token-file",
        str(folder / "token"),
    )
    process = EnvHostProcess(env_id, "--set", "args.greeting=hallo", *limits, cwd=folder, token="secret")
    yield process
    zygote = process.zygote()
    below = children(zygote)
    assert process.down() == 0
    assert not any(alive(pid) for pid in [zygote, *below])


@pytest.mark.walk
class TestHost:
    def post(self, host: EnvHostProcess, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        return host.ask(path, body, TOKEN)

    def begun(self, host: EnvHostProcess) -> str:
        status, said, _ = self.post(host, "/reset", {"seed": 1})
        assert status == 200, said
        return str(said["session_id"])

    def step(self, host: EnvHostProcess, name: str, text: str) -> tuple[int, Any, dict[str, str]]:
        return self.post(host, "/step", {"session_id": name, "action": text})

    def test_plain_http(self, host: EnvHostProcess) -> None:
        status, said, _ = self.post(host, "/reset", {"task": 3})
        assert (status, said["observation"]) == (200, [{"role": "user", "content": "Say 3."}])
        name = said["session_id"]
        assert self.step(host, name, "greet")[1]["observation"][0]["content"] == "hallo"
        action = {"role": "assistant", "content": "3"}
        status, said, _ = self.post(host, "/step", {"session_id": name, "action": action})
        assert (said["reward"], said["terminated"], said["truncated"]) == (1.0, True, False)
        assert said["info"]["reward"]["components"] == {"said": 1.0}
        assert self.step(host, name, "more")[0] == 409
        assert self.post(host, "/reset", {"session_id": name, "seed": 1})[1]["session_id"] == name
        assert self.step(host, name, "nan")[1]["reward"] is None
        assert self.post(host, "/close", {"session_id": name})[:2] == (200, {"closed": True})
        for path in ("/step", "/reset", "/close"):
            assert self.post(host, path, {"session_id": name, **({"action": "x"} if path == "/step" else {})})[0] == 404

    def test_refusals(self, host: EnvHostProcess) -> None:
        assert host.ask("/reset", {})[0] == 401
        assert host.ask("/reset", {}, {**TOKEN, "Origin": "http://elsewhere"})[0] == 403
        assert self.post(host, "/reset", {"sed": 1})[0] == 422
        assert self.post(host, "/reset", [])[0] == 422
        assert self.post(host, "/step", {"action": "x"})[0] == 422
        name = self.begun(host)
        assert self.post(host, "/step", {"session_id": name, "action": 5})[0] == 422
        status, said, _ = self.step(host, name, "fault")
        assert (status, said["error"]["code"]) == (500, "EXECUTION_ERROR")
        self.post(host, "/close", {"session_id": name})

    def test_what_openenvs_tools_ask(self, host: EnvHostProcess) -> None:
        assert host.ask("/health")[:2] == (200, {"status": "healthy"})
        assert host.ask("/metadata", headers=TOKEN)[1]["description"] == "Does what it is told."
        assert host.ask("/schema", headers=TOKEN)[1].keys() == {"action", "observation", "reset_observation", "state"}

    @pytest.mark.parametrize(
        ("told", "status", "why", "text"),
        [
            ("crash", 500, "crashed", "SIGSEGV"),
            ("leave", 500, "crashed", "exit status 7"),
            ("hang", 504, "deadline", "no answer within 2 s"),
            (f"eat {1 << 30}", 500, "memory", "256 MiB"),
        ],
    )
    def test_a_process_that_fails_takes_nobody_with_it(
        self, host: EnvHostProcess, told: str, status: int, why: str, text: str
    ) -> None:
        before, bystander, victim = host.ended(why), self.begun(host), self.begun(host)
        found, said, _ = self.step(host, victim, told)
        assert (found, said["error"]["code"]) == (status, "EXECUTION_ERROR")
        assert text in said["error"]["message"]
        assert self.step(host, victim, "greet")[0] == 404
        assert self.step(host, bystander, "greet")[0] == 200
        assert host.ended(why) == before + 1
        self.post(host, "/close", {"session_id": bystander})

    def test_what_an_environment_started_ends_with_it(self, host: EnvHostProcess) -> None:
        name = self.begun(host)
        pid = int(self.step(host, name, "spawn")[1]["observation"][0]["content"])
        assert alive(pid)
        self.post(host, "/close", {"session_id": name})
        wait_for(lambda: not alive(pid), "the end of what it started", 10)

    def test_a_full_house(self, host: EnvHostProcess) -> None:
        names = [self.begun(host) for _ in range(4)]
        status, said, headers = self.post(host, "/reset", {})
        assert (status, said["error"]["code"]) == (503, "CAPACITY_REACHED")
        assert int(headers["retry-after"]) > 0

        async def over_websocket() -> list[Any]:
            async with aiohttp.ClientSession(headers=TOKEN) as http, http.ws_connect(f"{host.url}/ws") as socket:
                return [json.loads((await socket.receive()).data), (await socket.receive()).type]

        said, ended = asyncio.run(over_websocket())
        assert said["data"]["code"] == "CAPACITY_REACHED"
        assert ended is aiohttp.WSMsgType.CLOSE
        for name in names:
            self.post(host, "/close", {"session_id": name})
        assert host.metric("sessions") == 0
        self.post(host, "/close", {"session_id": self.begun(host)})

    async def test_websockets_are_told_why_they_end(self, host: EnvHostProcess) -> None:
        async with aiohttp.ClientSession(headers=TOKEN) as http:
            async with http.ws_connect(f"{host.url}/ws") as quiet, http.ws_connect(f"{host.url}/ws") as loud:
                for socket in (quiet, loud):
                    await socket.send_json({"type": "reset", "data": {}})
                    assert (await socket.receive_json(timeout=30))["type"] == "observation"
                await loud.send_json({"type": "step", "data": {"message": "crash"}})
                said = await loud.receive_json(timeout=30)
                assert (said["type"], said["data"]["code"]) == ("error", "EXECUTION_ERROR")
                assert "SIGSEGV" in said["data"]["message"]
                assert (await loud.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE
                await quiet.send_json({"type": "step", "data": {"message": "greet"}})
                assert (await quiet.receive_json(timeout=30))["data"]["observation"]["text"] == "hallo"
                await quiet.send_json({"type": "close"})
                assert (await quiet.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE
            await until(lambda: host.metric("sessions") == 0, "both ended")
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(f"{host.url}/elsewhere")
            assert refused.value.status == 404

    def test_another_zygote_comes_after_one_that_died(self, host: EnvHostProcess) -> None:
        name = self.begun(host)
        before = host.zygote()
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: self.step(host, name, "greet")[0] in (404, 500), "the session's end", 20)
        self.post(host, "/close", {"session_id": self.begun(host)})
        assert host.zygote() != before


@pytest.mark.walk
def test_sessions_that_are_idle_end_and_a_killed_host_leaves_nothing(tmp_path: Path) -> None:
    """This environment starts a thread when it is made, so that its processes are forked from one that never made it."""
    process = EnvHostProcess(write_naughty(tmp_path), "--set", "args.threads=true", "--idle-s", "1", cwd=tmp_path)
    try:
        _, said, _ = process.ask("/reset", {})
        wait_for(lambda: process.ended("idle") == 1, "the end of an idle session", 20)
        body = {"session_id": said["session_id"], "action": "greet"}
        assert process.ask("/step", body)[0] == 404
        body["session_id"] = process.ask("/reset", {})[1]["session_id"]
        below = [
            int(process.ask("/step", {**body, "action": told})[1]["observation"][0]["content"])
            for told in ("pid", "spawn")
        ]
        below.append(process.zygote())
        assert all(alive(pid) for pid in below)
        process.down(signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in below), "the end of all processes", 20)
    finally:
        process.down(signal.SIGKILL)


@pytest.mark.walk
def test_an_environment_that_cannot_be_made_is_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([write_naughty(tmp_path), "--set", "args.broken=true"]) == 2
    assert "it is not made" in capfd.readouterr().err
