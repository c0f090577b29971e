"""Reading a session's conversation: prompt and transcript, the branch that is scored, and the number of turns."""

from __future__ import annotations

from palestra.agents.transcript import after_prompt, count_turns, main_branch
from palestra.envs.calculator import calls
from palestra.envs.types import Message


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class TestTranscripts:
    PROMPT = ({"role": "system", "content": "s"}, user("q"))

    def test_the_prompt_is_recognised_in_other_words_of_the_same_api(self) -> None:
        parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
        assert after_prompt([parts, said("a")], self.PROMPT) == [said("a")]
        assert after_prompt([{"role": "developer", "content": "mine"}, parts, said("a")], self.PROMPT) == [said("a")]

    def test_a_prompt_of_the_agents_own_ends_at_its_first_reply(self) -> None:
        branch = [user("You are ..."), user("go"), said("a"), user("on"), said("b")]
        assert after_prompt(branch, self.PROMPT) == branch[2:]
        assert after_prompt([user("go")], self.PROMPT) == []

    def test_examples_in_the_prompt_are_no_replies(self) -> None:
        prompt = [user("1+1?"), said("2"), user("q")]
        assert after_prompt([*prompt, said("a")], prompt) == [said("a")]
        assert count_turns([[*prompt, said("a")]], prompt) == 1

    def test_the_longest_branch_is_scored_and_the_last_of_equals(self) -> None:
        short, long, other = (
            [user("sub"), said("x")],
            [user("q"), said("a"), user("go"), said("b")],
            [user("z"), said("y")],
        )
        assert main_branch([short, long, other]) is long
        assert main_branch([short, other]) is other
        assert main_branch([]) == ()

    def test_a_shared_beginning_counts_once_and_equal_replies_twice(self) -> None:
        start = [user("q"), said("a"), user("go")]
        assert count_turns([[*start, said("b")], [*start, said("c")]], self.PROMPT) == 3
        assert count_turns([[user("q"), said("a")], [user("q"), said("a")]], self.PROMPT) == 2
        assert count_turns([], self.PROMPT) == 0
        assert count_turns([[], []], self.PROMPT) == 2

    def test_a_call_that_a_client_mended_counts_once(self) -> None:
        first, mended = calls('12"', call_id="c7"), calls("12", call_id="c7")
        tool = {"role": "tool", "tool_call_id": "c7", "content": "no"}
        assert count_turns([[user("q"), first], [user("q"), mended, tool, said("b")]], self.PROMPT) == 2
