"""The trainer's loop against a service that keeps groups, leases, commits and versions as the real one must, and whose engine is a second
copy of the model: its rollouts carry real logprobs of the version that was published.

Every kind of interruption is played: the process dies (all its objects are gone), and another one goes on from the run folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.server.publishing.types import Digests, PublishReport, PublishTarget, TargetWorker
from palestra.server.types import LeaseLost, RenderedRow, TokenSource, TrainingSample, TrajectoryGroup, VersionSpan
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig
from palestra.trainer.loop import Trainer
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.records import read_step
from palestra.trainer.settings import TrainerSettings, make_backend
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch, OptimStats, TrainerError
from tests.conformance.backend_suite import micro_batch
from tests.tiny import make_tiny_llama

PROMPT, REPLY, SIZE = 6, 4, 4


pytestmark = pytest.mark.walk


class Killed(BaseException):
    """The process is gone: nothing catches it."""


class FakeService:
    """Groups are made when they are claimed, by the engine's present version; all state survives the trainer."""

    def __init__(self, model: Path | None = None, tasks: int = 10**6) -> None:
        self.engine = MegatronBackend.from_folder(model) if model else None
        self.tasks = tasks
        self.version, self.highest, self.made = 0, -1, 0
        self.open = False
        """Whether weights were published since the last restore; nothing is played before."""
        self.published: list[tuple[int, str | None]] = []
        self.handles: list[str] = []
        """Form of each bucket in shared memory."""
        self.canaries: list[tuple[int, int]] = []
        """Version and length of each text whose logprobs were compared."""
        self.groups: dict[str, TrajectoryGroup] = {}
        self.state: dict[str, tuple[str, Any]] = {}
        """group id -> ("ready" | "claimed" | "committed" | "discarded", owner or step)."""
        self.before: Callable[[str], None] = lambda point: None
        """Called with the name of each call before and after it."""
        self.restored: list[tuple[int, str | None]] = []

    def restore(self, *, train_step: int, checkpoint_id: str | None, policy_version: int) -> int:
        self.restored.append((train_step, checkpoint_id))
        self.open = False
        for group, (state, detail) in self.state.items():
            if state == "claimed" or (state == "committed" and detail > train_step):
                self.state[group] = ("ready", None)
            if self.state[group][0] == "ready" and self.groups[group].max_version > policy_version:
                self.state[group] = ("discarded", "abandoned")
        return self.highest + 1

    def claim(self, n: int, owner: str, ttl_s: float, deadline_s: float) -> list[TrajectoryGroup]:
        self.before("claim")
        if not self.open:
            raise TimeoutError("workers wait for the trainer's first publish")
        while self.made < self.tasks and sum(state == "ready" for state, _ in self.state.values()) < n:
            group = self._play(self.made)
            self.made += 1
            self.groups[group.group_id], self.state[group.group_id] = group, ("ready", None)
        ready = [group for group, (state, _) in self.state.items() if state == "ready"][:n]
        for group_id in ready:
            self.state[group_id] = ("claimed", owner)
        self.before("claimed")
        return [self.groups[group_id] for group_id in ready]

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        self.before("renew")
        return sum(self.state[group_id] == ("claimed", owner) for group_id in group_ids)

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        self.before("commit")
        allowed = (("claimed", owner), ("committed", step))
        if lost := [group_id for group_id in group_ids if self.state[group_id] not in allowed]:
            raise LeaseLost(f"{owner} does not hold {lost}")
        for group_id in group_ids:
            self.state[group_id] = ("committed", step)
        self.before("committed")
        return len(group_ids)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        held = [group_id for group_id in group_ids if self.state[group_id] == ("claimed", owner)]
        self.state.update(dict.fromkeys(held, ("ready", None)))
        return len(held)

    def collect(self, oldest_train_step: int) -> None:
        self.collected = oldest_train_step

    def publish_target(self) -> PublishTarget:
        return PublishTarget("embedded", "cpu", (TargetWorker("http://engine", 1),))

    def publish_begin(self, version: int, train_step: int, transport: str = "disk") -> PublishTarget:
        self.before("publish")
        assert version > self.highest, "versions are never used again"
        return self.publish_target()

    def publish_end(
        self, version: int, path: str | None, *, digests: Digests | None = None, dtype: str = "float32"
    ) -> PublishReport:
        if self.engine is not None:
            assert path is not None
            self.engine = MegatronBackend.from_folder(Path(path))
        self.version = self.highest = version
        self.open = True
        self.published.append((version, path))
        self.before("published")
        return PublishReport(train_step=0, still_s=0.1, drain_s=0.0, calls=1, serving=1)

    def publish_canary(self, version: int, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        assert len(ids) == len(logprobs) + 1
        self.canaries.append((version, len(ids)))
        return {"http://engine": 0.0}

    def publish_hold(self, version: int) -> None:
        assert version > self.highest

    def publish_handles(self, payloads: Mapping[str, Sequence[str]], load_format: str, *, last: bool) -> None:
        assert payloads.keys() == {"http://engine"}
        self.handles.append(load_format)

    def publish_join(
        self, group: str, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> dict[str, str]:
        raise AssertionError("of other transports")

    def publish_announce(self, body: bytes) -> dict[str, str]:
        raise AssertionError("of other transports")

    def publish_leave(self, group: str) -> PublishTarget:
        raise AssertionError("of other transports")

    def publish_cancel(self, version: int) -> None:
        raise AssertionError("of other transports")

    def render(self, transcripts: Sequence[Mapping[str, Any]]) -> list[RenderedRow]:
        """Characters as ids; the assistant's are trained."""
        rows = []
        for transcript in transcripts:
            parts = [(ord(c) % 400, m["role"] == "assistant") for m in transcript["messages"] for c in m["content"]]
            ids, mask = zip(*parts, strict=True)
            rows.append(RenderedRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)))
        return rows

    def step_metrics(self) -> dict[str, float]:
        return {"env/valid_call/mean": 0.5}

    def _play(self, index: int) -> TrajectoryGroup:
        """SIZE replies to one prompt; the reward is the share of even tokens. The first token of the prompt is the group's number."""
        assert self.engine is not None
        draw = np.random.default_rng(index)
        prompt = [index, *draw.integers(0, 400, PROMPT - 1).tolist()]
        replies = [draw.integers(0, 400, REPLY).tolist() for _ in range(SIZE)]
        logprobs = self.engine.logprobs([micro_batch([prompt + reply for reply in replies], [PROMPT] * SIZE, 1.0)])[0]
        rewards = [sum(token % 2 == 0 for token in reply) / REPLY for reply in replies]
        samples = [
            _sample(f"g{index}", i, prompt + reply, logprobs[i], rewards[i], self.version)
            for i, reply in enumerate(replies)
        ]
        scored = {sample.rollout_id: reward for sample, reward in zip(samples, rewards, strict=True)}
        return TrajectoryGroup(f"g{index}", f"t{index}", SIZE, tuple(samples), scored)


def _sample(group: str, index: int, ids: list[int], logprobs: F32, reward: float, version: int) -> TrainingSample:
    mask = np.array([0] * PROMPT + [1] * REPLY, dtype=np.uint8)
    return TrainingSample(
        rollout_id=f"{group}-{index}",
        attempt=0,
        group_id=group,
        task_id=group,
        branch=0,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        sources=np.where(mask == 1, TokenSource.SAMPLED, TokenSource.PROMPT).astype(np.uint8),
        logprobs=np.where(mask == 1, logprobs, np.nan).astype(np.float32),
        spans=(VersionSpan(version, PROMPT, PROMPT + REPLY),),
        temperature=1.0,
        reward=reward,
        turn_rewards=(),
        stop_reason="terminated",
    )


class LedgerBackend:
    """A real backend that also remembers which groups its weights have seen, in its checkpoints too."""

    def __init__(self, settings: TrainerSettings, before: Callable[[str], None] = lambda point: None) -> None:
        self.inner, self.before = make_backend(settings), before
        self.seen: Counter[int] = Counter()
        self._pending: set[int] = set()

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        self._pending = {int(ids[0]) for batch in batches for ids in batch.token_ids}
        return self.inner.forward_backward(batches, loss)

    def optim_step(self, lr: float) -> OptimStats:
        done = self.inner.optim_step(lr)
        self.seen.update(self._pending)
        self.before("optim")
        return done

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        return self.inner.logprobs(batches, reference=reference)

    def freeze_reference(self) -> None:
        self.inner.freeze_reference()

    def reset_optimizer(self) -> None:
        self.inner.reset_optimizer()
        self.seen.clear()

    def save(self, folder: Path) -> None:
        self.before("save")
        self.inner.save(folder)
        (folder / "ledger.json").write_text(json.dumps(sorted(self.seen.elements())))

    def load(self, folder: Path) -> None:
        self.inner.load(folder)
        self.seen = Counter(json.loads((folder / "ledger.json").read_text()))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inner.export()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def settings_for(model: Path, **changes: Any) -> TrainerSettings:
    algo = AlgoConfig(groups_per_step=2, group_size=SIZE, **changes.pop("algo", {}))
    optim = OptimConfig(lr=1e-3, **changes.pop("optim", {}))
    return TrainerSettings(
        model=model, **{"steps": 5, "save_every": 2, "algo": algo, "optim": optim, "wait_s": 5.0, **changes}
    )


def run(
    settings: TrainerSettings, service: FakeService, run_dir: Path, stop: Callable[[], bool] = lambda: False
) -> LedgerBackend:
    """A process: new objects, the same service and folder."""
    backend = LedgerBackend(settings, service.before)
    Trainer(settings, backend, service, run_dir, stop).run()
    return backend


def records(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "train_step" in (record := json.loads(line))]


def committed(service: FakeService) -> dict[int, int]:
    return {int(group[1:]): detail for group, (state, detail) in service.state.items() if state == "committed"}


def check_books(service: FakeService, backend: LedgerBackend, steps: int) -> None:
    """Laws 3 and 6: in the surviving lineage each group once; what was made is trained, discarded or still there."""
    assert set(backend.seen.values()) == {1}
    assert set(backend.seen) == set(committed(service))
    assert Counter(committed(service).values()) == dict.fromkeys(range(1, steps + 1), 2)
    assert {state for state, _ in service.state.values()} <= {"committed", "ready", "discarded"}


def test_a_run_from_start_to_end(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    backend = run(settings_for(model), service, tmp_path)
    check_books(service, backend, 5)
    assert [version for version, _ in service.published] == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v5"]
    told = records(tmp_path)
    assert [record["train_step"] for record in told] == [1, 2, 3, 4, 5]
    assert [record["policy_version"] for record in told] == [1, 2, 3, 4, 5]
    for record in told:
        # law 8: what was sampled by the present version has the engine's own log p
        assert record["staleness/max"] == 0
        assert record["train/ratio/max"] == pytest.approx(1, abs=1e-4)
        assert record["train/abs_dlogp/max"] <= 1e-4
        assert record["train/approx_kl/mean"] == pytest.approx(0, abs=1e-6)
        assert record["train/grad_norm"] > 0
        assert record["env/valid_call/mean"] == 0.5
        assert record["train/tokens"] == 2 * SIZE * REPLY
    rows = read_step(tmp_path, 3)
    assert {row.group_id for row in rows} == {"g4", "g5"}
    for row in rows:
        sample = next(s for s in service.groups[row.group_id].samples if s.rollout_id == row.rollout_id)
        np.testing.assert_allclose(row.policy_logprobs, sample.logprobs, atol=1e-4)
        assert row.advantage.baseline == pytest.approx(np.mean(list(service.groups[row.group_id].rewards.values())))


def test_weights_are_published_every_so_many_steps_and_at_the_end(model: Path, tmp_path: Path) -> None:
    """Versions count optimizer steps, whether they are published or not."""
    service = FakeService(model)
    run(settings_for(model, steps=5, publish_steps=2), service, tmp_path)
    assert [version for version, _ in service.published] == [0, 2, 4, 5]
    assert [record["policy_version"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]
    spans = {
        step: {s.version for row in service.groups[f"g{group}"].samples for s in row.spans}
        for group, step in committed(service).items()
    }
    assert spans == {1: {0}, 2: {0}, 3: {2}, 4: {2}, 5: {4}}


def test_the_policy_learns_what_is_rewarded(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    before = {f"g{i}": service._play(i) for i in range(10)}
    backend = run(settings_for(model, steps=10), service, tmp_path)

    def gain(group: TrajectoryGroup) -> float:
        batch = micro_batch([s.token_ids.tolist() for s in group.samples], [PROMPT] * SIZE, 1.0)
        now = backend.logprobs([batch])[0]
        centred = np.array([s.reward for s in group.samples]) - np.mean(list(group.rewards.values()))
        moved = np.array(
            [now[i, s.loss_mask == 1].sum() - s.logprobs[s.loss_mask == 1].sum() for i, s in enumerate(group.samples)]
        )
        return float((centred * moved).sum())

    assert sum(gain(group) for group in before.values()) > 0.1


POINTS = ["claimed", "optim", "save", "commit", "committed", "publish", "published"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("step", [1, 4])
def test_killed_anywhere_each_group_is_trained_once(model: Path, tmp_path: Path, point: str, step: int) -> None:
    """Step 4 makes a checkpoint, 1 does not."""
    service, counts = FakeService(model), Counter[str]()
    at = step + 1 if point.startswith("publish") else step  # the first publish and the first save are of step 0
    if point == "save":
        at = 3 if step == 4 else 2

    def kill(here: str) -> None:
        counts[here] += 1
        if here == point and counts[here] == at:
            service.before = lambda _: None
            raise Killed(here)

    service.before = kill
    with pytest.raises(Killed):
        run(settings_for(model), service, tmp_path)
    backend = run(settings_for(model), service, tmp_path)
    assert len(service.restored) == 2
    check_books(service, backend, 5)
    versions = [version for version, _ in service.published]
    assert versions == sorted(set(versions))
    for record in records(tmp_path):
        if record["staleness/max"] == 0:
            assert record["train/ratio/max"] == pytest.approx(1, abs=1e-4)


def test_killed_twice_at_the_same_checkpoint(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    for _ in range(2):

        def kill(here: str) -> None:
            if here in ("commit", "publish"):
                raise Killed(here)

        service.before = kill
        with pytest.raises(Killed):
            run(settings_for(model, save_every=1), service, tmp_path)
    service.before = lambda _: None
    check_books(service, run(settings_for(model, save_every=1), service, tmp_path), 5)


def test_a_resumed_run_equals_one_that_was_never_interrupted(model: Path, tmp_path: Path) -> None:
    """With the rollouts of version 0 only, so that both see the same tokens."""
    whole, broken = FakeService(model), FakeService(model)
    for service in (whole, broken):
        for index in range(10):
            service.groups[f"g{index}"], service.state[f"g{index}"] = service._play(index), ("ready", None)
        service.made = 10
    changes: dict[str, Any] = {"algo": {"kl_coef": 0.1, "updates_per_batch": 2}, "optim": {"warmup_steps": 6}}
    first = run(settings_for(model, **{k: dict(v) for k, v in changes.items()}), whole, tmp_path / "a")
    calls = iter(range(100))
    resumed = settings_for(model, **{k: dict(v) for k, v in changes.items()})
    run(resumed, broken, tmp_path / "b", stop=lambda: next(calls) >= 5)
    done = records(tmp_path / "b")[-1]["train_step"]
    assert 0 < done < 5
    second = run(resumed, broken, tmp_path / "b")
    check_books(broken, second, 5)
    right = dict(second.export())
    assert all(torch.equal(tensor, right[name]) for name, tensor in first.export())
    a, b = records(tmp_path / "a"), records(tmp_path / "b")
    for name in ("train/loss", "train/kl_ref/mean", "train/lr", "staleness/max" if done == 0 else "train/nll/mean"):
        assert [record[name] for record in a] == [record[name] for record in b]
    assert a[0]["train/kl_ref/mean"] == pytest.approx(0, abs=1e-7)
    assert a[-1]["train/kl_ref/mean"] > 1e-5
    assert read_step(tmp_path / "a", 2)[0].ref_logprobs is not None


def test_stop_finishes_the_step_and_saves(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    run(settings_for(model, save_every=100), service, tmp_path, stop=lambda: len(service.published) >= 4)
    assert (tmp_path / "checkpoints" / "step_3").is_dir()
    check_books(service, run(settings_for(model), service, tmp_path), 5)


def test_stop_is_seen_while_waiting(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    waited = 0

    def never(*_: Any) -> list[TrajectoryGroup]:
        nonlocal waited
        waited += 1
        raise TimeoutError("0 of 2 groups; waiting for environment worker env-0")

    service.claim = never  # type: ignore[method-assign]
    settings = settings_for(model, wait_s=3600.0)
    assert Trainer(settings, make_backend(settings), service, tmp_path, lambda: waited >= 2).run() == 0
    settings = settings_for(model, wait_s=0.0)
    with pytest.raises(TrainerError, match="waiting for environment worker env-0"):
        Trainer(settings, make_backend(settings), service, tmp_path / "other", lambda: False).run()


def test_the_end_of_the_tasks_ends_the_run(model: Path, tmp_path: Path) -> None:
    service = FakeService(model, tasks=5)
    backend = run(settings_for(model, steps=50, save_every=50), service, tmp_path)
    assert backend.seen == Counter(range(5))
    assert committed(service) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3}
    assert (tmp_path / "checkpoints" / "step_3").is_dir()


def test_a_lost_lease_drops_the_step(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)

    def lose(here: str) -> None:
        if here == "commit":
            service.before = lambda _: None
            service.state.update({g: ("ready", None) for g, (state, _) in service.state.items() if state == "claimed"})

    service.before = lose
    with pytest.raises(TrainerError, match=r"no longer leased to this trainer.*--resume"):
        run(settings_for(model), service, tmp_path)
    check_books(service, run(settings_for(model), service, tmp_path), 5)


def test_leases_are_renewed_while_a_step_is_computed(model: Path, tmp_path: Path) -> None:
    """The step does not end before three renewals have arrived."""
    import threading

    service, renewed = FakeService(model), threading.Semaphore(0)

    def watch(here: str) -> None:
        if here == "renew":
            renewed.release()
        if here == "optim":
            for _ in range(3):
                assert renewed.acquire(timeout=20), "no renewal came"

    service.before = watch
    check_books(service, run(settings_for(model, steps=1, lease_s=0.05), service, tmp_path), 1)


def test_warm_start_comes_first_and_is_published(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": "yes"}]}
        for i in range(7)
    ]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    service = FakeService(model)
    settings = settings_for(model, steps=2, sft=SftConfig(data=data, steps=12, batch_size=4, lr=3e-3, warmup_steps=2))
    run(settings, service, tmp_path / "run")
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["sft/loss"] for record in told if "sft_step" in record]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert [version for version, _ in service.published] == [1, 2, 3]
    assert {group.min_version for group in service.groups.values()} == {1, 2}
    for record in records(tmp_path / "run"):
        assert record["train/ratio/max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("point", ["sft", "save", "publish"])
def test_killed_around_the_warm_start(model: Path, tmp_path: Path, point: str) -> None:
    data = tmp_path / "sft.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "assistant", "content": "yes"}]}) + "\n")
    service = FakeService(model)
    settings = settings_for(model, steps=2, sft=SftConfig(data=data, steps=3, batch_size=1, lr=3e-3))

    def kill(here: str) -> None:
        if here == ("optim" if point == "sft" else point):
            service.before = lambda _: None
            raise Killed(here)

    service.before = kill
    with pytest.raises(Killed):
        run(settings, service, tmp_path / "run")
    check_books(service, run(settings, service, tmp_path / "run"), 2)
    assert [version for version, _ in service.published] == [1, 2, 3]
    assert all(record["train/abs_dlogp/max"] <= 1e-4 for record in records(tmp_path / "run"))


def test_broken_transcripts_are_told_by_line(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    for text, told in (
        ("", "has no transcripts"),
        ('{"messages": []}\n{"mess', r"sft\.jsonl:2 is not JSON"),
        ("[1]\n", ":1 is not an object"),
    ):
        data.write_text(text)
        settings = settings_for(model, sft=SftConfig(data=data))
        with pytest.raises(TrainerError, match=told):
            Trainer(settings, make_backend(settings), FakeService(), tmp_path / "run", lambda: False).run()


def test_a_run_folder_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    run(settings_for(model, steps=1), FakeService(model), tmp_path / "run")
    other = make_tiny_llama(tmp_path / "other", num_hidden_layers=2)
    settings = settings_for(other)
    with pytest.raises(TrainerError, match="another model"):
        Trainer(settings, make_backend(settings), FakeService(other), tmp_path / "run", lambda: False).run()


def test_tensor_transport(model: Path, tmp_path: Path) -> None:
    service = FakeService(model)
    service.engine = None
    service.made = 2
    source = FakeService(model)
    for index in range(2):
        service.groups[f"g{index}"], service.state[f"g{index}"] = source._play(index), ("ready", None)
    settings = settings_for(model, steps=1, weights=WeightsConfig(transport="tensor"), train=TrainConfig(threads=1))
    run(settings, service, tmp_path)
    assert [version for version, _ in service.published] == [0, 1]
    assert service.handles == ["shared_memory"] * 2
    assert not (tmp_path / "weights").exists()
