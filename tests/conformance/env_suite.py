"""What every environment keeps: the laws of `palestra env check`, a test each.

Subclass `EnvSuite` and give `env_id` and `args`. Laws that start processes are left to `palestra env check` itself, which every built-in
passes in `test_cli_env.py`; so is the one that measures time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.checking import LAWS, Verdict
from palestra.envs.checking.fuzz import FUZZED as ODD_MESSAGES
from palestra.envs.checking.playing import Subject
from palestra.envs.checking.run import PROCESSES, try_law
from palestra.envs.core import MessageEnv
from palestra.envs.registry import make_env
from palestra.envs.types import Episode, Message, Task

FUZZED: list[Message] = list(ODD_MESSAGES)


class EnvSuite:
    env_id: str
    args: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    tasks_checked = 5
    wanderings = 20
    """Episodes of random actions."""
    untested: ClassVar[frozenset[str]] = frozenset({"arguments", "box", "replayed"})
    """Laws that cannot be tried on every environment; all others must hold. One without an oracle names more."""

    @pytest.fixture
    def env(self) -> Iterator[Any]:
        env = make_env(self.env_id, self.args)
        yield env
        env.close()

    @pytest.fixture
    def inner(self, env: Any) -> MessageEnv:
        inner: MessageEnv = env.unwrapped
        return inner

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Iterator[Subject]:
        """Shared by the laws, so that no episode is played twice for nothing."""
        subject = Subject(cls.env_id, cls.args, cls.tasks_checked, cls.wanderings)
        yield subject
        subject.close()

    def oracle(self, inner: MessageEnv, task: Task) -> list[Message]:
        return inner.oracle(task)

    def episode(self, env: Any, task: Task, script: list[Message | str]) -> Episode:
        return play(env, ScriptedPolicy(script), Limits(max_turns=6), task=task, seed=0)

    def some_tasks(self, inner: MessageEnv) -> list[Task]:
        size = len(inner.tasks)
        return [inner.tasks[index * size // self.tasks_checked] for index in range(min(self.tasks_checked, size))]

    @pytest.mark.parametrize("law", [name for name in LAWS if name not in {*PROCESSES, "cost"}])
    def test_it_keeps(self, subject: Subject, law: str) -> None:
        outcome = try_law(LAWS[law], subject)
        allowed = {Verdict.PASSED, Verdict.UNTESTED} if law in self.untested else {Verdict.PASSED}
        assert outcome.verdict in allowed, f"{outcome.says}: {outcome.detail}"

    def test_played_by_an_agents_loop_the_oracle_scores_one(self, env: Any, inner: MessageEnv) -> None:
        if "oracle" in self.untested:
            return  # it has none, and what is left of this test is nothing
        task = self.some_tasks(inner)[0]
        episode = self.episode(env, task, list(self.oracle(inner, task)))
        assert (episode.error, episode.terminated, episode.truncated) == (None, True, False)
        assert episode.reward.value == pytest.approx(1.0)
