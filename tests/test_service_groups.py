"""Groups through the service, against a real engine: work, faults, filters, claims, publishes, and a restart in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from palestra.agents.types import GroupAssignment, SessionHandle
from palestra.envs.types import Episode, Reward, StopReason
from palestra.server.client import ServiceClient, ServiceError
from palestra.server.ledger import read_ledger
from palestra.server.types import LeaseLost, PublishMode
from tests.live import TOKEN, LiveService, engine_process, settings, wait_for

pytestmark = pytest.mark.walk
QUESTION = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def own_engine(tiny_moe: Path) -> Iterator[str]:
    """An engine whose weights these tests may change."""
    with engine_process(tiny_moe, "--context-length", "1024") as url:
        yield url


@pytest.fixture
def live(tmp_path: Path, own_engine: str, tiny_moe: Path) -> Iterator[LiveService]:
    with LiveService(settings(tmp_path / "store", own_engine), tiny_moe) as service:
        yield service


@pytest.fixture
def client(live: LiveService) -> Iterator[ServiceClient]:
    client = ServiceClient(live.url, TOKEN)
    client.register_worker(5)
    yield client
    client.close()


def begin(client: ServiceClient, model: Path) -> None:
    """What a trainer does first: its starting weights become the next version."""
    version = client.restore(train_step=0, checkpoint_id=None, policy_version=0)
    client.publish_begin(version, 0)
    client.publish_end(version, str(model))


def episode(reward: float | None) -> Episode:
    stop = StopReason.INFRA if reward is None else StopReason.ANSWER
    return Episode("t", (), (), Reward(reward), (reward,), stop, reward is not None, False, 1)


def play(live: LiveService, client: ServiceClient, work: GroupAssignment, rewards: dict[int, float | None]) -> None:
    """One model call per rollout, then the given rewards."""
    for index in work.rollouts:
        handle = client.open_session(work, index, "t")
        assert live.chat(handle.api_key, QUESTION).status_code == 200
        client.close_session(handle, episode(rewards[index]))


def next_work(client: ServiceClient) -> GroupAssignment:
    work = client.work(wait_s=5.0)
    assert work is not None
    return work


def test_nothing_is_handed_out_before_the_first_publish(client: ServiceClient, tiny_moe: Path) -> None:
    assert client.work(wait_s=0.1) is None
    begin(client, tiny_moe)
    assert next_work(client).group_id == "g000000"


def test_a_step_from_work_to_commit(live: LiveService, client: ServiceClient, tiny_moe: Path) -> None:
    begin(client, tiny_moe)
    first, second = next_work(client), next_work(client)
    assert client.work(wait_s=0.1) is None, "a synchronous run opens one batch"
    assert first.task != second.task
    play(live, client, first, {0: 0.0, 1: 1.0})
    with pytest.raises(TimeoutError, match=r"trainer waits .* for 1 of 2 groups"):
        client.claim(2, "me", 30.0, 0.3)
    play(live, client, second, {0: 0.5, 1: 0.0})
    groups = client.claim(2, "me", 30.0, 10.0)
    assert [g.group_id for g in groups] == ["g000000", "g000001"]
    assert dict(groups[0].rewards) == {"g000000-0": 0.0, "g000000-1": 1.0}
    for row in (row for group in groups for row in group.samples):
        assert np.isfinite(row.logprobs[row.loss_mask == 1]).all()
        assert [span.version for span in row.spans] == [0]
    ids = [g.group_id for g in groups]
    assert client.renew(ids, "me", 30.0) == 2
    with pytest.raises(LeaseLost):
        client.commit(1, "step_0", ids, "somebody else")
    assert client.commit(1, "step_0", ids, "me") == 2
    assert client.commit(1, "step_0", ids, "me") == 2, "a lost reply is asked for again"
    assert client.work(wait_s=0.1) is None, "the next batch waits for the new weights"
    assert read_ledger(live.service.settings.store).balanced


def test_equal_rewards_are_dropped_and_replaced(live: LiveService, client: ServiceClient, tiny_moe: Path) -> None:
    begin(client, tiny_moe)
    work = next_work(client)
    play(live, client, work, {0: 1.0, 1: 1.0})
    assert live.service.buffer.counts()["dropped(zero_variance)"] == 1
    assert [next_work(client).group_id for _ in range(2)] == ["g000001", "g000002"]
    metrics = client.step_metrics()
    assert metrics["reward/total/mean"] == 1.0
    assert metrics["rollout/dropped_zero_variance/count"] == 1.0


def test_a_fault_is_played_again_and_never_scored_as_zero(
    live: LiveService, client: ServiceClient, tiny_moe: Path
) -> None:
    begin(client, tiny_moe)
    work = next_work(client)
    play(live, client, work, {0: None, 1: 1.0})
    again = next_work(client)
    assert (again.group_id, again.rollouts, again.attempt) == (work.group_id, (0,), 1)
    play(live, client, again, {0: 0.0})
    entry = live.service.buffer.counts()
    assert entry["ready"] == 1
    ledger = read_ledger(live.service.settings.store)
    assert ledger.balanced
    assert ledger.discarded["infra"] > 0


def test_a_group_lost_to_faults_is_dropped_as_such(live: LiveService, client: ServiceClient, tiny_moe: Path) -> None:
    begin(client, tiny_moe)
    work = next_work(client)
    play(live, client, work, {0: None, 1: 1.0})
    play(live, client, next_work(client), {0: None})
    assert live.service.buffer.counts()["dropped(infra)"] == 1
    assert read_ledger(live.service.settings.store).balanced


def test_new_weights_by_folder_and_by_value(live: LiveService, client: ServiceClient, tiny_moe: Path) -> None:
    begin(client, tiny_moe)
    tensors = load_file(tiny_moe / "model.safetensors")
    names = sorted(tensors)
    client.publish_begin(1, 1)
    for part in (names[::2], names[1::2]):
        client.publish_bucket(save({name: tensors[name] for name in part}))
    client.publish_end(1, None)
    client.publish_begin(2, 2)
    client.publish_end(2, str(tiny_moe))
    key = live.open("r")["api_key"]
    assert live.chat(key, QUESTION).status_code == 200
    (turn,) = live.service.log.reader.read_trajectory("r").turns
    assert [span.version for span in turn.spans] == [2]


def test_versions_are_never_reused_and_bad_weights_change_nothing(
    live: LiveService, client: ServiceClient, tiny_moe: Path, tmp_path: Path
) -> None:
    begin(client, tiny_moe)
    with pytest.raises(ServiceError, match="never reused"):
        client.publish_begin(0, 0)
    with pytest.raises(ServiceError, match="no publish is open"):
        client.publish_end(1, str(tiny_moe))
    client.publish_begin(1, 1)
    with pytest.raises(ServiceError, match="nowhere"):
        client.publish_end(1, str(tmp_path / "nowhere"))
    key = live.open("r")["api_key"]
    assert live.chat(key, QUESTION).status_code == 200, "generation goes on with the old weights"
    (turn,) = live.service.log.reader.read_trajectory("r").turns
    assert [span.version for span in turn.spans] == [0]


@pytest.mark.parametrize("mode", list(PublishMode))
def test_a_publish_in_the_middle_of_a_reply_is_only_a_slow_reply(
    tmp_path: Path, own_engine: str, tiny_moe: Path, mode: PublishMode
) -> None:
    """Every update mode: the agent gets its whole reply, and each token has the version that sampled it."""
    with LiveService(settings(tmp_path / "store", own_engine, update_mode=mode), tiny_moe) as live:
        client = ServiceClient(live.url, TOKEN)
        begin(client, tiny_moe)
        limits = {"max_turns": 1, "max_response": 700, "max_context": 1000, "temperature": 1.0}
        key = live.open("r", limits=limits)["api_key"]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(live.chat, key, QUESTION)
            wait_for(lambda: live.service.engine.on_wire == 1, "the request's start")
            client.publish_begin(1, 1)
            client.publish_end(1, str(tiny_moe))
            assert reply.result(60).status_code == 200
        (turn,) = live.service.log.reader.read_trajectory("r").turns
        versions = [span.version for span in turn.spans]
        assert versions == ([0] if mode is PublishMode.FINISH else sorted(set(versions)))
        assert set(versions) <= {0, 1}
        assert turn.finish_reason in ("stop", "length")
        assert turn.finish_reason == "stop" or len(turn.completion_ids) == 700


def test_after_a_restart_complete_groups_are_kept_and_open_ones_played_again(
    tmp_path: Path, own_engine: str, tiny_moe: Path
) -> None:
    asked = settings(tmp_path / "store", own_engine)
    with LiveService(asked, tiny_moe) as live:
        client = ServiceClient(live.url, TOKEN)
        client.register_worker(5)
        begin(client, tiny_moe)
        play(live, client, next_work(client), {0: 0.0, 1: 1.0})
        work = next_work(client)
        handle: SessionHandle = client.open_session(work, 0, "t")
        assert live.chat(handle.api_key, QUESTION).status_code == 200
    with LiveService(asked, tiny_moe) as live:
        client = ServiceClient(live.url, TOKEN)
        client.register_worker(5)
        begin(client, tiny_moe)
        fresh, again = next_work(client), next_work(client)
        assert (fresh.group_id, fresh.attempt, fresh.indices) == (work.group_id, 0, (1,)), (
            "its session was never opened"
        )
        assert (again.group_id, again.attempt, again.indices) == (work.group_id, 1, (0,))
        assert fresh.task == again.task == work.task
        play(live, client, fresh, {1: 1.0})
        play(live, client, again, {0: 0.0})
        assert len(client.claim(2, "me", 30.0, 10.0)) == 2
        ledger = read_ledger(asked.store)
        assert ledger.balanced
        assert ledger.discarded["restart"] > 0
