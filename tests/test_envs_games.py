"""Text games: the suite, how moves are read, and what is rewarded."""

from __future__ import annotations

import math
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.core import MessageEnv
from palestra.envs.games.base import LONGEST_REPLY
from palestra.envs.games.guess import LEVELS as RANGES
from palestra.envs.games.guess import GuessTheNumber
from palestra.envs.games.hangman import WORDS, Hangman, hangman_tasks
from palestra.envs.games.mastermind import Mastermind, compare
from palestra.envs.registry import make_env, register_builtin
from palestra.envs.types import Episode, Message, StopReason, Task
from tests.conformance.env_suite import FUZZED, EnvSuite

register_builtin("palestra/GuessTheNumber-v0", "palestra.envs.games.guess:GuessTheNumber")
register_builtin("palestra/Mastermind-v0", "palestra.envs.games.mastermind:Mastermind")
register_builtin("palestra/Hangman-v0", "palestra.envs.games.hangman:Hangman")


class GameSuite(EnvSuite):
    """A game goes on after a message that an environment of questions would take as the answer."""

    @pytest.mark.parametrize("message", FUZZED)
    def test_whatever_a_model_writes_is_answered(self, env: Any, message: Message) -> None:
        env.reset(seed=0)
        observation, reward, ended, _, info = env.step(message)
        assert (reward, ended, info["step"].turn) == (0.0, False, 1)
        assert len(observation) == len(message.get("tool_calls") or ()) + 1
        said = observation[-1]["content"]
        assert "2 more malformed replies end the game" in said or (message["content"], said[:6]) == ("x", "x: no.")

    def test_a_time_limit_is_scored(self, inner: MessageEnv) -> None:
        env = make_env(self.env_id, self.args)
        env.reset(seed=0)
        episode = play(env, ScriptedPolicy([""]), Limits(max_turns=1), task=0, seed=0)
        assert (episode.truncated, episode.stop_reason) == (True, StopReason.MAX_TURNS)
        assert episode.reward.value == 0.0


class TestGuessTheNumberSuite(GameSuite):
    env_id = "palestra/GuessTheNumber-v0"


class TestMastermindSuite(GameSuite):
    env_id = "palestra/Mastermind-v0"


class TestHangmanSuite(GameSuite):
    env_id = "palestra/Hangman-v0"


def episode(env: MessageEnv, task: Task | int, *script: Message | str, turns: int = 20) -> Episode:
    return play(env, ScriptedPolicy(script), Limits(max_turns=turns), task=task, seed=0)


def number(answer: int, high: int = 100, tries: int = 7) -> Task:
    return Task("find it", answer, "t", {"high": high, "tries": tries})


class TestGuessing:
    def test_halving_finds_every_number_of_every_level(self) -> None:
        for high, tries in RANGES:
            for answer in range(1, high + 1, max(1, high // 97)):
                env = GuessTheNumber()
                env.reset(options={"task": number(answer, high, tries)})
                low, top, total, ended = 1, high, 0.0, False
                while not ended:
                    middle = (low + top) // 2
                    said, reward, ended, _, info = env.step({"role": "assistant", "content": f"guess {middle}"})
                    total += reward
                    if said:
                        low, top = (middle + 1, top) if "higher" in said[0]["content"] else (low, middle - 1)
                assert info["step"].reward.value == pytest.approx(1.0)
                assert total == pytest.approx(1.0)

    def test_progress_is_paid_once_however_it_is_made(self) -> None:
        played = episode(GuessTheNumber(), number(100), "guess 50", "guess 50", "guess 1", "guess 200", turns=4)
        first = 0.3 * (1 - math.log(50) / math.log(100))
        assert played.step_rewards == pytest.approx((first, 0.0, 0.0, 0.0))
        assert played.reward.value == pytest.approx(first)
        assert played.truncated

    def test_a_game_is_lost_when_the_tries_are_used(self) -> None:
        played = episode(GuessTheNumber(), number(3, 10, 2), "guess 5", "guess 1")
        assert (played.stop_reason, played.terminated, played.turns) == (StopReason.ENV_DONE, True, 2)
        assert played.reward.components["solved"] == 0.0
        assert "1 guess left" in played.messages[2]["content"]

    @pytest.mark.parametrize(
        ("text", "solved"),
        [
            ("guess 7", True),
            ("7", True),
            ("It is low.\nMy guess: 7.", True),
            ("guess 3\nguess 7", True),
            ("guess 7\nguess 3", False),
            ("GUESS 7\n\n", True),
            ("guess 7 or 8", False),
            ("1 2 3 4 5 6 7 8 9 10", False),
            ("guess 7.5", False),
            ("guess \u0667", False),
            ("guess " + "7" * 30, False),
            ("x" * LONGEST_REPLY + "\nguess 7", False),
        ],
    )
    def test_the_last_line_is_read_and_nothing_else(self, text: str, solved: bool) -> None:
        played = episode(GuessTheNumber(), number(7, 10, 4), text, turns=1)
        assert bool(played.reward.components["solved"]) is solved

    def test_malformed_replies_cost_no_try_and_the_third_ends_the_game(self) -> None:
        played = episode(GuessTheNumber(), number(7, 10, 1), "what?", "guess 7")
        assert played.reward.value == pytest.approx(1.0)
        lost = episode(GuessTheNumber(), number(7, 10, 4), "what?")
        assert (lost.turns, lost.stop_reason, lost.reward.value) == (3, StopReason.ENV_DONE, 0.0)
        assert "3 malformed replies" in lost.reward.note

    def test_a_call_is_answered_by_a_tool_message_and_help(self) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "guess", "arguments": "{}"}}
        played = episode(
            GuessTheNumber(), number(7, 10), {"role": "assistant", "content": "7", "tool_calls": [call]}, "7"
        )
        assert [message["role"] for message in played.messages] == ["user", "assistant", "tool", "user", "assistant"]
        assert played.messages[2]["tool_call_id"] == "c"
        assert played.reward.value == pytest.approx(1.0)

    def test_a_player_by_itself_is_scored_by_its_moves(self) -> None:
        env = GuessTheNumber()
        env.reset(options={"task": number(7, 10)})
        moves = [{"role": "assistant", "content": f"guess {guess}"} for guess in (5, 7, 5)]
        assert env.grade(moves).reward.value == pytest.approx(1.0)  # type: ignore[union-attr]
        env.reset(options={"task": number(100)})
        assert env.grade(moves[:1]).reward.value == pytest.approx(  # type: ignore[union-attr]
            0.3 * (1 - math.log(95) / math.log(100))
        )

    @pytest.mark.parametrize("levels", [(), (0,), (5,), (True,)])
    def test_unknown_levels_are_refused(self, levels: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="levels"):
            GuessTheNumber(levels=levels)


class TestMastermind:
    @pytest.mark.parametrize(
        ("code", "guess", "counts"),
        [
            ("ABCD", "ABCD", (4, 0)),
            ("ABCD", "DCBA", (0, 4)),
            ("AABB", "ABBB", (3, 0)),
            ("AABB", "BBAA", (0, 4)),
            ("AAAB", "BCCC", (0, 1)),
            ("ABCA", "AADE", (1, 1)),
        ],
    )
    def test_counts(self, code: str, guess: str, counts: tuple[int, int]) -> None:
        assert compare(code, guess) == counts

    def test_only_a_better_guess_earns_progress(self) -> None:
        task = Task("find it", "ABCD", "t", {"letters": 6, "tries": 10})
        played = episode(Mastermind(), task, "guess A B E E", "guess ABEE", "guess FFFF", "guess abce.", turns=4)
        assert played.step_rewards == pytest.approx((0.15, 0.0, 0.0, 0.075))
        assert "ABEE: 2 in the right place, 0 more elsewhere. 9 guesses left." in played.messages[2]["content"]

    @pytest.mark.parametrize("text", ["guess ABC", "guess ABCDE", "guess ABCG", "guess A-B-C-D", "guess XXXX", "ABCD!"])
    def test_other_words_are_malformed(self, text: str) -> None:
        env = Mastermind()
        played = episode(env, Task("find it", "ABCD", "t", {"letters": 6, "tries": 10}), text, turns=1)
        assert (env.malformed, played.reward.value) == (1, 0.0)


class TestHangman:
    def test_letters_earn_their_share_and_the_last_one_wins(self) -> None:
        task = Task("find it", "apple", "t")
        played = episode(Hangman(), task, "guess p", "guess z", "guess a", "e", "Letter?\nguess: l")
        assert played.step_rewards == pytest.approx((0.075, 0.0, 0.075, 0.075, 0.075))
        assert played.reward.value == pytest.approx(1.0)
        assert "_ p p _ _" in played.messages[2]["content"]
        assert "6 wrong guesses left" in played.messages[4]["content"]

    def test_seven_wrong_guesses_end_it_and_a_guess_twice_is_malformed(self) -> None:
        env = Hangman()
        played = episode(env, Task("find it", "apple", "t"), *"zz", *"bcdfgh", "e")
        assert (played.stop_reason, env.malformed, env.lives) == (StopReason.ENV_DONE, 1, 0)
        assert played.reward.value == 0.0

    def test_a_wrong_word_costs_a_guess_and_one_of_another_length_none(self) -> None:
        env = Hangman()
        episode(env, Task("find it", "apple", "t"), "guess grape", "guess pear", turns=2)
        assert (env.lives, env.malformed) == (6, 1)

    def test_no_word_comes_twice_before_all_were_used(self) -> None:
        tasks = hangman_tasks(seed=1, size=2 * len(WORDS))
        assert sorted(tasks[index].answer for index in range(len(WORDS))) == sorted(WORDS)
        assert tasks[0].answer != tasks[len(WORDS)].answer or tasks[1].answer != tasks[len(WORDS) + 1].answer
        assert len(set(WORDS)) == len(WORDS)
        assert min(map(len, WORDS)) >= 5
