"""Episodes of several roles: each with its own conversation, episode and session; and their groups in a real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.chat import ChatPolicy
from palestra.agents.roles import RolesPlayer, play_roles, roles_env
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import AgentError, Limits, PolicyReply, PolicyStop, SamplingParams, SessionHandle
from palestra.envs.calculator import Calculator
from palestra.envs.dialogue.negotiation import Negotiation
from palestra.envs.types import Episode, Message, Reward, StopReason, Task, ToolSpec
from palestra.server.client import ServiceClient
from tests.live import TOKEN, LiveService, engine_process, settings

BARGAIN = Task("Agree on a price.", None, "b", {"goods": "a canoe", "buyer": 100, "seller": 60})


class Failing:
    """Raises instead of answering."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        raise self.error


def bargain(buyer: Any, seller: Any, turns: int = 8, deadline_s: float = 60.0, env: Any = None) -> dict[str, Episode]:
    policies = {
        role: ScriptedPolicy(script) if isinstance(script, list) else script
        for role, script in (("buyer", buyer), ("seller", seller))
    }
    limits = Limits(turns, deadline_s)
    return play_roles(env or Negotiation(), policies, limits, task=BARGAIN, seed=0)


class TestPlay:
    def test_each_role_has_its_own_conversation_and_reward(self) -> None:
        episodes = bargain(["Too old.\noffer 50", "accept"], ["A classic!\noffer 70"])
        buyer, seller = episodes["buyer"], episodes["seller"]
        assert (buyer.reward.value, seller.reward.value) == pytest.approx((0.75, 0.25))
        assert [message["role"] for message in buyer.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert [message["role"] for message in seller.messages] == ["system", "user", "user", "assistant"]
        assert seller.messages[2]["content"].startswith("Too old.\noffer 50")
        assert "It is worth $100" in buyer.messages[0]["content"]
        assert not any("100" in str(message) for message in seller.messages)
        assert (buyer.turns, seller.turns, buyer.terminated, buyer.stop_reason) == (2, 1, True, StopReason.ANSWER)
        assert buyer.step_rewards == (0.0, 0.0)

    def test_a_malformed_message_is_answered_to_its_role_alone(self) -> None:
        episodes = bargain(["hm", "offer 80"], ["accept"])
        assert "I found no offer" in episodes["buyer"].messages[3]["content"]
        assert len(episodes["seller"].messages) == 4
        assert episodes["buyer"].turns == 2

    def test_a_limit_cuts_it_for_all_and_it_is_scored(self) -> None:
        for episodes, reason in (
            (bargain(["offer 1"], ["offer 99"], turns=2), StopReason.MAX_TURNS),
            (bargain(["offer 1"], ["offer 99"], deadline_s=0.0), StopReason.DEADLINE),
            (bargain(["offer 1"], Failing(PolicyStop(StopReason.CONTEXT))), StopReason.CONTEXT),
        ):
            for episode in episodes.values():
                assert (episode.stop_reason, episode.truncated, episode.terminated) == (reason, True, False)
                assert episode.reward.value == 0.0

    def test_a_fault_of_one_leaves_no_role_a_reward(self) -> None:
        for episode in bargain(["offer 1"], Failing(AgentError("the engine is gone"))).values():
            assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)
            assert "the engine is gone" in (episode.error or "")
            assert not episode.truncated

    def test_a_graders_fault_is_an_unknown_reward_of_its_role(self) -> None:
        class Broken(Negotiation):
            def role_score(self, role: str) -> Reward:
                return Reward(1 / 0) if role == "seller" else super().role_score(role)

        episodes = bargain(["offer 60"], ["accept"], env=Broken())
        assert (episodes["buyer"].reward.value, episodes["seller"].reward.value) == (1.0, None)
        assert "ZeroDivisionError" in episodes["seller"].reward.note

    def test_what_cannot_be_played_is_refused(self) -> None:
        with pytest.raises(TypeError, match="RolesEnv, got Calculator"):
            roles_env(Calculator())
        with pytest.raises(ValueError, match="no policy for role 'seller'"):
            play_roles(Negotiation(), {"buyer": ScriptedPolicy(["accept"])}, Limits(), task=0, seed=0)


@dataclass
class Sessions:
    """Keeps the other roles' sessions in memory."""

    fail: str = ""
    opened: list[dict[str, Any]] = field(default_factory=list)
    closed: dict[str, Episode] = field(default_factory=dict)

    def open(self, **asked: Any) -> SessionHandle:
        if self.fail == "open":
            raise ConnectionError("the service is away")
        self.opened.append(asked)
        return SessionHandle(asked["rollout_id"], 0, "http://host/v1", "key-seller")

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        if self.fail == "close":
            raise ConnectionError("the service is away")
        self.closed[handle.rollout_id] = episode


class TestPlayer:
    def play(self, sessions: Sessions, attempt: int = 0, seller: Any = None) -> Episode:
        scripts = {"key-buyer": ScriptedPolicy(["offer 70"]), "key-seller": seller or ScriptedPolicy(["accept"])}
        player = RolesPlayer(lambda handle: scripts[handle.api_key], sessions, 4)
        handle, replied = SessionHandle("g000007-2", attempt, "http://host/v1", "key-buyer"), threading.Event()
        host: Any = None
        episode = player.play(Negotiation(), host, handle, Limits(), BARGAIN, 0, replied)
        assert replied.is_set() or sessions.fail == "open"
        return episode

    def test_the_other_role_gets_a_session_in_a_group_of_its_own(self) -> None:
        sessions = Sessions()
        episode = self.play(sessions)
        assert sessions.opened == [
            {"rollout_id": "g000007.seller-2", "group_id": "g000007.seller", "group_size": 4, "task_id": "b"}
        ]
        assert (episode.reward.value, sessions.closed["g000007.seller-2"].reward.value) == pytest.approx((0.75, 0.25))

    def test_a_rollout_that_is_played_again_leaves_the_roles_group_alone(self) -> None:
        sessions = Sessions()
        self.play(sessions, attempt=1)
        assert sessions.opened == [{"rollout_id": "g000007.seller-2.1", "task_id": "b"}]

    def test_a_fault_ends_all_sessions_without_a_reward(self) -> None:
        sessions = Sessions()
        episode = self.play(sessions, seller=Failing(AgentError("gone")))
        assert (episode.reward.value, sessions.closed["g000007.seller-2"].reward.value) == (None, None)

    @pytest.mark.parametrize("fail", ["open", "close"])
    def test_a_session_that_cannot_be_had_is_a_fault_of_the_rollout(self, fail: str) -> None:
        episode = self.play(Sessions(fail))
        assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)
        assert "the service is away" in (episode.error or "")


@pytest.fixture(scope="module")
def engine(tiny_moe: Path) -> Iterator[str]:
    with engine_process(tiny_moe, "--context-length", "1024") as url:
        yield url


@pytest.mark.walk
def test_both_roles_groups_come_out_of_a_real_service(tmp_path: Path, engine: str, tiny_moe: Path) -> None:
    """Two rollouts; what an untrained model says is malformed, which is all that is needed of it here."""
    with LiveService(
        settings(tmp_path / "store", engine, drop_zero_variance=False, groups_per_step=1), tiny_moe
    ) as live:
        client = ServiceClient(live.url, TOKEN)
        client.register_worker(1)
        version = client.restore(train_step=0, checkpoint_id=None, policy_version=0)
        client.publish_begin(version, 0)
        client.publish_end(version, str(tiny_moe))
        work = client.work(wait_s=10.0)
        assert work is not None
        sampling = SamplingParams(max_tokens=8)
        player = RolesPlayer(lambda handle: ChatPolicy(handle, sampling), client, work.group_size)
        script = ScriptedPolicy(["offer 70"])
        mixed = RolesPlayer(
            lambda handle: ChatPolicy(handle, sampling) if "seller" in handle.rollout_id else _Both(script, handle),
            client,
            2,
        )
        for index in work.rollouts:
            handle = client.open_session(work, index, "b")
            chosen = player if index else mixed
            episode = chosen.play(Negotiation(), client, handle, Limits(4), BARGAIN, work.seed, threading.Event())
            assert episode.error is None
            client.close_session(handle, episode)
        groups = {group.group_id: group for group in client.claim(2, "me", 30.0, 20.0)}
        assert set(groups) == {work.group_id, f"{work.group_id}.seller"}
        client.close()


class _Both:
    """Asks the model, so that its session has a turn, and then says what a script says."""

    def __init__(self, script: ScriptedPolicy, handle: SessionHandle) -> None:
        self.script, self.policy = script, ChatPolicy(handle, SamplingParams(max_tokens=8))

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        self.policy.act(messages, tools, timeout_s)
        return self.script.act(messages, tools, timeout_s)
