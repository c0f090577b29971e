"""Environment hosts for tests: `palestra env serve`'s process, and an environment that does whatever a reply tells it to."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web

T = TypeVar("T")

START_S = 90.0

NAUGHTY = '''
import os, signal, subprocess, threading
from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import register
from palestra.envs.types import Reward, StopReason, Task

@register("test/Naughty-v0")
class Naughty(MessageEnv):
    """Does what it is told."""

    tasks = tuple(Task(f"Say {index}.", str(index), f"naughty/{index}") for index in range(5))

    def __init__(self, greeting="hello", broken=False, threads=False, **kwargs):
        super().__init__(**kwargs)
        self.greeting = greeting
        if broken:
            raise RuntimeError("it is not made")
        if threads:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    def respond(self, action):
        word, _, more = str(action.get("content")).partition(" ")
        if word == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if word == "leave":
            os._exit(7)
        if word == "hang":
            threading.Event().wait()
        if word == "eat":
            self.eaten = bytearray(int(more))
        if word == "fault":
            raise RuntimeError("a fault")
        if word == "spawn":
            return self._say(str(subprocess.Popen(["sleep", "1000"]).pid))
        if word == "nan":
            return Response(stop=StopReason.ANSWER, reward=float("nan"))
        if word == "pid":
            return self._say(str(os.getpid()))
        if word == "greet":
            return self._say(self.greeting)
        return Response(stop=StopReason.ANSWER)

    def score(self, task, transcript):
        if transcript and transcript[-1].get("content") == "ungraded":
            raise RuntimeError("the grader broke")
        return Reward(float(bool(transcript) and transcript[-1].get("content") == task.answer), {"said": 1.0}, "a note")

    def _say(self, text):
        return Response([{"role": "user", "content": text}])
'''


def write_naughty(folder: Path) -> str:
    """Writes the environment's module there; its id."""
    (folder / "naughty_env.py").write_text(NAUGHTY)
    return "naughty_env:test/Naughty-v0"


class EnvHostProcess:
    """A host on a free port of loopback."""

    def __init__(self, env_id: str, *options: str, cwd: Path | None = None, token: str = "") -> None:
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        command = [sys.executable, "-m", "palestra.server.env_host.main", env_id, *options]
        environ = {**os.environ, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=cwd)
        try:
            self.url = self._said("environment host")
        except BaseException:
            self.down(signal.SIGKILL)
            raise

    def _said(self, what: str) -> str:
        assert self.process.stdout is not None
        until = time.monotonic() + START_S
        while select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0))[0]:
            if not (line := self.process.stdout.readline()):
                break
            if line.startswith(what):
                return line.split()[-1]
        raise AssertionError(f"the environment host did not start: exit status {self.process.poll()}")

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of an answer; a body makes it a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, raw, said = answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                status, raw, said = error.code, error.read(), dict(error.headers)
        return status, json.loads(raw) if said.get("content-type") == "application/json" else raw.decode(), said

    def metric(self, name: str) -> float:
        """A sample of `/metrics`; 0 where there is none."""
        lines = [line.rpartition(" ") for line in self.ask("/metrics", headers=self.headers)[1].splitlines()]
        return next((float(value) for key, _, value in lines if key == f"palestra_env_{name}"), 0.0)

    def ended(self, why: str) -> float:
        """Sessions that ended for this reason."""
        return self.metric(f'ended_total{{why="{why}"}}')

    def zygote(self) -> int:
        """The process that environments are forked from."""
        (pid,) = children(self.process.pid)
        return pid

    def down(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it by this signal; its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


def children(pid: int) -> list[int]:
    """Processes that a process of ours has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is not just waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Answers(Protocol):
    """One session of a `WsServer`."""

    def answer(self, raw: bytes) -> bytes | None:
        """The answer to a message; None ends the session."""

    def close(self) -> None:
        """The client is gone."""


class WsServer:
    """A server of this process, in a thread of its own: every connection to `/ws` gets what `make` gives."""

    def __init__(self, make: Callable[[], Answers]) -> None:
        self._make, self.headers = make, list[dict[str, str]]()
        """`headers`: of each handshake."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="ws-server")
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.url = self._call(self._start())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.headers.append(dict(request.headers))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        session = self._make()
        async for message in socket:
            answer = session.answer(message.data.encode())
            if answer is None:
                break
            await socket.send_str(answer.decode())
        session.close()
        await socket.close()
        return socket

    def stop(self) -> None:
        """Ends it and all its sessions."""
        if self._runner is not None:
            self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Echo:
    """An environment of OpenEnv's kind, and the answers of its server (openenv 0.10.0) to it, as they were read from one."""

    def __init__(self) -> None:
        self.steps = 0

    def answer(self, raw: bytes) -> bytes | None:
        """As a server of OpenEnv."""
        said = json.loads(raw)
        data = said.get("data", {})
        match said["type"]:
            case "reset":
                self.steps = 0
                return self._observation(f"ready {data.get('seed')}", 0.0, False)
            case "step" if data.keys() != {"message"}:
                errors = [{"type": "missing", "loc": ["message"], "msg": "Field required"}]
                return self._error("VALIDATION_ERROR", "Invalid message", errors=errors)
            case "step":
                return self._step(str(data["message"]))
            case "state":
                return json.dumps({"type": "state", "data": {"episode_id": "e", "step_count": self.steps}}).encode()
        return None

    def _step(self, text: str) -> bytes | None:
        self.steps += 1
        match text:
            case "boom":
                return self._error("EXECUTION_ERROR", "boom")
            case "leave":
                return None
            case "nonsense":
                return b'{"type": "observation", "data": 5}'
            case "unrewarded":
                return self._observation(text, None, True)
            case "null":
                return self._observation(text, None, False)
        return self._observation(text, min(len(text) * 0.1, 1.0), text == "end")

    def _observation(self, text: str, reward: float | None, done: bool) -> bytes:
        seen = {"metadata": {"step": self.steps}, "echoed_message": text, "message_length": len(text)}
        data = {"observation": seen, "reward": reward, "done": done, "metadata": {"step": self.steps}}
        return json.dumps({"type": "observation", "data": data}).encode()

    def _error(self, code: str, message: str, **more: Any) -> bytes:
        return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}).encode()

    def close(self) -> None:
        """Nothing is held."""
