"""The load generator: agents that talk to one gateway as the official client does, over connections that they keep.

In: a `Job`: which gateway, how many sessions at a time, how many turns. Out: a `Result`: CPU time of the gateway's process for these
calls, latencies, what went wrong. Every reply is checked. Sessions are opened before the clock starts and closed after it has stopped. It
waits for every answer, at most ANSWER_S.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from benchmarks.gateway_http import Broken, Connection
from benchmarks.gateway_procs import cpu_s, rss_kb
from benchmarks.gateway_texts import FIRST, GROWTH, REPLY, Texts

ANSWER_S = 100.0
SHARED = 8
"""Sessions that begin with the same prompt."""
AT_ONCE = 32
"""Sessions that are opened or closed at a time."""
HEADERS = (
    b"accept: application/json\r\naccept-encoding: gzip, deflate\r\nuser-agent: OpenAI/Python 3.50.0\r\n"
    b"x-stainless-lang: python\r\nx-stainless-package-version: 3.50.0\r\nx-stainless-os: Linux\r\nx-stainless-arch: x64\r\n"
    b"x-stainless-runtime: CPython\r\nx-stainless-runtime-version: 3.11.7\r\nx-stainless-async: false\r\n"
    b"x-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\ncontent-type: application/json\r\n"
)
"""What the official Python client sends along."""


@dataclass(frozen=True, slots=True)
class Job:
    """One cell of the benchmark."""

    gateway: str
    """palestra, rllm-model-gateway or openenv."""
    url: str
    pid: int
    """Of the gateway."""
    engine: str
    """URL of the mock engine."""
    token: str
    """Admin token, for palestra."""
    tag: str
    """Begins the ids of the sessions; never used before."""
    number: int
    """The first of the first prompts; those that follow it belong to this job too."""
    sessions: int
    """At a time."""
    rounds: int = 1
    """Sessions that each agent plays, one after the other."""
    turns: int = 8
    latency_s: float = 0.05
    think_s: float = 0.0
    """An agent waits up to so long between calls."""
    spread_s: float = 0.0
    """Agents begin within so long a time."""
    in_step: bool = False
    """All sessions make turn N before one makes turn N + 1."""
    marks: tuple[tuple[int, int], ...] = ()
    """Where in step: ranges of turns (first, end) whose CPU time is wanted; the engine answers at once in the turns that are in none."""
    limit_s: float = 0.0
    """After so long no agent makes another call; 0: no such limit."""
    close: bool = True
    """The sessions are closed at the end."""
    probe: bool = False
    """The event loop's lag is wanted too (palestra)."""


@dataclass(slots=True)
class Result:
    """What came of a job."""

    calls: int = 0
    cpu_ms_per_call: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    wall_s: float = 0.0
    marks: list[float] = field(default_factory=list)
    """CPU-ms per call of the ranges of turns."""
    open_close_ms: float = 0.0
    """CPU of opening and closing a session."""
    kb_per_session: float = 0.0
    """Growth of the resident set from before the opening to after the last reply."""
    lag: dict[str, Any] = field(default_factory=dict)
    errors: int = 0
    said: list[str] = field(default_factory=list)
    """The first few errors."""


class Agent:
    """One connection, and the conversation of the session that it plays."""

    def __init__(self, job: Job, texts: Texts, result: Result, latencies: list[float]) -> None:
        self.job, self.texts, self.result, self.latencies = job, texts, result, latencies
        self._http: Connection | None = None
        self._path = self._headers = b""
        self._messages = bytearray()
        self._turn = self._offset = 0

    async def begin(self, opened: tuple[bytes, bytes], number: int) -> None:
        """Takes a session over: its path and the header with its key."""
        if self._http is None:
            self._http = await Connection.to(self.job.url)
        self._path, self._headers = opened[0], opened[1] + HEADERS
        system, user = self.texts.first(self.job.number + number // SHARED)
        first = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        self._messages = bytearray(orjson.dumps(first)[1:-1])
        self._turn, self._offset = 0, number * 37

    async def turn(self) -> bool:
        """One call; False where it failed, and the session is lost."""
        assert self._http is not None
        body = b'{"messages":[%s],"model":"bench","max_completion_tokens":%d}' % (self._messages, REPLY)
        began = time.perf_counter()
        try:
            status, raw = await self._http.request(b"POST", self._path, self._headers, body, ANSWER_S)
        except (Broken, TimeoutError) as error:
            return self._failed(f"{type(error).__name__}: {error}")
        self.latencies.append(time.perf_counter() - began)
        if status != 200:
            return self._failed(f"HTTP {status}: {raw[:300].decode(errors='replace')}")
        return self._read(orjson.loads(raw))

    def _read(self, reply: dict[str, Any]) -> bool:
        usage, said = reply["usage"], reply["choices"][0]["message"]["content"]
        wanted = FIRST + GROWTH * self._turn, REPLY
        if (usage["prompt_tokens"], usage["completion_tokens"]) != wanted:
            return self._failed(f"turn {self._turn}: usage is {usage}, not {wanted}")
        if said not in self.texts.replies:
            return self._failed(f"turn {self._turn}: the reply is not the engine's: {said[:100]!r}")
        self._turn += 1
        user = self.texts.users[(self._offset + self._turn) % len(self.texts.users)]
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": user}]
        self._messages += b"," + orjson.dumps(more)[1:-1]
        return True

    def _failed(self, what: str) -> bool:
        self.result.errors += 1
        if len(self.result.said) < 5:
            self.result.said.append(what)
        return False

    def end(self) -> None:
        """Closes the connection."""
        if self._http is not None:
            self._http.close()


class Desk:
    """Opens and closes sessions, as each gateway wants it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def open_all(self, count: int) -> list[tuple[bytes, bytes]]:
        """Path and key header of `count` sessions."""
        opened: list[tuple[bytes, bytes]] = [(b"", b"")] * count

        async def some(connection: Connection, first: int) -> None:
            for number in range(first, count, AT_ONCE):
                opened[number] = await self._open(connection, number)

        await self._together(some)
        return opened

    async def close_all(self, count: int) -> None:
        """Ends palestra's sessions; the peers keep theirs, their records are read from them."""
        if self.job.gateway != "palestra":
            return

        async def some(connection: Connection, first: int) -> None:
            for number in range(first, count, AT_ONCE):
                await self._post(connection, f"/v1/sessions/{self.job.tag}-{number}/close", {})

        await self._together(some)

    async def _together(self, some: Any) -> None:
        connections = [await Connection.to(self.job.url) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*(some(connection, first) for first, connection in enumerate(connections)))
        finally:
            for connection in connections:
                connection.close()

    async def _open(self, connection: Connection, number: int) -> tuple[bytes, bytes]:
        name = f"{self.job.tag}-{number}"
        if self.job.gateway == "palestra":
            said = await self._post(connection, "/v1/sessions", {"rollout_id": name})
            return b"/v1/chat/completions", f"authorization: Bearer {said['api_key']}\r\n".encode()
        if self.job.gateway == "openenv":
            said = await self._post(connection, "/sessions", {"max_model_calls": 0})
            return b"/v1/chat/completions", f"authorization: Bearer {said['session_id']}\r\n".encode()
        await self._post(connection, "/sessions", {"session_id": name})
        return f"/sessions/{name}/v1/chat/completions".encode(), b"authorization: Bearer none\r\n"

    async def _post(self, connection: Connection, path: str, body: Any) -> dict[str, Any]:
        headers = b"authorization: Bearer %s\r\ncontent-type: application/json\r\n" % self.job.token.encode()
        status, raw = await connection.request(b"POST", path.encode(), headers, orjson.dumps(body), ANSWER_S)
        if status != 200:
            raise Broken(f"{self.job.gateway} POST {path}: HTTP {status}: {raw[:300].decode(errors='replace')}")
        return dict(orjson.loads(raw))


async def run(job: Job, texts: Texts) -> Result:
    """Does a job.

    Raises:
        Broken: a session could not be opened or closed.
    """
    result, latencies, desk = Result(), list[float](), Desk(job)
    count = job.sessions * job.rounds
    rss, cpu = rss_kb(job.pid), cpu_s(job.pid)
    opened = await desk.open_all(count)
    opening = cpu_s(job.pid) - cpu
    await _ask(job.engine, b"POST", b"/bench", {"latency_s": job.latency_s})
    agents = [Agent(job, texts, result, latencies) for _ in range(job.sessions)]
    if job.probe:
        await _ask(job.url, b"POST", b"/bench/lag", {})
    cpu, began = cpu_s(job.pid), time.perf_counter()
    if job.in_step:
        await _in_step(job, agents, opened, result)
    else:
        until = began + (job.limit_s or math.inf)
        await asyncio.gather(*(_play(job, agent, at, opened, until) for at, agent in enumerate(agents)))
    result.wall_s, cpu = time.perf_counter() - began, cpu_s(job.pid) - cpu
    if job.probe:
        result.lag = await _ask(job.url, b"GET", b"/bench/lag", None)
    result.kb_per_session = (rss_kb(job.pid) - rss) / count
    for agent in agents:
        agent.end()
    latencies.sort()
    result.calls = len(latencies)
    if latencies:
        result.cpu_ms_per_call = 1e3 * cpu / len(latencies)
        result.p50_ms = 1e3 * latencies[len(latencies) // 2]
        result.p99_ms = 1e3 * latencies[int(len(latencies) * 0.99)]
    cpu = cpu_s(job.pid)
    if job.close:
        await desk.close_all(count)
    result.open_close_ms = 1e3 * (opening + cpu_s(job.pid) - cpu) / count
    return result


async def _play(job: Job, agent: Agent, at: int, opened: list[tuple[bytes, bytes]], until: float) -> None:
    dice = random.Random(at)
    if job.spread_s:
        await asyncio.sleep(dice.random() * job.spread_s)
    for lap in range(job.rounds):
        number = at + lap * job.sessions
        await agent.begin(opened[number], number)
        for turn in range(job.turns):
            if turn and job.think_s:
                await asyncio.sleep(dice.random() * job.think_s)
            if time.perf_counter() > until or not await agent.turn():
                return


async def _in_step(job: Job, agents: list[Agent], opened: list[tuple[bytes, bytes]], result: Result) -> None:
    for at, agent in enumerate(agents):
        await agent.begin(opened[at], at)
    edges = sorted({edge for mark in job.marks for edge in mark})
    spent: dict[int, float] = {}
    for turn in range(job.turns + 1):
        if turn in edges:
            spent[turn] = cpu_s(job.pid)
            marked = any(first <= turn < end for first, end in job.marks)
            await _ask(job.engine, b"POST", b"/bench", {"latency_s": job.latency_s if marked else 0.0})
        if turn < job.turns and not all(await asyncio.gather(*(agent.turn() for agent in agents))):
            return
    for first, end in job.marks:
        result.marks.append(1e3 * (spent[end] - spent[first]) / (end - first) / job.sessions)


async def _ask(url: str, method: bytes, path: bytes, body: Any) -> dict[str, Any]:
    """One call to a process of the benchmark's own."""
    connection = await Connection.to(url)
    try:
        raw = b"" if body is None else orjson.dumps(body)
        _, said = await connection.request(method, path, b"content-type: application/json\r\n", raw, ANSWER_S)
        return dict(orjson.loads(said))
    finally:
        connection.close()


def main(job: Job, texts: Texts) -> str:
    """Runs `job` on a loop of its own; the result as JSON."""
    import uvloop

    return orjson.dumps(asdict(uvloop.run(run(job, texts)))).decode()
