"""`generate_rollout` in a function: prompts, rollouts, samples, what is kept and what is not, and whose fault a fault is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.agents.config import GroupsConfig
from palestra.agents.plans.function import FunctionRunner, arguments
from palestra.agents.plans.loading import load_function
from palestra.agents.plans.types import MaskRefusedError, NoMoreWorkError, PlanError, Sample, SessionRow
from palestra.agents.types import GroupAssignment, ReviewRequest, Verdict
from palestra.envs.config import EnvConfig
from palestra.envs.types import Message, StopReason, Task
from tests.fakes.plan_service import ROW, FakePlanService
from tests.fakes.sessions import failure, listening
from tests.live import until, wait_for
from tests.plans import TASKS, Talk, running


def args(**algo: Any) -> SimpleNamespace:
    return arguments(
        GroupsConfig(**{"groups_per_step": 2, "group_size": 2, **algo}), EnvConfig(id="talk"), "http://here/v1"
    )


class Stop(Exception):
    """Ends a test's runner."""


def calls(function: Any, service: FakePlanService, times: int = 1) -> FakePlanService:
    """Runs a function so many times, then stops."""
    done: list[int] = []

    async def counted(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        done.append(rollout_id)
        return await function(args, rollout_id, data_buffer, evaluation=evaluation)

    def ask(wait_s: float) -> Any:
        if len(done) == times:
            raise Stop
        return service.work(wait_s)

    with pytest.raises(Stop):
        run(counted, service, ask=ask)
    return service


def run(function: Any, service: FakePlanService, *, deadline_s: float = 5.0, ask: Any = None) -> None:
    runner = FunctionRunner(function, args(), Talk, TASKS, deadline_s=deadline_s)
    try:
        runner.train(service, ask or service.work, threading.Event())
    finally:
        runner.close()


async def play(prompt: Any, reward: Any = 1.0, **more: Any) -> Sample | None:
    async with prompt.rollout() as rollout:
        return await rollout.sample(reward, **more)
    return None


class TestAFunction:
    def test_gets_prompts_and_returns_samples(self) -> None:
        seen: list[Any] = []

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            seen.append((rollout_id, evaluation))
            prompts = data_buffer.get_samples(args.rollout_batch_size)
            pairs = [(prompt, index) for prompt in prompts for index in range(args.n_samples_per_prompt)]
            return await asyncio.gather(*(play(prompt, float(index)) for prompt, index in pairs))

        service = calls(generate, FakePlanService(places=6), times=2)
        assert seen == [(7, False), (8, False)], "a resumed run goes on counting"
        assert service.verdicts == {f"g{number}": Verdict() for number in range(4)}
        assert {key: episode.reward.value for key, episode in service.episodes.items()} == {
            (f"g{number}-{index}", 0): float(index) for number in range(4) for index in range(2)
        }

    def test_is_told_of_its_prompts_and_of_the_run(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            assert (args.rollout_batch_size, args.n_samples_per_prompt, args.over_sampling_batch_size) == (2, 2, 2)
            assert (args.base_url, args.temperature, args.max_turns, args.env.id) == ("http://here/v1", 1.0, 8, "talk")
            (prompt,) = data_buffer.get_samples(1)
            assert (prompt.task, prompt.seed, prompt.group_id, prompt.n_samples) == (TASKS[0], 0, "g0", 2)
            assert prompt.messages == [
                {"role": "system", "content": "You talk."},
                {"role": "user", "content": "Say something of 0."},
            ]
            assert prompt.tools == []
            prompt.messages.append({"role": "user", "content": "x"})
            assert len(prompt.messages) == 2, "fresh copies"
            async with prompt.rollout() as rollout:
                assert (rollout.api_key, rollout.rollout_id) == ("key-0", "g0-0")
                assert rollout.base_url.endswith("/v1")
                assert str(rollout.client.base_url).rstrip("/") == rollout.base_url
                assert rollout.client.api_key == "key-0"
                return await rollout.sample(0.5, components={"style": 1.0})

        service = calls(generate, FakePlanService())
        episode = service.episodes["g0-0", 0]
        assert (episode.reward.components, episode.turns, episode.terminated) == ({"style": 1.0}, 1, True)

    def test_what_is_not_returned_is_filtered_and_the_rest_is_not_trained(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            samples = []
            for prompt in data_buffer.get_samples(3):
                samples.append([await play(prompt, 0.0), await play(prompt, 1.0)])
            return [samples[0], None, [samples[1][1], samples[1][1]]]

        service = calls(generate, FakePlanService())
        assert service.verdicts == {"g0": Verdict(), "g1": Verdict(rewards={0: None}), "g2": Verdict(keep=False)}

    def test_may_give_samples_other_rewards(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            first, second = await play(prompt, 1.0), await play(prompt, 3.0)
            assert first is not None
            return SimpleNamespace(samples=[[replace(first, reward=first.reward - 2.0), second]])

        assert calls(generate, FakePlanService()).verdicts == {"g0": Verdict(rewards={0: -1.0})}

    def test_prompts_that_it_did_not_begin_are_there_in_the_next_call(self) -> None:
        groups: list[list[str]] = []

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            prompts = data_buffer.get_samples(3)
            groups.append([prompt.group_id for prompt in prompts])
            return [await play(prompts[0]), await play(prompts[0])]

        service = calls(generate, FakePlanService(), times=2)
        assert groups == [["g0", "g1", "g2"], ["g1", "g2", "g3"]]
        assert service.verdicts == {"g0": Verdict(), "g1": Verdict()}

    def test_what_goes_on_when_it_returns_can_be_returned_later(self) -> None:
        waiting: list[Any] = []
        go = asyncio.Event()

        async def late(prompt: Any) -> Any:
            async with prompt.rollout() as rollout:
                await go.wait()
                return await rollout.sample(1.0)

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            if not waiting:
                prompt, other = data_buffer.get_samples(2)
                waiting.append(asyncio.ensure_future(late(prompt)))
                return [await play(other), await play(other)]
            go.set()
            return await waiting[0]

        service = calls(generate, FakePlanService(places=2), times=2)
        assert service.verdicts == {"g1": Verdict(), "g0": Verdict()}

    def test_must_return_samples(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            data_buffer.get_samples(1)
            return [{"tokens": [1]}]

        with pytest.raises(PlanError, match="dict was returned or put for a sample"):
            run(generate, FakePlanService())


class TestTheDataBuffer:
    def test_over_samples_until_a_batch_is_full(self) -> None:
        """Groups without variance are dropped; each frees a place for another one."""

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            valid: list[list[Sample]] = []
            while len(valid) < args.rollout_batch_size:
                for prompt in data_buffer.get_samples(args.rollout_batch_size - len(valid)):
                    odd = float(int(prompt.group_id[1:]) % 2)
                    group = [await play(prompt, 0.0), await play(prompt, odd)]
                    if odd:
                        valid.append(group)
                    else:
                        data_buffer.drop(prompt, "zero_variance")
            return valid

        service = calls(generate, FakePlanService(places=2))
        kept = [group for group, verdict in service.verdicts.items() if verdict.keep]
        assert kept == ["g1", "g3"]
        assert service.verdicts["g0"] == service.verdicts["g2"] == Verdict(False, "zero_variance")

    def test_gives_what_there_is_and_says_why_there_is_no_more(self) -> None:
        said: list[str] = []

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            assert len(data_buffer.get_samples(9)) == 4
            with pytest.raises(NoMoreWorkError) as caught:
                len(data_buffer.get_samples(1))
            said.append(str(caught.value))

        calls(generate, FakePlanService())
        assert "workers wait for the trainer; this function holds 4 prompts" in said[0]
        assert "`await data_buffer.get_samples(n)` waits" in said[0]

    def test_a_loop_that_keeps_its_own_rollouts_from_going_on_ends(self) -> None:
        async def forever(prompt: Any) -> None:
            async with prompt.rollout():
                await asyncio.sleep(60)

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            task = asyncio.ensure_future(forever(prompt))
            await until(lambda: bool(prompt.open), "the rollout")
            try:
                while not len(data_buffer.get_samples(1)):
                    pass
            finally:
                task.cancel()

        with pytest.raises(NoMoreWorkError):
            run(generate, FakePlanService(places=1))

    def test_awaited_it_waits_while_the_loop_goes_on(self) -> None:
        service = FakePlanService(places=1)

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = await data_buffer.get_samples(1)
            data_buffer.put([await play(prompt), await play(prompt)])
            asking = asyncio.ensure_future(_taken(data_buffer))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not asking.done()
            service.train()
            assert [prompt.group_id for prompt in await asking] == ["g1"]

        calls(generate, service)
        assert service.verdicts["g0"] == Verdict()

    def test_awaited_it_ends_at_its_deadline_and_says_who_is_waited_for(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            await data_buffer.get_samples(2)
            await data_buffer.get_samples(1)

        with pytest.raises(NoMoreWorkError, match=r"workers wait for the trainer.*waited 0\.2 s"):
            run(generate, FakePlanService(places=2), deadline_s=0.2)

    def test_awaited_it_gives_fewer_where_the_rest_comes_with_the_next_step(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            assert len(await data_buffer.get_samples(5)) == 3

        calls(generate, FakePlanService(places=3))

    def test_a_prompt_is_settled_once(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            first, second = data_buffer.get_samples(2)
            samples = [await play(first), await play(first)]
            data_buffer.put(samples)
            data_buffer.drop(first, "too_late")
            data_buffer.drop(second, "bad")
            assert await play(second) is None, "nothing is played of what was dropped"
            return [*samples, samples]

        service = calls(generate, FakePlanService())
        assert service.verdicts == {"g0": Verdict(), "g1": Verdict(False, "bad")}
        assert not any(name.startswith("g1") for name, _ in service.episodes)

    def test_a_retry_of_a_prompt_is_played_as_its_next_rollout(self) -> None:
        service = FakePlanService()

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            first, _ = await play(prompt), await play(prompt)
            service.extra.append(replace(service.given[0], indices=(1,), attempt=1))
            data_buffer.get_samples(1)[0]
            again = await play(prompt, 0.25)
            assert (again.index, again.attempt) == (1, 1)  # type: ignore[union-attr]
            return [first, again]

        calls(generate, service)
        assert service.episodes["g0-1", 1].reward.value == 0.25

    def test_a_group_whose_function_is_gone_is_dropped(self) -> None:
        service = FakePlanService(extra=[ReviewRequest("g77", 3, ())])

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            data_buffer.get_samples(1)[0]

        calls(generate, service)
        assert service.verdicts["g77"] == Verdict(False, "function_lost")

    @pytest.mark.parametrize("n", [0, -1, "8", 1.5])
    def test_must_be_asked_for_a_number(self, n: Any) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            data_buffer.get_samples(n)

        with pytest.raises(PlanError, match="ask for at least one prompt"):
            run(generate, FakePlanService())


async def _taken(data_buffer: Any) -> Any:
    return await data_buffer.get_samples(1)


class TestARollout:
    def sample(self, **more: Any) -> tuple[FakePlanService, list[Any]]:
        made: list[Any] = []

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            async with prompt.rollout() as rollout:
                try:
                    made.append(await rollout.sample(1.0, **more))
                except (MaskRefusedError, PlanError) as error:
                    made.append(error)
                    made.append(await rollout.sample(1.0))

        return calls(generate, FakePlanService()), made

    def test_a_sample_has_its_tokens(self) -> None:
        service, (sample,) = self.sample()
        assert (sample.tokens, sample.logprobs) == (ROW.token_ids, ROW.logprobs)
        assert (sample.loss_mask, sample.versions) == ((0, 0, 1, 1, 0), (None, None, 3, 3, None))
        assert (sample.group_id, sample.index, sample.task) == ("g0", 0, TASKS[0])
        assert service.masks == {"g0-0": None}, "the service masks by itself"

    def test_a_mask_by_hand_as_a_list_or_a_function(self) -> None:
        def only_the_last(row: SessionRow) -> Sequence[int]:
            mask = row.loss_mask
            mask[2] = 0
            return mask

        for mask in ([0, 0, 0, 1, 0], [[0, 0, 0, 1, 0]], (False, False, False, True, False), only_the_last):
            service, (sample,) = self.sample(loss_mask=mask)
            assert service.masks == {"g0-0": [[0, 0, 0, 1, 0]]}
            assert sample.loss_mask == (0, 0, 0, 1, 0)

    def test_law_2_refuses_a_mask_and_the_rollout_goes_on(self) -> None:
        _, (error, sample) = self.sample(loss_mask=[1, 0, 1, 1, 0])
        assert isinstance(error, MaskRefusedError)
        assert sample.loss_mask == (0, 0, 1, 1, 0)

    def test_a_mask_for_another_number_of_rows_is_refused(self) -> None:
        _, (error, _) = self.sample(loss_mask=[[0] * 5, [0] * 5])
        assert "has 1 branches" in str(error)

    def test_a_reward_that_is_no_number_is_refused(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            return await play(prompt, float("nan"))

        with pytest.raises(PlanError, match="every rollout of a call ended") as caught:
            run(generate, FakePlanService())
        assert "the reward is nan" in str(caught.value.__cause__)

    def test_there_are_no_more_than_the_group_has(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            for _ in range(3):
                await play(prompt)

        with pytest.raises(PlanError, match="all 2 rollouts of prompt g0 were begun"):
            run(generate, FakePlanService())

    def test_one_that_is_left_without_a_sample_has_no_reward(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            async with prompt.rollout():
                pass
            return await play(prompt)

        service = calls(generate, FakePlanService())
        left = service.episodes["g0-0", 0]
        assert (left.reward.value, left.stop_reason, left.error) == (None, StopReason.CANCELLED, None)
        assert service.verdicts == {"g0": Verdict()}

    def test_one_that_is_cancelled_is_closed(self) -> None:
        async def slow(prompt: Any) -> Any:
            async with prompt.rollout():
                await asyncio.sleep(60)

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            task = asyncio.ensure_future(slow(prompt))
            await asyncio.to_thread(lambda: wait_for(lambda: prompt.open, "the rollout"))
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return await play(prompt)

        service = calls(generate, FakePlanService())
        wait_for(lambda: ("g0-0", 0) in service.episodes, "its end")
        assert service.episodes["g0-0", 0].stop_reason is StopReason.CANCELLED


class TestFaults:
    def test_of_one_rollout_are_its_own(self) -> None:
        async def broken(prompt: Any) -> Any:
            async with prompt.rollout():
                raise RuntimeError("the tool broke")

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            return await asyncio.gather(broken(prompt), play(prompt))

        service = calls(generate, FakePlanService())
        episode = service.episodes["g0-0", 0]
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
        assert "RuntimeError: the tool broke" in str(episode.error)
        assert service.verdicts == {"g0": Verdict()}

    def test_of_the_function_end_the_runner_with_the_users_trace(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            run(generate, FakePlanService())
        assert caught.traceback[-1].name == "generate"

    def test_of_every_rollout_are_a_fault_of_the_function(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            async with prompt.rollout() as rollout:
                rollout.no_such_thing  # noqa: B018

        with pytest.raises(PlanError, match="every rollout of a call ended") as caught:
            run(generate, FakePlanService())
        assert isinstance(caught.value.__cause__, AttributeError)

    def test_of_the_service_are_not_the_functions(self) -> None:
        """A group of faults alone is told to the service as kept: its own filter calls it so."""

        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            (prompt,) = data_buffer.get_samples(1)
            assert await play(prompt) is None

        service = calls(generate, FakePlanService(refuse_open=True))
        assert service.verdicts == {"g0": Verdict()}


class TestTheModel:
    """Through the official client, against a scripted endpoint."""

    @contextmanager
    def scripted(self, script: Any) -> Iterator[FakePlanService]:
        with listening(FakePlanService(script=script)) as service:
            yield service  # type: ignore[misc]

    async def generate(self, args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        samples = []
        for prompt in data_buffer.get_samples(1):
            async with prompt.rollout() as rollout:
                reply = await rollout.client.chat.completions.create(model="policy", messages=prompt.messages)
                said = str(reply.choices[0].message.content)
                scored = await rollout.score()
                (branch,) = await rollout.conversation()
                assert branch[-1]["content"] == said
                samples.append(await rollout.sample(scored, truncated=len(said) > 5))
        return samples

    def test_is_reached_by_a_client_and_scored_by_the_environment(self) -> None:
        def script(key: str, messages: Sequence[Message]) -> Message:
            return {"role": "assistant", "content": "x" * 30}

        with self.scripted(script) as service:
            calls(self.generate, service)
        episode = service.episodes["g0-0", 0]
        assert episode.reward.value == 0.3
        assert (episode.truncated, episode.terminated) == (True, False)

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            ((400, failure("context_length_exceeded")), StopReason.CONTEXT),
            ((400, failure("invalid_value")), StopReason.INFRA),
        ],
    )
    def test_a_full_window_is_no_fault_and_another_refusal_is(self, answer: Any, reason: StopReason) -> None:
        with self.scripted(lambda key, messages: answer) as service:
            calls(self.generate, service)
        episode = service.episodes["g0-0", 0]
        assert (episode.reward.value, episode.stop_reason) == (None, reason)


class TestEvaluation:
    def test_plays_given_tasks_and_keeps_nothing(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            assert (evaluation, rollout_id) == (True, 12)
            prompts = data_buffer.get_samples(2)
            assert [prompt.task.id for prompt in prompts] == ["t1", "t4"]
            return [await play(prompt, 0.5, loss_mask=[1] * 5) for prompt in prompts for _ in range(prompt.n_samples)]

        runner = FunctionRunner(generate, args(), Talk, TASKS)
        service = FakePlanService()
        samples = runner.evaluate([(1, TASKS[1]), (4, TASKS[4])], service, rollout_id=12, repeats=3)
        runner.close()
        assert [(sample.group_id, sample.index, sample.reward) for sample in samples] == [
            (f"eval-{task}", index, 0.5) for task in (1, 4) for index in range(3)
        ]
        assert service.verdicts == {}
        assert set(service.masks.values()) == {None}

    def test_the_example_plays_every_task_of_it(self) -> None:
        example = Path(__file__).resolve().parent.parent / "examples" / "rollout_function" / "rollout.py"
        function = load_function(f"{example}:generate_rollout")
        with listening(FakePlanService(script=lambda key, messages: {"role": "assistant", "content": "1"})) as service:
            runner = FunctionRunner(function, args(groups_per_step=3), Talk, TASKS)
            samples = runner.evaluate(list(enumerate(TASKS[:3])), service, repeats=2)
            runner.close()
        assert [sample.task.id for sample in samples] == ["t0", "t0", "t1", "t1", "t2", "t2"]
        assert [sample.components["right"] for sample in samples] == [0, 0, 1, 1, 0, 0]

    def test_a_loop_for_more_than_there_are_ends(self) -> None:
        async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
            while True:
                for prompt in data_buffer.get_samples(2):
                    await play(prompt)

        runner = FunctionRunner(generate, args(), Talk, TASKS)
        with pytest.raises(NoMoreWorkError, match="all tasks of this evaluation were given"):
            runner.evaluate([(0, TASKS[0])], FakePlanService())
        runner.close()


def test_a_wish_to_stop_cancels_the_function() -> None:
    seen: list[str] = []

    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        seen.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    stopping, runner, service = threading.Event(), FunctionRunner(generate, args(), Talk, TASKS), FakePlanService()
    with running(lambda: runner.train(service, service.work, stopping), stopping):
        wait_for(lambda: seen, "the call")
    runner.close()
    assert seen == ["begun", "ended"]


def test_a_group_of_a_task_itself_needs_no_source() -> None:
    task = Task("of a file", 1, "f1")
    service = FakePlanService(extra=[GroupAssignment("g50", 2, 0, task, 1)])

    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        (prompt,) = data_buffer.get_samples(1)
        assert prompt.task is task

    calls(generate, service)
