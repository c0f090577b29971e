"""Functions that make rollouts, against the real service on a fake engine: what reaches the buffer, masks, and where every token went."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.agents.plans.types import MaskRefusedError, SessionRow
from palestra.server.types import TokenSource
from tests.live import wait_for
from tests.plans import Scene, running, scene

pytestmark = pytest.mark.walk


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, program="function") as made:
        yield made


def started(played: Scene, function: Any, *, fails: bool = False, **algo: Any) -> Any:
    runner = played.runner(function, **algo)

    def work() -> None:
        played.client.register_worker(6)
        try:
            runner.train(played.service, played.service.ask, played.stopping)
        finally:
            runner.close()

    return running(work, played.stopping, fails=fails)


async def talk(prompt: Any, turns: int = 1, **more: Any) -> Any:
    """A conversation of so many turns, rewarded by the prompt's seed and its index."""
    async with prompt.rollout() as rollout:
        messages = prompt.messages
        for _ in range(turns):
            reply = await rollout.client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "Go on."})
        return await rollout.sample(float(rollout.index), **more)


async def plain(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """As such functions are written: plain `get_samples`, `gather` over prompts and rollouts."""
    prompts = data_buffer.get_samples(args.rollout_batch_size)
    return await asyncio.gather(*(talk(prompt) for prompt in prompts for _ in range(args.n_samples_per_prompt)))


def test_steps_of_a_plain_function(played: Scene) -> None:
    with started(played, plain):
        steps = [played.train(step, 2) for step in (1, 2)]
    groups = [group for step in steps for group in step]
    assert sorted(group.group_id for group in groups) == ["g000000", "g000001", "g000002", "g000003"]
    assert all(dict(group.rewards) == {f"{group.group_id}-{i}": float(i) for i in (0, 1)} for group in groups)
    assert played.ledger().balanced


def test_a_mask_by_hand_reaches_the_trainer_and_law_2_is_kept(played: Scene) -> None:
    """The first reply alone is trained; a 1 on any other token is refused, and the rollout goes on."""
    refused: list[str] = []

    def first_reply(row: SessionRow) -> Sequence[int]:
        mask, begun = row.loss_mask, False
        for place, one in enumerate(mask):
            if begun and not one:
                return mask[:place] + [0] * (len(mask) - place)
            begun = begun or bool(one)
        return mask

    async def masked(prompt: Any) -> Any:
        async with prompt.rollout() as rollout:
            messages = prompt.messages
            for _ in range(2):
                reply = await rollout.client.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "Go on."})
            (row,) = await rollout.rows()
            for wrong in ([1] * len(row), row.loss_mask[:-1]):
                try:
                    await rollout.sample(1.0, loss_mask=wrong)
                except MaskRefusedError as error:
                    refused.append(str(error))
            sample = await rollout.sample(float(rollout.index), loss_mask=first_reply)
            assert sample.loss_mask == tuple(first_reply(row))
            assert sample.tokens == row.token_ids
            return sample

    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        prompts = data_buffer.get_samples(args.rollout_batch_size)
        return await asyncio.gather(*(masked(prompt) for prompt in prompts for _ in range(2)))

    with started(played, generate):
        groups = played.claim(2)
    assert len(refused) == 8
    assert "mask" in refused[0]
    for row in (row for group in groups for row in group.samples):
        sampled = row.sources == TokenSource.SAMPLED
        assert 0 < row.loss_mask.sum() < sampled.sum(), "the second reply is not trained"
        assert not (row.loss_mask.astype(bool) & ~sampled).any()
        assert np.isfinite(row.logprobs[row.loss_mask == 1]).all()
    ledger = played.ledger()
    assert ledger.balanced, ledger.lines()


def test_over_sampling_fills_a_batch_and_every_token_is_accounted_for(played: Scene) -> None:
    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        valid: list[Any] = []
        while len(valid) < args.rollout_batch_size:
            prompts = data_buffer.get_samples(args.rollout_batch_size - len(valid))
            groups = await asyncio.gather(*(asyncio.gather(talk(prompt), talk(prompt)) for prompt in prompts))
            for prompt, group in zip(prompts, groups, strict=True):
                if int(prompt.group_id[1:]) % 2:
                    valid.append(group)
                else:
                    data_buffer.drop(prompt, "boring")
        return valid

    with started(played, generate):
        groups = [group for step in (1, 2) for group in played.train(step, 2)]
    assert sorted(group.group_id for group in groups) == ["g000001", "g000003", "g000005", "g000007"]
    assert played.dropped()["dropped(filtered(boring))"] >= 4
    ledger = played.ledger()
    assert ledger.balanced, ledger.lines()
    assert any("boring" in reason for reason in ledger.discarded)


def test_a_part_of_a_group_a_dropped_one_and_one_that_goes_on(played: Scene) -> None:
    """What is not returned is never trained; what is dropped while it plays is ended; each is on record under a reason."""
    dropped: list[Any] = []

    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        first, second = data_buffer.get_samples(2)
        one, _ = await talk(first), await talk(first)
        async with second.rollout() as rollout:
            await rollout.client.chat.completions.create(model="policy", messages=second.messages)
            data_buffer.drop(second, "enough")
            dropped.append(await rollout.sample(1.0))
        third = (await data_buffer.get_samples(1))[0]
        return [one, await talk(third), await talk(third)]

    with started(played, generate):
        groups = played.claim(2)
        wait_for(lambda: played.dropped().get("dropped(filtered(enough))"), "the dropped group")
    assert {group.group_id: len(group.rewards) for group in groups} == {"g000000": 1, "g000002": 2}
    assert dropped == []
    ledger = played.ledger()
    assert ledger.balanced, ledger.lines()


def test_a_fault_of_one_rollout_leaves_the_others_and_is_played_once(played: Scene) -> None:
    broken: list[str] = []

    async def breaks(prompt: Any) -> Any:
        async with prompt.rollout() as rollout:
            await rollout.client.chat.completions.create(model="policy", messages=prompt.messages)
            broken.append(rollout.rollout_id)
            raise RuntimeError("the tool broke")

    async def generate(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        prompts = data_buffer.get_samples(args.rollout_batch_size)
        return await asyncio.gather(*(play(prompt) for prompt in prompts for play in (breaks, talk)))

    with started(played, generate):
        groups = played.claim(2)
    assert [len(group.rewards) for group in groups] == [1, 1]
    sessions = played.live.service.log.reader.read_sessions()
    faulted = [session for session in sessions if session.record.rollout_id in broken]
    assert {session.record.attempt for session in faulted} == {0}, "what a function plays is its own to play again"
    assert all("the tool broke" in str(session.outcome.error) for session in faulted if session.outcome is not None)
    assert played.ledger().balanced


def test_a_restart_of_the_worker_hands_groups_out_whole(tmp_path: Path) -> None:
    """The service's process is gone as well: what was open is played again by a new function, under new attempts."""
    gone = asyncio.Event()

    async def leaves(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
        for prompt in data_buffer.get_samples(2):
            await talk(prompt)
        gone.set()
        await asyncio.sleep(60)

    with scene(tmp_path, program="function") as before, started(before, leaves):
        wait_for(gone.is_set, "half of each group")
    with scene(tmp_path, program="function") as after:
        with started(after, plain):
            groups = after.claim(2)
        assert {group.group_id for group in groups} == {"g000000", "g000001"}
        assert all(row.attempt >= 1 for group in groups for row in group.samples)
        ledger = after.ledger()
        assert ledger.balanced, ledger.lines()
        assert ledger.discarded["restart"] > 0
