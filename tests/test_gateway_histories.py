"""Generated conversations through the whole service: edits, retries, sub-agents, tools, compaction, several sessions at once, over HTTP.

Agents do as agents do, at random; the engine is a fake that keeps what it was really sent, cuts replies by aborts, and fails at times.
Afterwards the store must agree with both sides, id for id.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.gateway import calls
from palestra.server.renderer.types import Renderer
from palestra.server.rows import trajectory_rows
from palestra.server.types import TokenSource, Trajectory, Turn
from tests.fakes.engine import Heard, Stage, service_on_fake
from tests.live import TOKEN, wait_for

pytestmark = [pytest.mark.walk, pytest.mark.timeout(600)]
counted = pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.full)])
groups = itertools.count()
LEAVE = "@@@"
"""In the message of a caller that will be gone before its reply: the engine stands still until somebody ends the request."""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("look", "take")
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    limits = {"max_turns": 10_000, "max_context": 100_000, "max_response": 60, "staleness": 1000}
    with service_on_fake(tmp_path_factory.mktemp("histories"), drop_zero_variance=False, **limits) as stage:
        stage.engine.speak = Mouth(stage.live.service.renderer)
        stage.engine.seams, stage.engine.faults = 0.25, 0.02
        leaves = stage.live.service.renderer.codec.encode_text(LEAVE)
        stage.engine.stuck = lambda heard: (
            leaves in [heard.prompt[at : at + len(leaves)] for at in range(len(heard.prompt))]
        )
        yield stage


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.02)


class Mouth:
    """How the model talks: words, calls (several, broken, cut), reasoning, nothing, and words of its own prompt."""

    def __init__(self, renderer: Renderer) -> None:
        self.codec, self.end = renderer.codec, renderer.stop_ids[0]

    def __call__(self, draw: random.Random, heard: Heard) -> list[int]:
        special, text = self.codec.special_id, self.codec.encode_text
        ids: list[int] = []
        before = self.codec.decode(heard.prompt[-6:])
        for stop in heard.params.get("stop") or ():  # an abort cut it in two: the rest of it, and more
            for at in range(1, len(stop)):
                if before.endswith(stop[:at]):
                    return [*text(f"{stop[at:]} and past it"), self.end]
        if draw.random() < 0.2:
            ids += [special("<think>"), *text("\nhm\n"), special("</think>"), *text("\n\n")]
        match draw.randrange(6):
            case 0:
                ids += text("It is 4242.")
            case 1 | 2:
                for _ in range(draw.randrange(1, 4)):
                    body = draw.choice(['{"name": "look", "arguments": {"x": 1}}', '{"name": "take"', "nonsense"])
                    ids += [special("<tool_call>"), *text(f"\n{body}\n"), special("</tool_call>"), *text("\n")]
            case 3:
                ids += heard.prompt[-draw.randrange(1, 20) :]
            case 4:
                ids += [draw.randrange(self.codec.vocab_size) for _ in range(draw.randrange(12))]
        return [*ids, self.end] if draw.random() < 0.8 else [*ids, *text(" and so on and so forth") * 6]


class Agent:
    """One thread of talk in a session. What it sends is chosen by `draw`; it only knows what it was answered."""

    def __init__(self, session: Talk, system: str) -> None:
        self.session = session
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{system} {session.secret}"}]
        self.tools = TOOLS if session.draw.random() < 0.5 else []

    def step(self) -> None:
        """One call, or one that fails, and how the agent goes on."""
        draw = self.session.draw
        if draw.random() < 0.1:
            self.session.leave([*self.messages, {"role": "user", "content": f"{self.session.secret} {LEAVE}"}])
            return
        self._change(draw)
        self.messages += self._next(draw)
        body: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            body["tools"] = self.tools
        if (n := draw.choice((1, 1, 1, 2, 3))) > 1:
            body["n"] = n
        if draw.random() < 0.4:
            body["stop"] = draw.choice((["4242"], ["so on", "242"]))
        if draw.random() < 0.4:
            body["stream"] = True
        said = self.session.call(body)
        if said is None:
            self.messages.pop()
            return
        self.messages.append(_echo(draw, draw.choice(said)))

    def _next(self, draw: random.Random) -> list[dict[str, Any]]:
        """What comes after the last message: results of its calls, or a user."""
        calls = self.messages[-1].get("tool_calls") or []
        results: list[dict[str, Any]] = [
            {
                "role": "tool",
                "tool_call_id": call.get("id"),
                "content": f"result {draw.randrange(9)} {self.session.secret}",
            }
            for call in calls
        ]
        if not results or draw.random() < 0.2:
            results.append({"role": "user", "content": f"{draw.choice(('go on', 'why?', ''))} {self.session.secret}"})
        return results

    def _change(self, draw: random.Random) -> None:
        """What agents do to their own history."""
        replies = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not replies:
            return
        if (what := draw.random()) < 0.1:  # back to an earlier reply: another branch
            del self.messages[draw.choice(replies) + 1 :]
        elif what < 0.2:  # compaction
            self.messages[1:] = [{"role": "user", "content": f"so far: nothing {self.session.secret}"}]
        elif what < 0.3:  # an edit
            at = draw.choice(replies)
            self.messages[at] = {"role": "assistant", "content": f"edited {draw.random()} {self.session.secret}"}
            del self.messages[at + 1 :]


def _echo(draw: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """A reply as agents keep it: whole, trimmed, without its reasoning, with other white space in its arguments."""
    kept = {name: value for name, value in message.items() if value is not None}
    if draw.random() < 0.3 and isinstance(kept.get("content"), str):
        kept["content"] = kept["content"].strip()
    if draw.random() < 0.5:
        kept.pop("reasoning_content", None)
    for call in kept.get("tool_calls") or ():
        try:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        except ValueError:
            continue  # broken ones stay as they came
    return kept


class Talk:
    """A session, its agents, and what its caller knows of it."""

    def __init__(self, stage: Stage, rollout: str, group: str, size: int, seed: int) -> None:
        self.stage, self.rollout, self.draw = stage, rollout, random.Random(seed)
        self.secret = f"zq{rollout}xj"
        self.key = stage.open(rollout, group_id=group, group_size=size)
        self.acknowledged: set[tuple[str, int]] = set()
        """(reply id, choice)"""
        self.left = 0
        self.agents = [Agent(self, "main"), *(Agent(self, f"helper {n}") for n in range(self.draw.randrange(3)))]
        self.http = httpx.Client(base_url=stage.live.url, timeout=60)

    def play(self, steps: int) -> None:
        """So many calls, of one agent or another."""
        with self.http:
            for _ in range(steps):
                self.draw.choice(self.agents).step()

    def call(self, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The choices' messages; None where the call failed. Now and then the same request is sent again, or under a request id."""
        headers = {"Authorization": f"Bearer {self.key}"}
        name = {"x-request-id": f"{self.rollout}-{self.draw.random()}"} if self.draw.random() < 0.3 else {}
        answer = self.http.post("/v1/chat/completions", json=body, headers={**headers, **name})
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "engine_unavailable"
            return None
        said = self._read(answer)
        if self.draw.random() < 0.2:
            again = self._read(self.http.post("/v1/chat/completions", json=body, headers={**headers, **name}))
            assert not name or again == said, "the same request id is the same call"
            said = again
        return said

    def leave(self, messages: list[dict[str, Any]]) -> None:
        """A call whose caller goes while the model works."""
        host, port = self.stage.live.url.removeprefix("http://").split(":")
        raw = json.dumps({"messages": messages}).encode()
        asked = len(self.stage.engine.heard)
        decode = self.stage.live.service.renderer.codec.decode
        with socket.create_connection((host, int(port))) as line:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
            line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            mine = f"{self.secret} {LEAVE}"
            wait_for(
                lambda: any(mine in decode(h.prompt) for h in self.stage.engine.heard[asked:]), "the engine's turn"
            )
        self.left += 1
        wait_for(lambda: self.undelivered() == self.left, "the record of what nobody got")

    def undelivered(self) -> int:
        return sum(not turn.delivered and bool(turn.messages) for turn in self.stage.turns(self.rollout))

    def _read(self, answer: httpx.Response) -> list[dict[str, Any]]:
        assert answer.status_code == 200, answer.text
        if "event-stream" not in answer.headers["content-type"]:
            whole = answer.json()
            self.acknowledged |= {(whole["id"], choice["index"]) for choice in whole["choices"]}
            return [choice["message"] for choice in whole["choices"]]
        return self._join(answer.text)

    def _join(self, text: str) -> list[dict[str, Any]]:
        """A stream's deltas put together."""
        *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        assert done == "[DONE]"
        joined: dict[int, dict[str, Any]] = {}
        for event in map(json.loads, events):
            for choice in event["choices"]:
                self.acknowledged.add((event["id"], choice["index"]))
                message = joined.setdefault(choice["index"], {"role": "assistant", "content": ""})
                delta = choice["delta"]
                for key in ("content", "reasoning_content"):
                    if delta.get(key):
                        message[key] = message.get(key, "") + delta[key]
                for part in delta.get("tool_calls") or ():
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                    for key in ("name", "arguments"):
                        calls[part["index"]]["function"][key] += part["function"].get(key) or ""
        return [joined[index] for index in sorted(joined)]


# What must hold.

seen_kinds: Counter[str] = Counter()
"""How often each kind of thing happened, over all examples."""


def prompts_of(turns: Sequence[Turn]) -> dict[int, list[int]]:
    """Each turn's prompt as the store has it: what its parent saw and said, and its own delta."""
    by_index = {turn.index: turn for turn in turns}
    prompts: dict[int, list[int]] = {}
    for turn in turns:
        before: list[int] = []
        if turn.parent is not None:
            before = [*prompts[turn.parent], *by_index[turn.parent].completion_ids.tolist()]
        prompts[turn.index] = [*before, *turn.prompt_delta.tolist()]
    return prompts


def completions_of(heard: Sequence[Heard]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, ids) of every completion that the engine gave whole, its parts joined; each part must begin where the last ended."""
    parts: dict[str, list[Heard]] = defaultdict(list)
    for one in heard:
        parts[one.rid[:-4]].append(one)
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for requests in parts.values():
        first, ids = requests[0].prompt, list[int]()
        for one in requests:
            assert one.prompt == [*first, *ids]
            ids += one.ids
        found[tuple(first), tuple(ids)] += 1
    return found


def check_store(stage: Stage, talk: Talk, others: Sequence[Talk], heard: Sequence[Heard]) -> Trajectory:
    trajectory = stage.live.service.log.reader.read_trajectory(talk.rollout)
    turns, codec = trajectory.turns, stage.live.service.renderer.codec
    assert [turn.index for turn in turns] == list(range(len(turns)))
    prompts = prompts_of(turns)
    tails = [turn for turn in turns if not turn.messages]
    stored = Counter((tuple(prompts[t.index]), tuple(t.completion_ids.tolist())) for t in turns if t.messages)
    for tail in tails:  # tokens past a stop text: the engine gave them with those before as one completion
        head = next(t for t in turns if t.index == tail.index - 1)
        cut = tuple(head.completion_ids.tolist())
        assert prompts[tail.index] == [*prompts[head.index], *cut]
        stored[tuple(prompts[head.index]), cut] -= 1
        stored[tuple(prompts[head.index]), (*cut, *tail.completion_ids.tolist())] += 1
    assert +stored == completions_of(heard), "the store and the engine disagree"
    assert len(turns) == len(talk.acknowledged) + talk.left + len(tails)
    assert sum(turn.delivered for turn in turns) == len(talk.acknowledged)
    assert not any(tail.delivered for tail in tails)
    seen_kinds.update(
        turns=len(turns),
        forks=sum(turn.fork_reason is not None for turn in turns),
        continued=sum(turn.parent is not None for turn in turns),
        siblings=sum(n - 1 for n in Counter(turn.parent for turn in turns if turn.parent is not None).values()),
        calls=sum(bool(turn.messages) and bool(turn.messages[-1].get("tool_calls")) for turn in turns),
        closed=sum(turn.close_tokens > 0 for turn in turns),
        left=talk.left,
        tails=len(tails),
        seams=sum(one.reason == "abort" for one in heard),
    )
    for turn in turns:
        seen = codec.decode([*prompts[turn.index], *turn.completion_ids.tolist()]) + json.dumps(list(turn.messages))
        assert not any(other.secret in seen for other in others)
        assert talk.secret in seen
    return trajectory


def check_rows(trajectory: Trajectory) -> int:
    """Every sampled token that its caller got is trained in exactly one row; returns how many there are."""
    delivered = sum(len(turn.completion_ids) for turn in trajectory.turns if turn.delivered)
    rows = trajectory_rows(trajectory)
    assert sum(int(row.loss_mask.sum()) for row in rows) == delivered
    leaves = {turn.index for turn in trajectory.turns if turn.delivered} - {
        turn.parent for turn in trajectory.turns if turn.delivered
    }
    assert len(rows) == len(leaves)
    for row in rows:
        assert not row.loss_mask[row.sources != TokenSource.SAMPLED].any()
    return delivered


@counted
def test_the_store_agrees_with_the_engine_and_with_every_caller(stage: Stage, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4), steps=st.integers(1, 12))
    def check(seeds: list[int], steps: int) -> None:
        stage.engine.heard.clear()
        group = f"talk-{next(groups)}"
        talks = [Talk(stage, f"{group}.{i}", group, len(seeds), seed) for i, seed in enumerate(seeds)]
        with ThreadPoolExecutor(len(talks)) as pool:
            list(pool.map(lambda talk: talk.play(steps), talks))
        before, delivered = stage.admin("GET", "/admin/ledger"), 0
        for talk in talks:
            others = [other for other in talks if other is not talk]
            heard = [h for h in stage.engine.heard if talk.secret in stage.live.service.renderer.codec.decode(h.prompt)]
            check_store(stage, talk, others, _whole(heard))
            outcome = {"outcome": {"reward": 1.0}}
            stage.admin("POST", f"/v1/sessions/{talk.rollout}/close", outcome)
            delivered += check_rows(stage.live.service.log.reader.read_trajectory(talk.rollout))
        _train(stage, group, delivered, before)

    check()
    assert all(seen_kinds.values()), f"something never happened: {seen_kinds}"


def _whole(heard: Sequence[Heard]) -> list[Heard]:
    """Without the requests that failed: nothing of those was given to anybody."""
    return [one for one in heard if one.reason != "failed"]


def _train(stage: Stage, group: str, delivered: int, before: dict[str, Any]) -> None:
    """Claims and commits the group: the ledger's trained tokens grow by what was delivered."""
    assert before["balanced"]
    if delivered:
        body = {"n": 1, "owner": "me", "ttl_s": 60.0, "wait_s": 20.0}
        answer = stage.http.post("/admin/claim", json=body, headers={"x-api-key": TOKEN})
        assert group.encode() in answer.content
        commit = {"step": 1, "checkpoint_id": "c", "group_ids": [group], "owner": "me"}
        assert stage.admin("POST", "/admin/commit", commit)["count"] == 1
    after = stage.admin("GET", "/admin/ledger")
    assert after["balanced"]
    assert after["trained"] - before["trained"] == delivered
