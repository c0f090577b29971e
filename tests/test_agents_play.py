"""The play loop: how episodes end, what they are worth, and what becomes of faults."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from palestra.agents.chat import ChatPolicy
from palestra.agents.config import AgentConfig, GroupsConfig
from palestra.agents.play import describe, play
from palestra.agents.players import AgentPlayer, PolicyPlayer, player_of
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import AgentError, Limits, PolicyReply, PolicyStop, SamplingParams, SessionHandle
from palestra.agents.workspace import Workspaces
from palestra.envs.calculator import Calculator, arithmetic_tasks, calls
from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import make_env
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import EnvError, Message, Reward, StopReason, Task, ToolSpec
from tests.conformance.policy_suite import PolicySuite

TASK = Task("What is 12 plus 30?", 42, "t", {"expression": "12+30"})
ANSWER: Message = {"role": "assistant", "content": "42"}


class TestScripted(PolicySuite):
    @pytest.fixture
    def policy(self) -> ScriptedPolicy:
        return ScriptedPolicy([calls("12+30"), "42"])

    def test_an_empty_script_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            ScriptedPolicy([])


class Saying:
    """Calls `reply(turn, messages, timeout_s)`; what it raises is raised."""

    def __init__(self, reply: Any) -> None:
        self.reply, self.asked = reply, 0
        self.seen: list[tuple[Message, ...]] = []
        self.timeouts: list[float] = []

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        self.asked += 1
        self.seen.append(tuple(messages))
        self.timeouts.append(timeout_s)
        return PolicyReply(self.reply(self.asked), "stop")


def always_calling(_: int) -> Message:
    return calls("1+1")


class TestEnds:
    def test_an_answer_terminates(self) -> None:
        episode = play(Calculator(), ScriptedPolicy([calls("12+30"), ANSWER]), Limits(), task=TASK, seed=0)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (True, False, StopReason.ANSWER)
        assert (episode.turns, episode.tool_calls, episode.tool_errors, episode.error) == (2, 1, 0, None)
        assert [message["role"] for message in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert episode.step_rewards == (0.0, 0.0)
        assert episode.reward.value == 1.0
        assert episode.tools == Calculator().tool_specs()
        assert episode.seconds > 0

    def test_the_answer_on_the_last_allowed_turn_is_terminated(self) -> None:
        episode = play(Calculator(), ScriptedPolicy([calls("12+30"), ANSWER]), Limits(max_turns=2), task=TASK, seed=0)
        assert (episode.terminated, episode.truncated, episode.reward.value) == (True, False, 1.0)

    def test_the_limit_on_turns_cuts_and_is_scored(self) -> None:
        episode = play(Calculator(), ScriptedPolicy([calls("12+30")]), Limits(max_turns=3), task=TASK, seed=0)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (False, True, StopReason.MAX_TURNS)
        assert (episode.turns, episode.reward.value) == (3, 0.5)

    def test_a_time_limit_of_gymnasium_cuts_and_is_scored(self) -> None:
        env = gym.make("palestra/Calculator-v0", max_episode_steps=2, disable_env_checker=True)
        episode = play(env, ScriptedPolicy([calls("12+30")]), Limits(max_turns=5), task=TASK, seed=0)
        assert (episode.turns, episode.truncated, episode.reward.value) == (2, True, 0.5)
        bare = gym.wrappers.TimeLimit(Calculator(), 2)  # without the wrapper that scores
        episode = play(bare, ScriptedPolicy([calls("12+30")]), Limits(max_turns=5), task=TASK, seed=0)
        assert (episode.turns, episode.truncated, episode.terminated, episode.reward.value) == (2, True, False, 0.5)
        episode = play(bare, ScriptedPolicy([calls("12+30"), ANSWER]), Limits(max_turns=5), task=TASK, seed=0)
        assert (episode.turns, episode.truncated, episode.terminated, episode.reward.value) == (2, False, True, 1.0)

    def test_the_deadline_cuts_between_calls_and_is_the_policys_timeout(self) -> None:
        passed = threading.Event()

        class Slow(Calculator):
            @tool(timeout_s=30)
            def calculator(self, expression: str) -> int:
                passed.wait(2.1)
                return 42

        policy = Saying(always_calling)
        episode = play(Slow(), policy, Limits(max_turns=5, deadline_s=2.0), task=TASK, seed=0)
        assert (episode.stop_reason, episode.truncated, episode.turns) == (StopReason.DEADLINE, True, 1)
        assert episode.reward.value == 0.5
        assert 0 < policy.timeouts[0] <= 2.0

    @pytest.mark.parametrize("reason", [StopReason.CONTEXT, StopReason.CANCELLED, StopReason.MAX_TOKENS])
    def test_a_policy_that_cannot_go_on_is_truncated_and_scored(self, reason: StopReason) -> None:
        def reply(turn: int) -> Message:
            if turn == 2:
                raise PolicyStop(reason)
            return calls("12+30")

        episode = play(Calculator(), Saying(reply), Limits(), task=TASK, seed=0)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (False, True, reason)
        assert (episode.turns, episode.reward.value, episode.error) == (1, 0.5, None)

    def test_a_stop_before_the_first_reply_is_scored_too(self) -> None:
        def reply(turn: int) -> Message:
            raise PolicyStop(StopReason.CONTEXT)

        episode = play(Calculator(), Saying(reply), Limits(), task=TASK, seed=0)
        assert (episode.turns, episode.reward.value, episode.stop_reason) == (0, 0.0, StopReason.CONTEXT)

    def test_the_environments_own_end_and_step_rewards(self) -> None:
        class Countdown(MessageEnv):
            def respond(self, action: Message) -> Response:
                stop = StopReason.ENV_DONE if self.turn == 2 else None
                return Response([{"role": "user", "content": "go on"}], stop, 0.5 * self.turn)

            def score(self, task: Task, transcript: Sequence[Message]) -> float:
                return 2.0

        episode = play(Countdown(), ScriptedPolicy(["x"]), Limits(), task=TASK, seed=0)
        assert (episode.stop_reason, episode.terminated) == (StopReason.ENV_DONE, True)
        assert episode.step_rewards == (0.5, 1.0)
        assert episode.reward.value == 3.5


class TestPrompts:
    def test_the_prompt_is_what_reset_gives(self) -> None:
        class Rolled(MessageEnv):
            def reset(self, **kwargs: Any) -> Any:
                super().reset(**kwargs)
                self._prompt = [{"role": "user", "content": f"roll {self.np_random.integers(1 << 30)}"}]
                return tuple(dict(message) for message in self._prompt), self._info()

        empty = Task("", id="e")
        first, second, other = (
            play(Rolled(), ScriptedPolicy(["x"]), Limits(), task=empty, seed=seed) for seed in (1, 1, 2)
        )
        assert first.messages[0]["content"].startswith("roll ")
        assert first.messages == second.messages != other.messages

    def test_every_call_sees_the_whole_conversation_as_it_was_written(self) -> None:
        def reply(turn: int) -> Message:
            return {**calls("12+30", call_id=f"own_{turn}"), "reasoning_content": "hm"} if turn < 3 else ANSWER

        policy = Saying(reply)
        episode = play(Calculator(), policy, Limits(), task=TASK, seed=0)
        assert [len(seen) for seen in policy.seen] == [2, 4, 6]
        for earlier, later in zip(policy.seen, [*policy.seen[1:], episode.messages], strict=True):
            assert later[: len(earlier)] == earlier
        assert policy.seen[1][2] == reply(1)
        assert policy.seen[1][3]["tool_call_id"] == "own_1"

    def test_calls_without_ids_are_named_alike_in_message_and_result(self) -> None:
        bare = json.loads(json.dumps(calls("12+30")))
        del bare["tool_calls"][0]["id"]
        episode = play(Calculator(), ScriptedPolicy([bare, ANSWER]), Limits(), task=TASK, seed=0)
        assert episode.messages[2]["tool_calls"][0]["id"] == episode.messages[3]["tool_call_id"] == "call_1_0"

    def test_a_task_may_be_an_index(self) -> None:
        tasks = arithmetic_tasks()
        env = make_env("palestra/Calculator-v0")
        episode = play(env, ScriptedPolicy(Calculator().oracle(tasks[5])), Limits(), task=5, seed=0)
        assert (episode.task_id, episode.reward.value) == (tasks[5].id, 1.0)


class Faulty(ToolEnv):
    @tool
    def crash(self) -> str:
        """Crash."""
        raise ZeroDivisionError("a bug in the tool")

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return math.nan


CRASH: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "crash", "arguments": "{}"}}],
}


class TestFaults:
    def test_a_fault_of_the_environment_has_no_reward_and_says_where(self) -> None:
        episode = play(Faulty(), ScriptedPolicy([CRASH]), Limits(), task=TASK, seed=0)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (False, False, StopReason.INFRA)
        assert episode.reward.value is None
        assert episode.error is not None
        assert episode.error.startswith("EnvError: tool crash: ZeroDivisionError: a bug in the tool (")
        assert "test_agents_play.py" in episode.error
        assert episode.error.endswith("in crash)")
        assert (episode.turns, episode.step_rewards) == (1, (None,))
        assert episode.messages[-1] == CRASH

    def test_a_fault_on_the_way_to_the_model_has_no_reward(self) -> None:
        def reply(turn: int) -> Message:
            if turn == 2:
                raise AgentError("the engine died")
            return calls("12+30")

        episode = play(Calculator(), Saying(reply), Limits(), task=TASK, seed=0)
        assert (episode.stop_reason, episode.reward.value, episode.turns) == (StopReason.INFRA, None, 1)
        assert "AgentError: the engine died" in (episode.error or "")

    def test_a_fault_at_the_start(self) -> None:
        class NoBox(Calculator):
            def setup(self, task: Task) -> None:
                raise EnvError("no box is left")

        episode = play(NoBox(), ScriptedPolicy(["x"]), Limits(), task=TASK, seed=0)
        assert (episode.task_id, episode.turns, episode.reward.value) == ("t", 0, None)
        assert "no box is left" in (episode.error or "")
        missing = play(Calculator(), ScriptedPolicy(["x"]), Limits(), task=10**6, seed=0)
        assert "there is no task 1000000" in (missing.error or "")

    def test_a_policy_that_breaks_its_contract_is_a_fault(self) -> None:
        episode = play(Calculator(), Saying(lambda _: {"role": "user", "content": "x"}), Limits(), task=TASK, seed=0)
        assert episode.stop_reason is StopReason.INFRA
        assert "assistant message" in (episode.error or "")

    def test_an_error_that_is_its_own_cause_is_described(self) -> None:
        error = RuntimeError("ring")
        error.__cause__ = error
        assert describe(error) == "RuntimeError: ring"

    def test_a_nan_of_the_grader_is_none_and_the_episode_ended_well(self) -> None:
        episode = play(Faulty(), ScriptedPolicy(["done"]), Limits(), task=TASK, seed=0)
        assert (episode.terminated, episode.stop_reason, episode.error) == (True, StopReason.ANSWER, None)
        assert episode.reward.value is None
        assert "nan" in episode.reward.note

    def test_other_environments_are_refused(self) -> None:
        with pytest.raises(TypeError, match="CartPole"):
            play(gym.make("CartPole-v1"), ScriptedPolicy(["x"]), Limits(), task=TASK, seed=0)


class TestConfig:
    def test_the_sections_make_limits_and_sampling(self) -> None:
        config = GroupsConfig(max_turns=3, episode_deadline_s=5, temperature=0.7, max_response=32)
        assert config.limits() == Limits(3, 5.0)
        assert config.sampling() == SamplingParams(0.7, 32)

    @pytest.mark.parametrize("wrong", [{"temperature": 0}, {"group_size": 0}, {"max_turns": 0}, {"max_respnse": 3}])
    def test_wrong_values_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GroupsConfig.model_validate(wrong)

    def test_each_kind_of_agent_has_its_own_fields(self) -> None:
        assert AgentConfig().kind == "chat"
        python = AgentConfig.model_validate({"kind": "python", "entry": "m:f", "keep_workspace": True})
        assert (python.entry, python.keep_workspace, python.sampling) == ("m:f", True, "strict")
        command = AgentConfig.model_validate({"kind": "command", "command": "codex {prompt}", "pass_env": ["LANG"]})
        assert (command.command, command.pass_env) == ("codex {prompt}", ["LANG"])

    def test_each_kind_has_its_player(self, tmp_path: Path) -> None:
        chat = player_of(AgentConfig(), SamplingParams(), tmp_path)
        assert isinstance(chat, PolicyPlayer)
        policy = chat.make_policy(SessionHandle("r", 0, "http://x/v1", "key"))
        assert isinstance(policy, ChatPolicy)
        for keep, parent in ((True, tmp_path), (False, None)):
            given = {"kind": "command", "command": ["true"], "keep_workspace": keep}
            command = player_of(AgentConfig.model_validate(given), SamplingParams(), tmp_path)
            assert isinstance(command, AgentPlayer)
            assert command.workspaces == Workspaces(parent, keep)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"kind": "python"}, "agent.entry must be given"),
            ({"kind": "command"}, "agent.command must be given"),
            ({"kind": "command", "command": []}, "agent.command must be given"),
            ({"entry": "m:f"}, "agent.entry has no effect when agent.kind is 'chat'"),
            ({"command": ["codex"]}, "agent.command has no effect"),
            (
                {"kind": "python", "entry": "m:f", "env": {"A": "b"}},
                "agent.env has no effect when agent.kind is 'python'",
            ),
            ({"kind": "python", "entry": "m:f", "request_timeout_s": 5}, "agent.request_timeout_s has no effect"),
            ({"keep_workspace": True}, "agent.keep_workspace has no effect"),
            ({"kind": "shell"}, "kind"),
            ({"sampling": "loose"}, "sampling"),
        ],
    )
    def test_fields_without_effect_are_refused(self, fields: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            AgentConfig.model_validate(fields)
