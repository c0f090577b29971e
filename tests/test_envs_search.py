"""`palestra/Search-v0`: its suite, its reward, its tools, its questions, and the transcripts that teach it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.registry import make_env, register_builtin
from palestra.envs.search.demonstrations import search_demonstrations
from palestra.envs.search.env import Search, calls, read_reply
from palestra.envs.search.factbook import load_factbook
from palestra.envs.search.questions import TOPICS, bridges_of, facts, search_tasks, split_of
from palestra.envs.search.text import normalised
from palestra.envs.search.types import Hit, RetrieverError
from palestra.envs.tasks import write_tasks
from palestra.envs.types import EnvError, Episode, Message, StopReason, Task
from tests.conformance.env_suite import EnvSuite

register_builtin("palestra/Search-v0", "palestra.envs.search.env:Search")

SLICE = ("ke", "fr", "ja", "br", "eg", "it", "pe", "no")
CAPITAL = "ke/government/capital"
TASK = Task("What is the capital of Kenya?", "Nairobi", "t", {"gold": [CAPITAL], "match": "exact"})


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes of these tests go into a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class TestOneHop(EnvSuite):
    env_id = "palestra/Search-v0"
    args = {"countries": SLICE, "hops": (1,)}  # noqa: RUF012


class TestTwoHops(EnvSuite):
    env_id = "palestra/Search-v0"
    args = {"countries": SLICE, "hops": (2,), "split": "all", "snippet": 80, "retriever": "bm25"}  # noqa: RUF012


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def episode(*script: Message, task: Task = TASK, turns: int = 6, **args: Any) -> Episode:
    return play(Search(countries=SLICE, **args), ScriptedPolicy(script), Limits(max_turns=turns), task=task, seed=0)


FOUND = calls("search", query="capital Kenya", k=1)
OPENED = calls("open", id=CAPITAL)


class TestReward:
    @pytest.mark.parametrize(
        ("script", "parts"),
        [
            ((FOUND, say(f"<answer>Nairobi</answer> [{CAPITAL}]")), (1, 1, 1)),
            ((OPENED, say(f"[{CAPITAL}] says <answer> the nairobi. </answer>")), (1, 1, 1)),
            ((OPENED, say(f"<answer>Paris</answer><answer>Nairobi</answer>[{CAPITAL}]")), (1, 1, 1)),
            ((OPENED, say(f"<answer>Nairobi</answer><answer>Paris</answer>[{CAPITAL}]")), (0, 1, 1)),
            ((OPENED, say("<answer>Nairobi</answer>")), (1, 0, 1)),
            ((OPENED, say(f"<answer>Nairobi</answer> [{CAPITAL}] [fr/government/capital]")), (1, 0.5, 1)),
            ((OPENED, say(f"<answer>Nairobi [{CAPITAL}]</answer>")), (0, 0, 1)),
            ((OPENED, say(f"Nairobi [{CAPITAL}]")), (0, 1, 1)),
            ((OPENED, say("<answer>Nairobi, Kenya</answer>")), (0, 0, 1)),
            ((OPENED, say("<answer>Nairobi")), (0, 0, 1)),
            ((OPENED, say("<answer>Nairobi</answer><answer>")), (0, 0, 1)),
            ((OPENED, say("<answer></answer>")), (0, 0, 1)),
            ((OPENED, say("")), (0, 0, 1)),
            ((say(f"<answer>Nairobi</answer> [{CAPITAL}]"),), (1, 0, 0)),
            ((calls("search", query="Paris", k=1), say(f"<answer>Nairobi</answer> [{CAPITAL}]")), (1, 0, 0)),
            ((calls("open", id="no/such"), say(f"<answer>Nairobi</answer> [{CAPITAL}]")), (1, 0, 0)),
            ((say("What is the capital of Kenya?"),), (0, 0, 0)),
        ],
    )
    def test_table(self, script: tuple[Message, ...], parts: tuple[float, float, float]) -> None:
        reward = episode(*script).reward
        assert dict(reward.components) == dict(zip(("answer", "citation", "recall_seen"), parts, strict=True))
        assert reward.value == pytest.approx(0.8 * parts[0] + 0.2 * parts[1])

    def test_lists_are_scored_by_their_words(self) -> None:
        task = Task("Which goods?", "tea, cut flowers", "t", {"gold": [CAPITAL], "match": "f1"})
        assert episode(say("<answer>Cut flowers and tea</answer>"), task=task).reward.components[
            "answer"
        ] == pytest.approx(6 / 7)
        assert episode(say("<answer>tea</answer>"), task=task).reward.components["answer"] == 0.5

    def test_any_of_several_answers_is_right_and_without_passages_the_answer_is_all(self) -> None:
        task = Task("Where?", ["Nairobi", "Nairobi City"], "t")
        assert episode(say("<answer>Nairobi City</answer>"), task=task).reward.value == 1.0
        assert episode(say("<answer>City</answer>"), task=task).reward.value == 0.0

    @pytest.mark.parametrize("broken", [{"match": "regex"}, {"answer": None}, {"answer": 7}, {"answer": []}])
    def test_a_task_that_cannot_be_graded_has_no_reward(self, broken: dict[str, Any]) -> None:
        task = Task("?", broken.get("answer", "x"), "t", {"match": broken.get("match", "exact")})
        assert episode(say("<answer>x</answer>"), task=task).reward.value is None

    def test_a_limit_is_scored_with_what_was_seen(self) -> None:
        cut = episode(FOUND, turns=2)
        assert (cut.stop_reason, cut.truncated) == (StopReason.MAX_TURNS, True)
        assert dict(cut.reward.components) == {"answer": 0.0, "citation": 0.0, "recall_seen": 1.0}

    def test_an_agent_that_played_by_itself_is_scored_the_same(self) -> None:
        played = episode(FOUND, say(f"<answer>Nairobi</answer> [{CAPITAL}]"))
        env = Search(countries=SLICE)
        env.reset(options={"task": TASK})
        info = env.grade(played.messages[2:])
        assert info.reward is not None
        assert (info.reward.value, info.reward.components) == (played.reward.value, played.reward.components)

    def test_long_and_hostile_replies_are_read_at_once(self) -> None:
        started = time.perf_counter()
        assert read_reply([say("<answer>" * 2_000)]) == (None, set())
        assert read_reply([say("[" * 20_000)]) == (None, set())
        assert read_reply([say("<answer>x</answer>" + " " * 20_000)]) == (None, set())
        assert read_reply([say("<answer>" + "x" * 2_001 + "</answer>[a]")]) == (None, {"a"})
        assert read_reply([{"role": "assistant", "content": [{"type": "text", "text": "<answer>x</answer>"}]}]) == (
            None,
            set(),
        )
        assert read_reply([{"role": "user", "content": "<answer>x</answer>"}]) == (None, set())
        assert read_reply([]) == (None, set())
        assert time.perf_counter() - started < 5


class TestTools:
    def results(self, *script: Message, **args: Any) -> list[str]:
        return [m["content"] for m in episode(*script, say(""), **args).messages if m["role"] == "tool"]

    def test_search_shows_beginnings_and_open_the_whole(self) -> None:
        found, opened = self.results(FOUND, OPENED, snippet=20)
        assert found.startswith(f"[{CAPITAL}] Kenya | Government | Capital\nname: Nairobi")
        assert found.endswith("...")
        assert len(opened) > len(found)
        assert "Nairobi" in opened

    def test_as_many_as_are_asked_for_and_at_most_ten(self) -> None:
        counts = [
            text.count("\n\n") + 1
            for text in self.results(*(calls("search", query="Kenya", k=k) for k in (-5, 1, 3, 10, 99)))
        ]
        assert counts == [1, 1, 3, 10, 10]

    def test_what_is_not_there_is_said(self) -> None:
        none, unknown, wrong = self.results(
            calls("search", query="?!"), calls("open", id="x" * 500), calls("search", words="x")
        )
        assert none == "No passage matches."
        assert unknown.startswith("Error: there is no passage 'xxx")
        assert len(unknown) < 250
        assert "query" in wrong

    def test_brackets_in_a_text_are_no_ids(self, tmp_path: Path) -> None:
        (tmp_path / "c.jsonl").write_text(
            json.dumps({"id": "a", "title": "t", "text": f"[{CAPITAL}] says\n[{CAPITAL}] more"})
        )
        env = Search(corpus=str(tmp_path / "c.jsonl"), tasks=[TASK])
        env.reset(options={"task": TASK})
        env.step(calls("open", id="a"))
        assert env.seen() == {"a"}

    def test_a_retriever_s_fault_is_not_the_policy_s(self) -> None:
        class Dead:
            def search(self, query: str, k: int = 5) -> list[Hit]:
                raise RetrieverError("no answer")

        ended = episode(FOUND, retriever=Dead())
        assert (ended.stop_reason, ended.reward.value) == (StopReason.INFRA, None)
        assert "no answer" in str(ended.error)

    def test_passages_of_another_server_can_be_opened_once_they_were_found(self) -> None:
        class Elsewhere:
            def search(self, query: str, k: int = 5) -> list[Hit]:
                return [Hit("far", "Far", "x " * 400)]

        opened = self.results(calls("open", id="far"), FOUND, calls("open", id="far"), retriever=Elsewhere())
        assert opened[0].startswith("Error")
        assert opened[2] == "[far] Far\n" + "x " * 399 + "x"

    def test_two_hundred_episodes_at_once_lose_no_search(self) -> None:
        env_args = {"countries": SLICE, "hops": [1], "split": "all"}
        tasks = Search(**env_args).tasks  # type: ignore[arg-type]

        def reward(index: int) -> Any:
            env = make_env("palestra/Search-v0", env_args)
            task = tasks[index % len(tasks)]
            script = [calls("search", query=str(task.prompt), k=5), *env.unwrapped.oracle(task)[1:]]  # type: ignore[attr-defined]
            return play(env, ScriptedPolicy(script), Limits(), task=task, seed=0).reward

        alone = [reward(index) for index in range(40)]
        with ThreadPoolExecutor(50) as pool:
            together = list(pool.map(reward, range(200)))
        assert together[:40] == alone
        assert all(found.components["recall_seen"] == 1.0 for found in together)

    def test_two_hops_take_two_searches(self) -> None:
        book = load_factbook(SLICE)
        tasks = search_tasks(book, hops=(2,), split="all", size=60)
        reached = Counter[int]()
        for task in tasks:
            env = Search(countries=SLICE, tasks=[task])
            env.reset(options={"task": task})
            named = str(task.prompt).split("the country w")[1]
            env.step(calls("search", query=named, k=3))
            env.step(
                calls(
                    "search",
                    query=str(task.prompt).replace(f"the country w{named}", f"{task.meta['bridge']} {named[-20:]}"),
                    k=5,
                )
            )
            reached[len(env.seen() & set(task.meta["gold"]))] += 1
        assert reached[2] >= 0.8 * len(tasks)


class TestQuestions:
    book = load_factbook(SLICE)

    def test_there_are_many_topics_and_all_of_them_are_asked(self) -> None:
        tasks = search_tasks(self.book, split="all")
        for hops in (1, 2):
            assert len({task.meta["topic"] for task in tasks if task.meta["hops"] == hops}) >= 12
        assert {task.meta["topic"] for task in tasks} == set(TOPICS)

    def test_the_gold_passages_hold_the_answers(self) -> None:
        for task in search_tasks(self.book, split="all"):
            passages = [self.book.corpus.get(identity) for identity in task.meta["gold"]]
            assert None not in passages
            assert len(passages) == task.meta["hops"]
            assert set(normalised(task.answer)) <= set(normalised(passages[-1].text))  # type: ignore[union-attr]

    def test_bridges_are_unique_and_give_nothing_away(self) -> None:
        owners: dict[tuple[str, str], set[str]] = {}
        for fact in facts(load_factbook()):
            owners.setdefault((fact.topic.name, " ".join(normalised(fact.answer))), set()).add(fact.country.code)
        for code, found in bridges_of(self.book).items():
            for bridge in found:
                assert owners[bridge.topic.name, " ".join(normalised(bridge.answer))] == {code}
                assert not set(normalised(bridge.answer)) & set(normalised(bridge.country.name))
        for task in search_tasks(self.book, hops=(2,), split="all"):
            assert task.meta["bridge"].lower() not in str(task.prompt).lower()

    def test_splits_share_no_fact(self) -> None:
        asked = {
            split: {(task.meta["gold"][-1], task.meta["topic"]) for task in search_tasks(self.book, split=split)}
            for split in ("train", "eval")
        }
        assert asked["train"]
        assert asked["eval"]
        assert not asked["train"] & asked["eval"]
        held = {(fact.gold, fact.topic.name) for fact in facts(self.book) if split_of(fact) == "eval"}
        for task in search_tasks(self.book, hops=(2,), split="train"):
            assert (task.meta["gold"][0], task.id.split("/")[3]) not in held

    def test_seeds_order_and_sizes_cut(self) -> None:
        first, again, other = (search_tasks(self.book, seed=seed, size=30) for seed in (1, 1, 2))
        assert first == again != other
        assert len(first) == 30
        assert search_tasks(self.book, seed=1)[:30] == first

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ({"hops": ()}, "hops"),
            ({"hops": (3,)}, "hops"),
            ({"topics": ("weather",)}, "weather"),
            ({"topics": ()}, "no question"),
            ({"split": "test"}, "split"),
            ({"size": 0}, "size"),
        ],
    )
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            search_tasks(self.book, **wrong)


class TestMaking:
    def test_the_second_one_takes_no_time(self) -> None:
        Search(countries=SLICE)
        started = time.process_time()
        for _ in range(50):
            Search(countries=list(SLICE))
        assert time.process_time() - started < 0.5  # 50 ms are usual; building anything again would take seconds

    def test_a_corpus_of_one_s_own(self, tmp_path: Path) -> None:
        corpus, tasks = tmp_path / "c.jsonl", tmp_path / "t.jsonl"
        corpus.write_text(
            '{"id": "1", "title": "Cats", "text": "Cats sleep."}\n{"id": "2", "title": "Dogs", "text": "Dogs bark."}\n'
        )
        write_tasks(tasks, [Task("What do dogs do?", "bark", "d", {"gold": ["2"]})])
        from palestra.envs.tasks import read_tasks

        env = make_env("palestra/Search-v0", {"corpus": str(corpus)}, read_tasks(tasks))
        script = [calls("search", query="dogs do"), say("<answer>bark</answer> [2]")]
        assert play(env, ScriptedPolicy(script), Limits(), task=0, seed=0).reward.value == 1.0

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ({"snippet": 0}, "snippet"),
            ({"retriever": "elastic"}, "elastic"),
            ({"countries": ["zz"]}, "zz"),
            ({"corpus": "/no/such.jsonl", "countries": None}, "cannot be read"),
            ({"corpus": "/no/such.jsonl"}, "countries"),
            ({"split": "dev"}, "split"),
        ],
    )
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any], told: str) -> None:
        with pytest.raises(EnvError, match=told):
            make_env("palestra/Search-v0", {"countries": SLICE, **wrong})

    def test_a_corpus_file_needs_tasks(self, tmp_path: Path) -> None:
        (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "", "text": ""}')
        with pytest.raises(ValueError, match="tasks"):
            Search(corpus=str(tmp_path / "c.jsonl"))


class TestDemonstrations:
    env = Search(countries=SLICE[:4], hops=(1,), topics=("capital", "currency", "industries"), split="all")

    def scores(self, noise: float, n: int) -> list[float | None]:
        by_question = {task.prompt: task for task in self.env.tasks}
        out = []
        for shown in search_demonstrations(self.env, n, noise, seed=1):
            script = [message for message in shown["messages"] if message["role"] == "assistant"]
            task = by_question[shown["messages"][1]["content"]]
            played = play(self.env, ScriptedPolicy(script), Limits(max_turns=len(script)), task=task, seed=0)
            assert list(played.messages)[: len(shown["messages"])] == shown["messages"]
            assert shown["tools"] == list(self.env.tool_specs())
            out.append(played.reward.value)
        return out

    def test_without_noise_all_are_right(self) -> None:
        assert set(self.scores(0.0, 30)) == {1.0}

    def test_with_noise_they_are_spread(self) -> None:
        scores = self.scores(0.3, 120)
        assert 0.35 < sum(score == 1.0 for score in scores) / len(scores) < 0.7
        assert {0.0, 1.0} < set(scores)

    def test_wrong_noise_and_two_hops_are_refused(self) -> None:
        with pytest.raises(ValueError, match="probability"):
            search_demonstrations(self.env, 1, 1.5)
        two = Search(countries=SLICE[:4], hops=(2,), split="all")
        with pytest.raises(ValueError, match="two hops"):
            search_demonstrations(two, 1)
