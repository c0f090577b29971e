"""What the run's own program may do through the service: verdicts, masks, groups of its own; and budgets, which the trainer sees."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from palestra.server.client import ServiceClient
from palestra.server.ledger import read_ledger
from palestra.server.rows import group_of
from palestra.server.types import TrajectoryGroup
from palestra.server.wire.codec import encode_group, join_blobs
from tests.live import TOKEN, LiveService, engine_process, settings, wait_for

pytestmark = pytest.mark.walk
QUESTION = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def own_engine(tiny_moe: Path) -> Iterator[str]:
    with engine_process(tiny_moe, "--context-length", "1024") as url:
        yield url


class Scene:
    """A running service and what a worker and a trainer say to it."""

    def __init__(self, live: LiveService, model: Path) -> None:
        self.live, self.model = live, model
        self.client = ServiceClient(live.url, TOKEN)

    def begin(self, **facts: Any) -> None:
        self.live.admin("POST", "/admin/worker", {"tasks": 5, **facts})
        version = self.client.restore(train_step=0, checkpoint_id=None, policy_version=0)
        self.publish(version, 0)

    def publish(self, version: int, step: int) -> None:
        self.client.publish_begin(version, step)
        self.client.publish_end(version, str(self.model))

    def work(self) -> dict[str, Any]:
        work = self.live.admin("POST", "/admin/work", {"wait_s": 5})
        assert work is not None
        return dict(work)

    def open(self, work: dict[str, Any], index: int) -> dict[str, Any]:
        group = work["group_id"]
        handle = self.live.open(f"{group}-{index}", group, index, work["attempt"])
        assert self.live.chat(handle["api_key"], QUESTION, max_tokens=8).status_code == 200
        return handle

    def close(self, handle: dict[str, Any], reward: float, **more: Any) -> None:
        body = {"attempt": handle["attempt"], "outcome": {"reward": reward, "stop_reason": "answer"}, **more}
        self.live.admin("POST", f"/v1/sessions/{handle['rollout_id']}/close", body)

    def play(self, work: dict[str, Any], rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        for index in work["indices"]:
            self.close(self.open(work, index), rewards[index])

    def post(self, path: str, content: bytes) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.post(self.live.url + path, content=content, headers=headers, timeout=60)


@pytest.fixture
def make(tmp_path: Path, own_engine: str, tiny_moe: Path) -> Iterator[Any]:
    open_: list[Any] = []

    def scene(**changes: Any) -> Scene:
        live = LiveService(settings(tmp_path / "store", own_engine, **changes), tiny_moe).__enter__()
        made = Scene(live, tiny_moe)
        open_.append(made)
        return made

    yield scene
    for made in open_:
        made.client.close()
        made.live.__exit__()


def test_reviews_verdicts_and_skips(make: Any, tmp_path: Path) -> None:
    scene = make(program="plan", staleness=2)
    scene.begin(reviews=True)
    first, second, third = scene.work(), scene.work(), scene.work()
    assert first["kind"] == "play"
    scene.play(first, (0.5, 0.5))
    review = scene.work()
    assert (review["kind"], review["group_id"], review["task"]) == ("review", first["group_id"], first["task"])
    assert [rollout["reward"] for rollout in review["rollouts"]] == [0.5, 0.5]
    verdict = {"group_id": first["group_id"], "rewards": {"1": 1.0}}
    scene.live.admin("POST", "/admin/verdict", verdict)
    scene.live.admin("POST", "/admin/verdict", verdict)
    scene.live.admin("POST", "/admin/skip", {"group_id": second["group_id"], "reason": "too_easy"})
    running = scene.open(third, 0)
    scene.live.admin("POST", "/admin/verdict", {"group_id": third["group_id"], "keep": False, "reason": "late"})
    assert scene.live.chat(running["api_key"], QUESTION).status_code == 401, "its session is over"
    (group,) = scene.client.claim(1, "t", 30.0, 5.0)
    assert sorted(group.rewards.values()) == [0.5, 1.0]
    scene.client.commit(1, "step_1", [group.group_id], "t")
    buffer = scene.live.service.buffer
    assert buffer.dropped("filtered(too_easy)") == [second["group_id"]]
    assert buffer.dropped("filtered(late)") == [third["group_id"]]
    ledger = read_ledger(tmp_path / "store")
    assert ledger.balanced
    assert ledger.discarded["filtered(late)"] > 0


def test_masks_are_held_to_what_was_sampled(make: Any) -> None:
    scene = make()
    scene.begin()
    work = scene.work()
    handle = scene.open(work, 0)
    path = f"/v1/sessions/{handle['rollout_id']}"
    (row,) = scene.live.admin("GET", f"{path}/rows")["rows"]
    sampled = np.flatnonzero(row["loss_mask"])
    assert [row["logprobs"][at] is None for at in range(len(row["token_ids"]))] == [not on for on in row["loss_mask"]]
    wrong = {"attempt": 0, "outcome": {"reward": 0.0}, "masks": [[1] * len(row["token_ids"])]}
    with httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        refused = http.post(scene.live.url + f"{path}/close", json=wrong)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "mask_refused")
    mask = [0] * len(row["token_ids"])
    mask[sampled[-1]] = 1
    scene.close(handle, 0.0, masks=[mask])
    scene.close(scene.open(work, 1), 1.0)
    (group,) = scene.client.claim(1, "t", 30.0, 5.0)
    assert group.samples[0].loss_mask.sum() == 1
    assert np.flatnonzero(group.samples[0].loss_mask).tolist() == [sampled[-1]]


def brought(scene: Scene) -> TrajectoryGroup:
    """A group of two sessions that no plan knows."""
    reader = scene.live.service.log.reader
    for index in (0, 1):
        handle = scene.live.open(f"mine-{index}", "mine", index)
        assert scene.live.chat(handle["api_key"], QUESTION, max_tokens=8).status_code == 200
        scene.close(handle, float(index))
    return group_of("mine", "t", 2, [reader.read_trajectory(f"mine-{index}") for index in (0, 1)])


def test_a_group_of_one_s_own_comes_in_if_the_record_agrees(make: Any, tmp_path: Path) -> None:
    scene = make(drop_zero_variance=False)
    scene.begin()
    group = brought(scene)
    lying = dataclasses.replace(group.samples[0], token_ids=group.samples[0].token_ids + 1)
    wrong = dataclasses.replace(group, samples=(lying, group.samples[1]))
    refused = scene.post("/admin/put", join_blobs([encode_group(wrong)]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "groups_refused")
    assert scene.post("/admin/put", b"abc").status_code == 400
    body = join_blobs([encode_group(group)])
    assert scene.post("/admin/put", body).json() == {"count": 1}
    assert scene.post("/admin/put", body).json() == {"count": 0}
    (got,) = scene.client.claim(1, "t", 30.0, 5.0)
    assert got.group_id == "mine"
    scene.client.commit(1, "step_1", ["mine"], "t")
    assert read_ledger(tmp_path / "store").balanced


def test_a_claim_is_answered_with_what_is_ready_when_the_budget_is_spent(make: Any) -> None:
    scene = make(staleness=1, ahead=0, budget_s=1.0)
    scene.begin()
    scene.play(scene.work())
    groups = scene.client.claim(2, "t", 30.0, 20.0)
    assert len(groups) == 1
    figures = scene.client.step_metrics()
    assert figures["wait/trainer_for_groups/s"] > 0
    assert figures["buffer/claimed/groups"] == 1.0


def test_shared_devices_rest_while_a_step_trains(make: Any) -> None:
    """A rollout that goes on is taken off the engines from the claim to the publish, and ends in two versions."""
    scene = make(staleness=1, ahead=0, budget_s=0.2, colocated=True, max_response=700)
    scene.begin()
    done, straggler = scene.work(), scene.work()
    scene.play(done)
    service = scene.live.service
    handle = scene.live.open(f"{straggler['group_id']}-0", straggler["group_id"], 0)
    answers: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: answers.append(scene.live.chat(handle["api_key"], QUESTION)))
    caller.start()
    wait_for(lambda: service.engine.on_wire == 1, "the straggler's request")
    (group,) = scene.client.claim(2, "t", 30.0, 20.0)
    wait_for(lambda: service.engine.on_wire == 0, "the engines' rest")
    assert not answers
    scene.client.commit(1, "step_1", [group.group_id], "t")
    assert service.engine.on_wire == 0
    scene.publish(service.buffer.highest_version() + 1, 1)
    caller.join(60)
    assert answers[0].status_code == 200
    (turn,) = service.log.reader.read_trajectory(handle["rollout_id"]).turns
    assert [span.version for span in turn.spans] in ([0, 1], [1]), "nothing may have been sampled before the rest"
    figures = scene.client.step_metrics()
    assert figures["overlap/generation_train/share"] < 1.0
    assert 0.0 <= figures["bubble/engine/share"] <= 1.0
