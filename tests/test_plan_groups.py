"""The plan over a real log and buffer: schedules, budgets, reviews, masks, and what a restart finds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.agents.types import Verdict
from palestra.server.ledger import read_ledger
from palestra.server.plan.finishing import MASK
from palestra.server.plan.reviews import ANSWER_S
from palestra.server.plan.types import WorkerFacts
from palestra.server.types import SessionError, TokenSource
from tests.planscene import PlanScene

Scenario = Callable[[PlanScene], Awaitable[None]]


def run(folder: Path, scenario: Scenario, *, begin: tuple[int, int] | None = (0, 0), **changes: Any) -> None:
    """Plays a scenario on a plan of its own."""

    async def whole() -> None:
        scene = PlanScene(folder, **changes)
        try:
            if begin is not None:
                await scene.begin(*begin)
            await scenario(scene)
        finally:
            await scene.close()

    asyncio.run(whole())


def test_a_synchronous_run_opens_a_batch_and_waits_for_the_publish(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        first, second = await scene.work(), await scene.work()
        assert await scene.idle()
        await scene.play(first)
        assert await scene.claim() == [], "never short without a budget"
        await scene.play(second, {0: 1.0, 1: 1.0})  # dropped: its place is free again
        third = await scene.work()
        assert third.group_id == "g000002"
        await scene.play(third)
        assert await scene.train(publish=False) == ["g000000", "g000002"]
        assert await scene.idle(), "the weights of the step are not out"
        scene.publish()
        assert (await scene.work()).group_id == "g000003"

    run(tmp_path, scenario)


def test_what_is_over_is_kept_for_the_next_step(tmp_path: Path) -> None:
    """Over-sampling: three groups for a batch of two; the third is trained a step later, and one fewer is opened for it."""

    async def scenario(scene: PlanScene) -> None:
        works = [await scene.work() for _ in range(3)]
        assert await scene.idle()
        for work in reversed(works):
            await scene.play(work)
        assert await scene.train() == ["g000002", "g000001"], "the first that were ready"
        fourth, fifth = await scene.work(), await scene.work()
        assert await scene.idle()
        await scene.play(fourth)
        assert await scene.train() == ["g000000", "g000003"]
        await scene.play(fifth)
        assert scene.buffer.counts()["dropped"] == 0

    run(tmp_path, scenario, staleness=1, ahead=0, oversample=1.5)


def test_rollouts_in_flight_are_bounded(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        first = await scene.work()
        assert await scene.idle(), "two of at most three rollouts play, and a group has two"
        await scene.end(await scene.open(first, 0), 0.0)
        second = await scene.work()
        assert await scene.idle()
        await scene.play(second)

    run(tmp_path, scenario, staleness=5, max_in_flight=3)


@pytest.mark.parametrize("budget", [{"budget_s": 10.0}, {"budget_tokens": 9}])
def test_a_step_takes_what_is_ready_when_its_budget_is_spent(tmp_path: Path, budget: dict[str, Any]) -> None:
    async def scenario(scene: PlanScene) -> None:
        first, straggler = await scene.work(), await scene.work()
        scene.now += 10.0 if "budget_s" in budget else 0.0
        assert await scene.claim() == [], "nothing is ready"
        await scene.play(first, tokens=2)
        if "budget_tokens" in budget:
            assert await scene.claim() == []
        long = await scene.open(straggler, 0, tokens=5)
        assert await scene.train() == ["g000000"]
        assert not scene.plan.budget.spent, "a budget is of one step"
        assert (await scene.work()).group_id == "g000002", "what goes on counts for the next batch"
        assert await scene.idle()
        await scene.end(long, 0.0)
        await scene.end(await scene.open(straggler, 1, tokens=5), 1.0)
        (group,) = (await scene.claim(1),)[0]
        assert sorted({span.version for row in group.samples for span in row.spans}) == [0, 1]

    run(tmp_path, scenario, staleness=1, ahead=0, **budget)


def test_a_short_step_has_a_floor(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        works = [await scene.work() for _ in range(4)]
        scene.now += 10.0
        await scene.play(works[0])
        assert await scene.claim(4) == []
        await scene.play(works[1])
        assert len(await scene.claim(4)) == 2

    run(tmp_path, scenario, staleness=1, ahead=0, groups_per_step=4, budget_s=1.0, least=2)


async def _old_and_new(scene: PlanScene) -> str:
    """A group whose first rollout is of version 0, and whose second is of version 2, when the bound is 1."""
    other, old = await scene.work(), await scene.work()
    early = await scene.open(old, 0, tokens=4)
    await scene.play(other)
    await scene.train(1)
    await scene.play(await scene.work())
    await scene.train(1)
    await scene.end(early, 0.0)
    await scene.end(await scene.open(old, 1, tokens=3), 1.0)
    return old.group_id


def test_beyond_the_bound_a_group_is_dropped_and_counted_by_length(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        name = await _old_and_new(scene)
        assert await scene.claim(1) == []
        assert scene.buffer.dropped("stale") == [name]
        figures = scene.plan.metrics.take()
        assert figures["staleness/dropped_rows_to_512/count"] == 2.0
        assert figures["rollout/dropped_stale/count"] == 1.0

    run(tmp_path, scenario, staleness=1, ahead=0, budget_s=0.001, groups_per_step=2)
    assert read_ledger(tmp_path).balanced
    assert read_ledger(tmp_path).discarded["stale"] == 7


def test_beyond_the_bound_tokens_are_masked_and_the_rest_is_trained(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        name = await _old_and_new(scene)
        (group,) = await scene.claim(1)
        assert group.group_id == name
        old, new = group.samples
        assert not old.loss_mask.any()
        assert (old.sources[2:] == TokenSource.STALE).all()
        assert new.loss_mask[2:].all()
        assert scene.plan.metrics.take()["staleness/masked_tokens_to_512/count"] == 4.0
        scene.buffer.commit(3, "step_3", [name], "trainer")

    run(tmp_path, scenario, staleness=1, ahead=0, budget_s=0.001, mask_old=True)
    ledger = read_ledger(tmp_path)
    assert ledger.balanced
    assert ledger.masked == {"stale": 4}


def test_a_group_of_which_nothing_is_left_is_dropped_and_another_takes_its_place(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        first, second = await scene.work(), await scene.work()
        record = await scene.open(first, 0)
        await scene.end(record, 0.0)
        await scene.log.open_session(type(record)(f"{first.group_id}-1", 0, first.group_id, "task", 1))
        await scene.end(type(record)(f"{first.group_id}-1", 0, first.group_id, "task", 1), 1.0)  # no turn of its own
        await scene.play(second)
        scene.step = 2
        scene.publish()
        scene.plan.committed(2)
        await scene.play(await scene.work())
        groups = await scene.claim(1)
        assert [group.group_id for group in groups] == ["g000002"]

    run(tmp_path, scenario, staleness=1, mask_old=True, min_group=1, drop_zero_variance=False)


def test_tokens_of_earlier_versions_can_be_left_out(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        work = await scene.work()
        early = await scene.open(work, 0)
        await scene.play(await scene.work())
        await scene.train(1)
        from tests.fakes.rollouts import turn

        await scene.log.append_turn(early.rollout_id, 0, turn(1, 0, [3], [20, 21], version=scene.version))
        await scene.end(early, 0.0)
        await scene.end(await scene.open(work, 1), 1.0)
        (group,) = await scene.claim(1)
        both, new = group.samples
        assert both.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
        assert new.loss_mask.sum() == 3

    run(tmp_path, scenario, staleness=2, ahead=0, budget_s=0.001, mask_earlier=True)


def test_fewer_rollouts_than_asked_are_enough_where_the_run_says_so(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        rewards: dict[int, float | None] = {0: 0.0, 1: 1.0, 2: None}
        await scene.play(await scene.work(), rewards)
        await scene.play(await scene.work(), {0: 0.0, 1: None, 2: None})
        (group,) = await scene.claim(1)
        assert (group.group_size, len(group.rewards)) == (3, 2)
        assert scene.buffer.dropped("infra") == ["g000001"]

    run(tmp_path, scenario, group_size=3, min_group=2, retries=0)


def test_groups_that_limits_cut_are_dropped_beyond_a_share(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        await scene.play(await scene.work(), truncated=True)
        assert scene.buffer.dropped("length") == ["g000000"]

    run(tmp_path, scenario, max_truncated=0.5)


def test_a_review_decides_and_may_change_rewards(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        first, second = await scene.work(), await scene.work()
        await scene.play(first, {0: 1.0, 1: 1.0})
        await scene.play(second)
        review = await scene.review()
        assert [(r.index, r.reward, r.tokens, r.turns) for r in review.rollouts] == [(0, 1.0, 3, 1), (1, 1.0, 3, 1)]
        other = await scene.review()
        assert await scene.idle(), "both are asked about, and count as open"
        scene.now += ANSWER_S + 1
        assert (await scene.review()).group_id == review.group_id, "its worker does not answer: another is asked"
        await scene.plan.judge(review.group_id, Verdict(rewards={0: 0.25}))
        await scene.plan.judge(other.group_id, Verdict(keep=False, reason="boring"))
        await scene.plan.judge(other.group_id, Verdict(keep=True))  # repeated: the first one counts
        (group,) = await scene.claim(1)
        assert dict(group.rewards) == {"g000000-0": 0.25, "g000000-1": 1.0}
        assert scene.buffer.dropped("filtered(boring)") == ["g000001"]
        work = await scene.work()
        await scene.play(work)
        with pytest.raises(SessionError, match="not within a group of 2"):
            await scene.plan.judge(work.group_id, Verdict(rewards={2: 0.0}))
        await scene.plan.judge(work.group_id, Verdict())
        assert scene.buffer.ready_count() == 1, "a verdict that was refused changes nothing"
        with pytest.raises(SessionError, match="no group g000999"):
            await scene.plan.judge("g000999", Verdict())

    run(tmp_path, scenario, program="plan", facts=WorkerFacts(5, reviews=True))
    assert read_ledger(tmp_path).balanced


def test_after_a_restart_complete_groups_are_asked_about_again(tmp_path: Path) -> None:
    async def before(scene: PlanScene) -> None:
        await scene.play(await scene.work())
        await scene.review()

    async def after(scene: PlanScene) -> None:
        review = await scene.review()
        await scene.plan.judge(review.group_id, Verdict())
        assert scene.buffer.ready_count() == 1

    facts = WorkerFacts(5, reviews=True)
    run(tmp_path, before, program="plan", facts=facts)
    run(tmp_path, after, program="plan", facts=facts)


def test_a_plan_without_reviews_costs_none(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        await scene.play(await scene.work())
        assert scene.buffer.ready_count() == 1

    run(tmp_path, scenario, program="plan")


def test_a_verdict_on_a_group_that_goes_on_ends_what_is_left_of_it(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        work = await scene.work()
        await scene.end(await scene.open(work, 0), 0.5)
        going_on = await scene.plan.judge(work.group_id, Verdict(keep=True))
        assert going_on == [(f"{work.group_id}-1", 0)]
        await scene.plan.give_up(work.group_id, *going_on[0], "unplayed")
        assert scene.buffer.ready_count() == 1
        skipped = await scene.work()
        for rollout_id, attempt in await scene.plan.judge(skipped.group_id, Verdict(keep=False, reason="too_easy")):
            await scene.plan.give_up(skipped.group_id, rollout_id, attempt, "x")
        assert scene.buffer.dropped("filtered(too_easy)") == [skipped.group_id]
        assert not scene.plan.book.groups

    run(tmp_path, scenario, program="function", drop_zero_variance=False)


def test_a_function_that_forgets_a_group_loses_it_by_name(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        await scene.play(await scene.work())
        assert scene.buffer.ready_count() == 0, "its function has not said anything yet"
        await scene.plan.expire()
        scene.now += scene.settings.rollout_deadline_s + 1
        await scene.plan.expire()
        assert scene.buffer.dropped("filtered(unreviewed)") == ["g000000"]

    run(tmp_path, scenario, program="function")


def test_a_mask_made_by_hand_is_what_is_trained(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        work = await scene.work()
        record = await scene.open(work, 0)
        await scene.log.add_event(record.rollout_id, 0, MASK, {"masks": [[0, 0, 1, 0, 1]]})
        await scene.end(record, 0.0)
        await scene.end(await scene.open(work, 1), 1.0)
        (group,) = await scene.claim(1)
        assert [row.loss_mask.tolist() for row in group.samples] == [[0, 0, 1, 0, 1], [0, 0, 1, 1, 1]]
        scene.buffer.commit(1, "step_1", [work.group_id], "trainer")

    run(tmp_path, scenario)
    ledger = read_ledger(tmp_path)
    assert ledger.balanced
    assert (ledger.trained, ledger.masked) == (5, {"by_mask": 1})


def test_the_task_of_an_abandoned_group_lives_again(tmp_path: Path) -> None:
    """The trainer goes back to step 0: what was sampled by the lost weights is dropped, and each of its tasks is played again, once."""

    async def before(scene: PlanScene) -> None:
        for _ in range(2):
            await scene.play(await scene.work())
        await scene.train()
        late, open_ = await scene.work(), await scene.work()
        await scene.play(late)
        await scene.open(open_, 0)

    async def after(scene: PlanScene) -> None:
        await scene.begin(0, 0)
        assert scene.buffer.dropped("abandoned") == ["g000002"]
        assert scene.buffer.ready_count() == 2, "the groups of the lost step are trained again"
        works = [await scene.work() for _ in range(3)]
        assert {(w.group_id, w.indices, w.attempt) for w in works} == {
            ("g000002.1", (0, 1), 0),
            ("g000003", (1,), 0),
            ("g000003", (0,), 1),
        }
        assert next(w for w in works if w.group_id == "g000002.1").task == 2
        await scene.plan.restored(0)  # said again
        scene.publish()
        assert await scene.idle()
        for work in works:
            await scene.play(work)
        assert scene.buffer.ready_count() == 4

    run(tmp_path, before, staleness=1)
    run(tmp_path, after, begin=None, staleness=1)
    assert read_ledger(tmp_path).balanced


def test_a_group_that_ends_with_abandoned_tokens_is_owed(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        for _ in range(2):
            await scene.play(await scene.work())
        await scene.train()
        work = await scene.work()
        record = await scene.open(work, 0)
        scene.buffer.restore(0, 0)
        await scene.plan.restored(0)
        scene.step = 0
        scene.publish()
        await scene.end(record, 0.0)
        await scene.end(await scene.open(work, 1), 1.0)
        assert scene.buffer.dropped("abandoned") == [work.group_id]
        assert (await scene.work()).group_id == f"{work.group_id}.1"

    run(tmp_path, scenario, staleness=1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_restart_keeps_what_ended_and_leads_on_what_can_be_led(tmp_path: Path, deterministic: bool) -> None:
    facts = WorkerFacts(5, deterministic=deterministic)

    async def before(scene: PlanScene) -> None:
        work = await scene.work()
        await scene.end(await scene.open(work, 0), 0.0)
        await scene.open(work, 1)

    async def after(scene: PlanScene) -> None:
        work = await scene.work()
        assert (work.indices, work.replay, work.attempt) == ((1,), deterministic, 0 if deterministic else 1)
        if deterministic:
            await scene.end((await asyncio.to_thread(scene.log.reader.read_sessions))[1].record, 1.0)
        else:
            await scene.end(await scene.open(work, 1), 1.0)
        (group,) = await scene.claim(1)
        assert dict(group.rewards) == {"g000000-0": 0.0, "g000000-1": 1.0}
        assert np.concatenate([row.token_ids for row in group.samples]).size == 10

    run(tmp_path, before, facts=facts)
    run(tmp_path, after, facts=facts)
    assert read_ledger(tmp_path).discarded.get("restart", 0) == (0 if deterministic else 3)


def test_a_function_begins_its_groups_anew_after_a_restart(tmp_path: Path) -> None:
    async def before(scene: PlanScene) -> None:
        work = await scene.work()
        await scene.end(await scene.open(work, 0), 0.0)

    async def after(scene: PlanScene) -> None:
        work = await scene.work()
        assert (work.indices, work.attempt) == ((0, 1), 1)
        await scene.play(work)  # complete, and its function dies before it has said anything of it

    async def last(scene: PlanScene) -> None:
        work = await scene.work()
        assert (work.indices, work.attempt) == ((0, 1), 2)

    for scenario in (before, after, last):
        run(tmp_path, scenario, program="function")


def test_a_lost_worker_s_rollout_is_led_through_its_record_by_another(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        work = await scene.work()
        await scene.open(work, 0)
        await scene.end(await scene.open(work, 1), 1.0)
        scene.now += scene.settings.rollout_deadline_s + 1
        assert await scene.plan.expire() == []
        again = await scene.work()
        assert (again.indices, again.attempt, again.replay) == ((0,), 0, True)
        scene.now += scene.settings.rollout_deadline_s + 1
        assert await scene.plan.expire() == [("g000000-0", 0)], "played again often enough"

    run(tmp_path, scenario, facts=WorkerFacts(5, deterministic=True))


def test_workers_say_how_often_tasks_are_drawn_and_where_they_end(tmp_path: Path) -> None:
    async def scenario(scene: PlanScene) -> None:
        assert [(await scene.work()).task for _ in range(3)] == [0, 1, 2], "without an end: one after the other"
        scene.plan.register(WorkerFacts(4, weights=[0, 0, 0, 1]))
        assert [(await scene.work()).task for _ in range(3)] == [3, 3, 3]
        with pytest.raises(ValueError, match="environments differ"):
            scene.plan.register(WorkerFacts(5))
        with pytest.raises(ValueError, match="3 weights for 4 tasks"):
            scene.plan.register(WorkerFacts(4, weights=[1, 1, 1]))

    run(tmp_path, scenario, facts=WorkerFacts(None), staleness=5)
