"""Rollouts of the plan that were interrupted are played again from their start: recorded replies are given again, and the rest is sampled.

The agent here asks and answers by rule, as in a deterministic environment; the engine is a fake that never says the same twice, so a reply
that is equal to an earlier one came from the record.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.gateway import calls
from palestra.server.gateway.recovered import DIVERGED, restored
from palestra.server.gateway.tree import RAW_TOOLS
from palestra.server.renderer.types import Renderer
from palestra.server.rows import trajectory_rows
from palestra.server.store.types import SessionRecord, SessionState, StoredSession
from palestra.server.types import Trajectory, Turn, VersionSpan
from tests.fakes.engine import Heard, Say, Stage, service_on_fake
from tests.live import TOKEN, LiveService, wait_for

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {}}}}}]
PLAN = {
    "groups_per_step": 5000,
    "group_size": 1,
    "last_step": 10**6,
    "staleness": 10**6,
    "drop_zero_variance": False,
    "retries": 0,
}
LIMITS = {"max_turns": 9, "max_response": 60, "max_context": 100_000}


class Mouth:
    """Words, or some calls of a tool: never twice the same."""

    def __init__(self, renderer: Renderer) -> None:
        self.codec, self.end, self.said = renderer.codec, renderer.stop_ids[0], 0

    def __call__(self, draw: random.Random, heard: Heard) -> list[int]:
        self.said += 1
        special, text = self.codec.special_id, self.codec.encode_text
        if draw.random() < 0.5:
            return [*text(f"It is {self.said}, and 4242."), self.end]
        ids: list[int] = []
        for n in range(draw.randrange(1, 4)):
            body = f'\n{{"name": "look", "arguments": {{"x": {self.said}{n}}}}}\n'
            ids += [special("<tool_call>"), *text(body), special("</tool_call>")]
        return [*ids, self.end]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with service_on_fake(tmp_path_factory.mktemp("replay"), **PLAN, **LIMITS, routed_experts=True) as stage:
        begin(stage)
        yield stage


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.02)


def begin(stage: Stage) -> None:
    """A worker is there, and the engines have the weights of step 0."""

    async def published() -> None:
        stage.live.service.plan.published(0)

    stage.engine.speak = Mouth(stage.live.service.renderer)
    stage.admin("POST", "/admin/worker", {"tasks": 100_000, "deterministic": True})
    stage.live.run(published())


class Rollout:
    """One planned rollout and its player: what was asked and answered, by the place in the episode."""

    def __init__(self, stage: Stage, work: dict[str, Any] | None = None, **body: Any) -> None:
        """`work`: what a worker was told; None: asks for it. `body`: of the session's opening."""
        self.stage, self.body = stage, body
        self.work = work or stage.admin("POST", "/admin/work", {"wait_s": 2.0})
        self.group, self.attempt = str(self.work["group_id"]), int(self.work["attempt"])
        self.name = f"{self.group}-0"
        self.key = self.open(replay=self.work["replay"])

    def open(self, **more: Any) -> str:
        """Opens its session, or opens it again."""
        body = {"group_id": self.group, "attempt": self.attempt, "index": 0, "task_id": "t", **self.body, **more}
        return self.stage.open(self.name, **body)

    def lose(self, *, process: bool = True) -> str:
        """The service dies (`process`) or the worker does; its session is opened again. Returns the key that it had."""
        before, sessions = self.key, self.stage.live.service.sessions

        async def forget() -> None:
            sessions.remove(sessions.by_id(self.name))

        if process:
            self.stage.live.run(forget())
        self.key = self.open(replay=True)
        return before

    def ask(self, messages: Sequence[Any], **body: Any) -> dict[str, Any]:
        """One reply."""
        answer = self.stage.chat(self.key, messages, tools=TOOLS, **body)
        assert answer.status_code == 200, answer.text
        return dict(read(answer)[0])

    def play(self, turns: int, say: Callable[[int], str] = str, **body: Any) -> list[dict[str, Any]]:
        """So many turns from the start. `say`: what the environment says at a turn."""
        messages: list[Any] = [{"role": "user", "content": f"go {self.group}"}]
        replies = []
        for turn in range(turns):
            reply = self.ask(messages, **body)
            replies.append(reply)
            messages += [reply, *answers(reply, say(turn))]
        return replies

    def close(self, reward: float | None = 1.0, key: str | None = None) -> dict[str, Any]:
        """Ends the session."""
        body = {"attempt": self.attempt, "outcome": {"reward": reward}, "api_key": key}
        return dict(self.stage.admin("POST", f"/v1/sessions/{self.name}/close", body))

    def trajectory(self) -> Trajectory:
        return self.stage.live.service.log.reader.read_trajectory(self.name, self.attempt)

    def sessions(self) -> list[StoredSession]:
        return list(self.stage.live.service.log.reader.read_sessions(rollout_id=self.name))

    def train(self) -> int:
        """Claims and commits the group, which is the only one that is ready: the ledger grows by what it returns."""
        before = self.stage.admin("GET", "/admin/ledger")
        claim = {"n": 1, "owner": "me", "ttl_s": 60.0, "wait_s": 20.0}
        raw = self.stage.http.post("/admin/claim", json=claim, headers={"x-api-key": TOKEN}).content
        assert self.group.encode() in raw
        commit = {"step": 1, "checkpoint_id": "c", "group_ids": [self.group], "owner": "me"}
        assert self.stage.admin("POST", "/admin/commit", commit)["count"] == 1
        after = self.stage.admin("GET", "/admin/ledger")
        assert before["balanced"]
        assert after["balanced"]
        return int(after["trained"] - before["trained"])


def answers(reply: dict[str, Any], say: str) -> list[dict[str, Any]]:
    """What the environment answers: a result per call, or a user."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{call['function']['arguments']} is {say}"}
        for call in reply.get("tool_calls") or ()
    ]
    return results or [{"role": "user", "content": f"go on {say}"}]


def read(answer: httpx.Response) -> list[dict[str, Any]]:
    """The messages of an answer, also of one that was streamed, without what is null."""
    if "event-stream" not in answer.headers["content-type"]:
        found = [dict(choice["message"]) for choice in answer.json()["choices"]]
        return [{key: value for key, value in message.items() if value is not None} for message in found]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                known = message.setdefault("tool_calls", [])
                if part["index"] == len(known):
                    known.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for key in ("name", "arguments"):
                    known[part["index"]]["function"][key] += part["function"].get(key) or ""
    return [message]


def sampled(trajectory: Trajectory) -> int:
    return sum(len(turn.completion_ids) for turn in trajectory.turns)


# What must hold at every cut.


@pytest.mark.parametrize("process", [True, False], ids=["service", "worker"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_recorded_replies_are_given_again_and_the_rest_is_sampled(stage: Stage, process: bool, stream: bool) -> None:
    rollout = Rollout(stage)
    before = rollout.play(3, stream=stream)
    asked, turns = len(stage.engine.heard), rollout.trajectory().turns
    old = rollout.lose(process=process)
    assert stage.chat(old, [{"role": "user", "content": "q"}]).status_code == 401, "the former key opens nothing"
    after = rollout.play(5, stream=stream)
    assert after[:3] == before
    assert len(stage.engine.heard) == asked + 2, "nothing is sampled twice"
    found = rollout.trajectory().turns
    assert [turn.index for turn in found] == list(range(5))
    assert [turn.parent for turn in found] == [None, 0, 1, 2, 3]
    assert [turn.completion_ids.tolist() for turn in found[:3]] == [turn.completion_ids.tolist() for turn in turns]
    assert all(turn.delivered for turn in found)
    assert rollout.close()["reward"] == 1.0
    assert rollout.train() == sampled(rollout.trajectory())
    (row,) = trajectory_rows(rollout.trajectory())
    assert row.routed_experts is not None
    assert len(row.routed_experts) == len(row.token_ids) - 1
    events = stage.live.service.log.reader.read_events(rollout.name)
    assert [event.data["turns"] for event in events if event.kind == "replay"] == [3]


def test_a_budget_counts_each_call_once_however_often_it_is_played(stage: Stage) -> None:
    rollout = Rollout(stage)
    replies = rollout.play(4)
    for _ in range(3):
        rollout.lose()
        assert rollout.play(4) == replies
    most = LIMITS["max_turns"]
    for _ in range(2):
        rollout.lose()
        replies = rollout.play(most)
        refused = stage.chat(rollout.key, [{"role": "user", "content": "one more"}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "budget_exceeded")
    assert len(rollout.trajectory().turns) == most
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory())


def test_a_turn_that_was_under_way_is_sampled_anew_and_its_tokens_are_counted(stage: Stage) -> None:
    rollout = Rollout(stage)
    before = rollout.play(1)
    stage.engine.hold()
    with ThreadPoolExecutor(1) as pool:
        lost: Future[Any] = pool.submit(rollout.play, 2)
        wait_for(lambda: stage.engine.running, "the engine's turn")
        rollout.key = rollout.open(replay=True)
        stage.engine.release()
        assert isinstance(lost.exception(20), AssertionError), "its caller was told"
    assert rollout.play(3)[:1] == before
    turns = rollout.trajectory().turns
    assert [turn.delivered for turn in turns] == [True, False, True, True]
    assert turns[1].finish_reason == "abort"
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory()) - len(turns[1].completion_ids)


def test_a_whole_reply_that_its_caller_never_got_is_given_to_whoever_asks_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 600.0)  # the reply comes to its end although nobody waits
    rollout = Rollout(stage)
    before = rollout.play(1)
    messages = [{"role": "user", "content": f"go {rollout.group}"}, before[0], *answers(before[0], "0")]
    body = json.dumps({"messages": messages, "tools": TOOLS}).encode()
    stage.engine.hold()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{stage.live.url}/v1/chat/completions",
            content=body,
            headers={"Authorization": f"Bearer {rollout.key}"},
            timeout=0.3,
        )
    session = stage.live.service.sessions.by_id(rollout.name)
    wait_for(lambda: any(not call.waiters for call in session.calls.values()), "the caller's leave")
    stage.engine.release()
    wait_for(lambda: len(rollout.trajectory().turns) == 2, "the record")
    lost = rollout.trajectory().turns[1]
    assert not lost.delivered
    rollout.lose()
    rollout.play(3)
    found = rollout.trajectory().turns
    assert len(found) == 3
    assert found[1].completion_ids.tolist() == lost.completion_ids.tolist()
    assert all(turn.delivered for turn in found)
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory())


def test_a_caller_that_loses_its_connection_while_it_is_played_again_gets_the_same_reply(stage: Stage) -> None:
    rollout = Rollout(stage)
    before = rollout.play(2)
    rollout.lose()
    first = rollout.play(1)
    session = stage.live.service.sessions.by_id(rollout.name)
    stage.live.run(stage.live.service.core.mark(session, (0,), False))  # what the endpoint does when the caller is gone
    asked = len(stage.engine.heard)
    assert rollout.play(2) == before == [*first, before[1]]
    assert len(stage.engine.heard) == asked
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory())


def test_spans_of_two_versions_make_one_row(stage: Stage) -> None:
    codec = stage.live.service.renderer.codec
    stop = stage.live.service.renderer.stop_ids[0]
    rollout = Rollout(stage)
    stage.engine.then(*(Say([*codec.encode_text(f"say {n}"), stop], version="3") for n in range(2)))
    before = rollout.play(2)
    rollout.lose()
    stage.engine.then(Say([*codec.encode_text("say more"), stop], version="4"))
    assert rollout.play(3)[:2] == before
    rollout.close()
    (row,) = trajectory_rows(rollout.trajectory())
    assert [span.version for span in row.spans] == [3, 3, 4]
    assert rollout.train() == sampled(rollout.trajectory())


def test_posted_rewards_stay(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(2)
    stage.admin("POST", f"/v1/sessions/{rollout.name}/reward", {"reward": 0.25, "turn": 1})
    rollout.lose()
    rollout.play(3)
    stage.admin("POST", f"/v1/sessions/{rollout.name}/reward", {"reward": 0.5, "turn": 2})
    assert stage.admin("POST", f"/v1/sessions/{rollout.name}/close", {})["reward"] == 0.75
    assert rollout.trajectory().turn_rewards == (None, 0.25, 0.5)
    rollout.train()


# Branches, several replies, prompts as text.


def test_branches_that_were_played_side_by_side_find_their_own_replies_in_any_order(stage: Stage) -> None:
    rollout = Rollout(stage)

    def branch(name: str, turns: int) -> list[Any]:
        messages: list[Any] = [
            {"role": "system", "content": f"{name} {rollout.group}"},
            {"role": "user", "content": "q"},
        ]
        said = []
        for turn in range(turns):
            reply = rollout.ask(messages)
            said.append(reply)
            messages += [reply, *answers(reply, str(turn))]
        return said

    before = {name: branch(name, 2) for name in "abc"}
    rollout.lose()
    with ThreadPoolExecutor(3) as pool:
        after = dict(zip("cba", pool.map(lambda name: branch(name, 3), "cba"), strict=True))
    assert {name: said[:2] for name, said in after.items()} == before
    turns = rollout.trajectory().turns
    assert len(turns) == 9
    assert sum(turn.fork_reason is not None for turn in turns) == 2
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory())


def test_several_replies_to_one_call(stage: Stage) -> None:
    rollout = Rollout(stage)
    question = [{"role": "user", "content": f"go {rollout.group}"}]

    def ask(n: int) -> list[dict[str, Any]]:
        return read(stage.chat(rollout.key, question, tools=TOOLS, n=n))

    before = [ask(3), ask(1), ask(2)]
    rollout.lose()
    assert [ask(3), ask(1), ask(2)] == before
    assert stage.live.service.sessions.by_id(rollout.name).started == 3
    ask(1)
    assert len(rollout.trajectory().turns) == 7
    rollout.close()
    assert rollout.train() == sampled(rollout.trajectory())


def test_prompts_as_text_and_stop_texts(stage: Stage) -> None:
    rollout = Rollout(stage)
    ids = stage.live.service.renderer.codec.encode_text("one two END")
    matched = {"finish_reason": {"type": "stop", "matched": "END"}}
    stage.engine.then(*(Say(ids, meta=matched) for _ in range(2)))

    def complete(prompt: str) -> str:
        answer = stage.http.post(
            "/v1/completions",
            json={"prompt": prompt, "stop": ["END"], "max_tokens": 20},
            headers={"Authorization": f"Bearer {rollout.key}"},
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    first = complete("Once upon")
    second = complete(f"Once upon{first}END and")
    before, asked = [first, second], len(stage.engine.heard)
    rollout.lose()
    assert [complete("Once upon"), complete(f"Once upon{first}END and")] == before == ["one two ", "one two "]
    assert [turn.parent for turn in rollout.trajectory().turns] == [None, 0]
    assert len(stage.engine.heard) == asked
    rollout.close()
    rollout.train()


# What is not on record.


def refused(rollout: Rollout, messages: Sequence[Any], **body: Any) -> None:
    answer = rollout.stage.chat(rollout.key, messages, tools=TOOLS, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, DIVERGED), answer.text


def check_begins_anew(rollout: Rollout, reason: str = DIVERGED) -> None:
    """The session is discarded, its tokens are counted so, and a new attempt is handed out although no retry is left."""
    (stored,) = rollout.sessions()
    assert (stored.state, stored.discard_reason) == (SessionState.DISCARDED, reason)
    assert rollout.stage.chat(rollout.key, [{"role": "user", "content": "q"}]).status_code == 401
    ledger = rollout.stage.admin("GET", "/admin/ledger")
    assert ledger["balanced"]
    assert ledger["discarded"][reason] >= stored.sampled_tokens
    again = Rollout(rollout.stage)
    assert (again.group, again.attempt) == (rollout.group, rollout.attempt + 1)
    again.play(1)
    again.close()
    assert again.train() == sampled(again.trajectory())


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_environment_that_answers_otherwise_is_no_silent_fork(stage: Stage, at: int) -> None:
    rollout = Rollout(stage)
    before = rollout.play(4)
    rollout.lose()
    messages: list[Any] = [{"role": "user", "content": f"go {rollout.group}"}]
    for turn, reply in enumerate(before[: at + 1]):
        assert rollout.ask(messages) == reply
        messages += [reply, *answers(reply, f"{turn}!" if turn == at else str(turn))]
    asked = len(stage.engine.heard)
    refused(rollout, messages)
    assert len(stage.engine.heard) == asked, "nothing was sampled for it"
    assert rollout.close()["reward"] is None, "its player ends what has ended"
    check_begins_anew(rollout)


def test_other_tools_or_another_first_message_are_another_episode(stage: Stage) -> None:
    for messages, tools in (([{"role": "user", "content": "else"}], TOOLS), (None, [])):
        rollout = Rollout(stage)
        rollout.play(1)
        rollout.lose()
        question = messages or [{"role": "user", "content": f"go {rollout.group}"}]
        answer = stage.chat(rollout.key, question, **({"tools": tools} if tools else {}))
        assert answer.json()["error"]["code"] == DIVERGED
        check_begins_anew(rollout)


def test_an_episode_that_ends_before_the_record_does_is_another_one(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(3)
    rollout.lose()
    rollout.play(2)
    assert rollout.close(1.0)["reward"] is None
    check_begins_anew(rollout)


def test_a_fault_while_it_is_played_again_is_a_fault(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(2)
    rollout.lose()
    rollout.play(1)
    rollout.close(None)
    (stored,) = rollout.sessions()
    assert stored.state is SessionState.CLOSED
    assert stage.admin("GET", "/admin/ledger")["balanced"]


def test_another_temperature_or_abandoned_weights_are_not_mixed_in(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(1)
    body = {"group_id": rollout.group, "attempt": 0, "rollout_id": rollout.name, "replay": True}
    other = {**body, "limits": {"temperature": 0.5}}
    answer = stage.http.post("/v1/sessions", json=other, headers={"x-api-key": TOKEN})
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, DIVERGED)
    check_begins_anew(rollout)
    rollout = Rollout(stage)
    rollout.play(1)
    buffer = stage.live.service.buffer
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(buffer), "descends", lambda self, versions: set(versions) != {0})
        answer = stage.http.post("/v1/sessions", json={**body, "group_id": rollout.group, "rollout_id": rollout.name},
                                 headers={"x-api-key": TOKEN})  # fmt: skip
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "abandoned")
    check_begins_anew(rollout, "abandoned")


# Who may end what.


def test_a_session_that_was_opened_again_is_not_ended_by_its_former_player(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(2)
    old = rollout.lose(process=False)
    body = {"attempt": 0, "outcome": {"reward": 0.0}, "api_key": old}
    answer = stage.http.post(f"/v1/sessions/{rollout.name}/close", json=body, headers={"x-api-key": TOKEN})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_reopened")
    rollout.play(3)
    assert rollout.close(1.0, rollout.key)["reward"] == 1.0
    assert rollout.train() == sampled(rollout.trajectory())


def test_what_has_ended_is_not_opened_again_and_what_never_was_is_opened(stage: Stage) -> None:
    rollout = Rollout(stage)
    rollout.play(1)
    rollout.close()
    body = {"group_id": rollout.group, "attempt": 0, "rollout_id": rollout.name, "replay": True}
    answer = stage.http.post("/v1/sessions", json=body, headers={"x-api-key": TOKEN})
    assert answer.status_code in (400, 409)
    rollout.train()
    work = stage.admin("POST", "/admin/work", {"wait_s": 2.0})
    fresh = {"group_id": work["group_id"], "rollout_id": f"{work['group_id']}-0", "replay": True}
    assert stage.admin("POST", "/v1/sessions", fresh)["api_key"]
    answer = stage.http.post("/v1/sessions", json={"replay": True}, headers={"x-api-key": TOKEN})
    assert (answer.status_code, "played again" in answer.json()["error"]["message"]) == (400, True)


# A real restart, and any history.


def test_after_a_restart_of_the_service_the_plan_hands_it_out_again(tmp_path: Any) -> None:
    with service_on_fake(tmp_path, **PLAN, **LIMITS) as stage:
        begin(stage)
        rollout, idle = Rollout(stage), Rollout(stage)
        before = rollout.play(2)
        was = stage.live.service
        settings_, model = was.settings, tmp_path / "model"
        stage.live.__exit__()
        stage.engine.speak = stage.engine.babble  # what engines are probed for at a start is not talk
        with LiveService(settings_, model) as live, httpx.Client(base_url=live.url, timeout=60) as http:
            second = Stage(live, stage.engine, http)
            late = {"attempt": 0, "outcome": {"reward": 0.0}}
            answer = http.post(f"/v1/sessions/{rollout.name}/close", json=late, headers={"x-api-key": TOKEN})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_reopened")
            begin(second)
            asked = len(stage.engine.heard)
            works = [second.admin("POST", "/admin/work", {"wait_s": 10.0}) for _ in range(2)]
            handed = {(work["group_id"], work["attempt"], work["replay"]) for work in works}
            assert handed == {(rollout.group, 0, True), (idle.group, 1, False)}, "what said nothing yet begins anew"
            again = Rollout(second, next(work for work in works if work["replay"]))
            assert again.play(4)[:2] == before
            assert len(stage.engine.heard) == asked + 2
            again.close()
            assert again.train() == sampled(again.trajectory())


Ask = tuple[str, int, bool, bool]
"""Which of the agent's two threads of talk, how many replies, whether as a stream, whether with a stop text."""


class Talk:
    """A program of asks, played from its start."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.threads: dict[str, list[Any]] = {
            name: [{"role": "user", "content": f"{name} {rollout.group}"}] for name in ("main", "other")
        }

    def step(self, ask: Ask) -> list[dict[str, Any]]:
        """One ask; the agent goes on from the last reply."""
        name, n, stream, stop = ask
        body: dict[str, Any] = {"stop": ["4242"]} if stop else {}
        more = {"n": n} if n > 1 else {"stream": True} if stream else {}
        answer = self.rollout.stage.chat(self.rollout.key, self.threads[name], tools=TOOLS, **body, **more)
        assert answer.status_code == 200, answer.text
        said = read(answer)
        self.threads[name] += [said[-1], *answers(said[-1], str(len(self.threads[name])))]
        return said

    def run(self, program: Sequence[Ask], told: dict[int, list[dict[str, Any]]]) -> None:
        """All asks in their order. `told`: what was answered before, by place; added to."""
        for at, ask in enumerate(program):
            said = self.step(ask)
            assert told.setdefault(at, said) == said


def cut_in_flight(talk: Talk, ask: Ask) -> None:
    """The session is opened again while the engine works on a call of it."""
    engine, rollout = talk.rollout.stage.engine, talk.rollout
    engine.hold()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(talk.step, ask)
        wait_for(lambda: len(engine.running) == ask[1], "the engine's turn")
        rollout.key = rollout.open(replay=True)
        engine.release()
        assert isinstance(lost.exception(20), AssertionError)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.full)])
def test_any_episode_cut_anywhere_and_any_number_of_times(stage: Stage, examples: int) -> None:
    """Whatever was answered once is answered so again, each completion is on record once, and each is trained once."""
    names, numbers, flags = st.sampled_from(("main", "main", "other")), st.sampled_from((1, 1, 1, 2)), st.booleans()
    asks = st.lists(st.tuples(names, numbers, flags, flags), min_size=1, max_size=7)
    cuts = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(("between", "during")), flags), max_size=4)

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(program=asks, cuts=cuts)
    def check(program: list[Ask], cuts: list[tuple[int, str, bool]]) -> None:
        rollout, heard = Rollout(stage, limits={"max_turns": 100}), len(stage.engine.heard)
        told: dict[int, list[dict[str, Any]]] = {}
        for at, phase, process in cuts:
            talk = Talk(rollout)
            talk.run(program[:at], told)
            if phase == "during" and at < len(program) and at not in told:
                cut_in_flight(talk, program[at])
            else:
                rollout.lose(process=process)
        Talk(rollout).run(program, told)
        turns = rollout.trajectory().turns
        assert [turn.index for turn in turns] == list(range(len(turns)))
        wanted = sum(n for _, n, _, _ in program)
        assert sum(turn.delivered for turn in turns) == wanted
        whole = [one for one in stage.engine.heard[heard:] if one.reason != "abort"]
        assert len(whole) == wanted, "a completion was thrown away, or sampled twice"
        cut = sum(not turn.delivered for turn in turns)
        assert stage.live.service.sessions.by_id(rollout.name).started == len(program) + cut
        rollout.close()
        delivered = sum(len(turn.completion_ids) for turn in turns if turn.delivered)
        assert rollout.train() == delivered
        assert sum(int(row.loss_mask.sum()) for row in trajectory_rows(rollout.trajectory())) == delivered

    check()


# What is restored for others.


def test_tokens_past_a_stop_text_of_a_prompt_as_text_are_no_turn_to_continue(stage: Stage) -> None:
    def turn(index: int, parent: int | None, **more: Any) -> Turn:
        ids = np.arange(30, 33, dtype=np.int32)
        logprobs, spans = np.zeros(3, np.float32), (VersionSpan(0, 0, 3),)
        return Turn(index, parent, ids, 0, ids, logprobs, "stop", spans, 1.0, **more)

    said: Any = ({"role": "assistant", "content": "x"},)
    turns = (turn(0, None, tools=RAW_TOOLS, messages=said), turn(1, 0, messages=said), turn(2, 0, delivered=False))
    meta = {"external": True, "key": "00" * 32, "date": "2026-01-01", "limits": {**LIMITS, "temperature": 1.0}}
    record = SessionRecord("r", 0, "r", "t", 0, meta)
    stored = StoredSession(record, SessionState.OPEN, 0.0, None, None, None, 3, 9, 3)
    trajectory = Trajectory("r", 0, "r", "t", turns, None, (), "", False)
    session = restored(stored, trajectory, stage.live.service.renderer.codec)
    assert [session.tree.find(index) is not None for index in range(3)] == [True, True, False]
    assert session.turns == 3
