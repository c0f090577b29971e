"""The trainer under schedules that are not synchronous: old tokens, short batches, held publishes, and a restart between a checkpoint
and its commit. Groups come from a second copy of the model, as in test_trainer_loop.
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

from palestra.server.types import TrajectoryGroup
from palestra.trainer.loop import Trainer
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.settings import TrainerSettings, make_backend
from palestra.trainer.step import train_batch
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch
from tests.test_trainer_loop import (
    REPLY,
    SIZE,
    FakeService,
    Killed,
    LedgerBackend,
    check_books,
    committed,
    records,
    run,
    settings_for,
)
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.walk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


class ShortService(FakeService):
    """Gives at most so many groups to each claim, in turn; then whole batches."""

    def __init__(self, model: Path, sizes: Sequence[int]) -> None:
        super().__init__(model)
        self.sizes: Iterator[int] = iter(sizes)

    def claim(self, n: int, owner: str, ttl_s: float, deadline_s: float) -> list[TrajectoryGroup]:
        return super().claim(min(n, next(self.sizes, n)), owner, ttl_s, deadline_s)


def test_a_step_trains_what_a_claim_gives(model: Path, tmp_path: Path) -> None:
    """The budget of some steps is spent early: they have fewer groups, count as whole steps, and every rollout in them weighs more."""
    service = ShortService(model, [2, 1, 1, 2, 1])
    backend = run(settings_for(model, steps=5), service, tmp_path)
    assert Counter(committed(service).values()) == {1: 2, 2: 1, 3: 1, 4: 2, 5: 1}
    assert backend.seen == Counter(range(7))
    told = records(tmp_path)
    assert [record["train/groups"] for record in told] == [2, 1, 1, 2, 1]
    assert [record["train/tokens"] for record in told] == [SIZE * REPLY * n for n in (2, 1, 1, 2, 1)]
    assert [record["policy_version"] for record in told] == [1, 2, 3, 4, 5]
    assert all(record["train/trained_tokens_per_s/mean"] > 0 for record in told)


def test_a_short_claim_of_groups_that_are_trained_already_is_no_end(model: Path, tmp_path: Path) -> None:
    service = ShortService(model, [2, 2, 1, 1, 1])

    def kill(here: str) -> None:
        if here == "commit" and (tmp_path / "checkpoints" / "step_2").exists():
            service.before = lambda _: None
            service.state.update({g: ("ready", None) for g, (state, _) in service.state.items() if state == "claimed"})
            raise Killed(here)

    service.before = kill
    with pytest.raises(Killed):
        run(settings_for(model), service, tmp_path)
    backend = run(settings_for(model), service, tmp_path)
    assert set(backend.seen.values()) == {1}
    assert set(backend.seen) == set(committed(service))
    assert Counter(committed(service).values()) == {1: 2, 2: 2, 3: 1, 4: 2, 5: 2}


@pytest.mark.parametrize("step", [2, 5])
def test_what_was_saved_but_not_committed_is_committed_before_claims_are_taken_back(
    model: Path, tmp_path: Path, step: int
) -> None:
    """Also of the last step, after which nothing is claimed; a restore would make the groups ready, and soon stale."""
    service, calls = FakeService(model), list[str]()

    def kill(here: str) -> None:
        if here == "commit" and (tmp_path / "checkpoints" / f"step_{step}").exists():
            service.before = calls.append
            raise Killed(here)

    service.before = kill
    with pytest.raises(Killed):
        run(settings_for(model), service, tmp_path)
    claims = service.made
    backend = run(settings_for(model), service, tmp_path)
    check_books(service, backend, 5)
    assert calls[:2] == ["commit", "committed"]
    assert service.made == max(claims, 10)


def test_the_end_of_the_tasks_publishes_what_was_trained_last(model: Path, tmp_path: Path) -> None:
    service = FakeService(model, tasks=5)
    run(settings_for(model, steps=50, save_every=50, publish_steps=2), service, tmp_path)
    assert [version for version, _ in service.published] == [0, 2, 3]


class Watched(LedgerBackend):
    """Remembers the micro-batches of each update, and which forward passes were made for log p."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings)
        self.updates: list[list[MicroBatch]] = []
        self.forwards: list[list[F32]] = []

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        self.updates.append(list(batches))
        return super().forward_backward(batches, loss)

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        self.forwards.append(super().logprobs(batches, reference=reference))
        return self.forwards[-1]


def stale_groups(model: Path, n: int = 2) -> list[TrajectoryGroup]:
    """Groups that version 0 sampled."""
    service = FakeService(model)
    return [service._play(index) for index in range(n)]


def moved(backend: LedgerBackend) -> LedgerBackend:
    """The backend after its weights went away from version 0."""
    parameters = backend.inner._parameters()
    draw = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter.data += 0.05 * parameter.data.std() * torch.randn(parameter.shape, generator=draw)
    return backend


def test_one_update_a_batch_needs_no_second_forward_pass(model: Path) -> None:
    settings = settings_for(model, off_policy=True)
    backend = moved(Watched(settings))
    assert isinstance(backend, Watched)
    result = train_batch(backend, stale_groups(model), settings, policy_version=3, optimizer_steps=3)
    assert backend.forwards == []
    metrics = result.metrics
    assert metrics["staleness/mean"] == metrics["staleness/age_3/share"] * 3 == 3
    assert metrics["train/ratio/max"] == 1, "against these very weights"
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/approx_kl/mean"] > 1e-5, "against the weights that sampled"
    assert metrics["train/ratio_correction/max"] > 1 + 1e-3
    ratios = np.concatenate([np.exp(r.policy_logprobs - s) for r, s in records_and_rollout(model, result.records)])
    ratios = ratios[np.isfinite(ratios)]
    assert metrics["train/ratio_correction/mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert metrics["train/ratio_correction/max"] == pytest.approx(ratios.max(), rel=1e-4)


def records_and_rollout(model: Path, rows: Sequence[Any]) -> Iterator[tuple[Any, F32]]:
    samples = {s.rollout_id: s for group in stale_groups(model) for s in group.samples}
    for row in rows:
        yield row, samples[row.rollout_id].logprobs


def test_later_updates_are_clipped_against_the_weights_before_the_first(model: Path) -> None:
    settings = settings_for(model, off_policy=True, algo={"updates_per_batch": 2, "age_decay": 0.5})
    backend = moved(Watched(settings))
    assert isinstance(backend, Watched)
    before = MegatronBackend.from_folder(model)
    before.model.load_state_dict(backend.inner.model.state_dict())
    result = train_batch(backend, stale_groups(model), settings, policy_version=2, optimizer_steps=2)
    assert result.optimizer_steps == 2
    first, second = backend.updates
    assert [batch.old_logprobs for batch in first] == [None] * len(first)
    (forward,) = backend.forwards
    for batch, seen, right in zip(second, forward, before.logprobs(second), strict=True):
        assert batch.old_logprobs is seen
        np.testing.assert_allclose(seen, right, atol=1e-6)
    assert result.metrics["train/age_weight/mean"] == 0.25
    weights = sum(float(batch.weights.sum()) for batch in first)
    assert weights == pytest.approx(0.25), "age takes weight away, it gives none to others"
    assert result.trained_tokens == 2 * SIZE * REPLY


def test_tokens_far_from_the_weights_leave_the_loss_and_are_counted(model: Path) -> None:
    settings = settings_for(model, algo={"ratio_correction": "mask", "ratio_clip": 1.0001})
    backend = moved(Watched(settings))
    result = train_batch(backend, stale_groups(model), settings, policy_version=1, optimizer_steps=1)
    masked, tokens = result.metrics["train/ratio_correction/masked_tokens"], result.metrics["train/tokens"]
    assert tokens / 2 < masked < tokens + 1
    assert result.metrics["train/ratio_correction/clipped_share"] == masked / tokens


def test_an_off_policy_run_corrects_only_what_is_old(model: Path, tmp_path: Path) -> None:
    """With a publish every other step, even steps train on tokens of the version before."""
    service = FakeService(model)
    run(settings_for(model, steps=4, publish_steps=2, off_policy=True), service, tmp_path)
    for record in records(tmp_path):
        fresh = record["train_step"] % 2 == 1
        assert record["staleness/max"] == record["staleness/rollout/max"] == (0 if fresh else 1)
        assert record["train/ratio/max"] == 1
        if fresh:  # law 8
            assert record["train/ratio_correction/max"] == pytest.approx(1, abs=1e-4)
            assert record["train/approx_kl/mean"] == pytest.approx(0, abs=1e-6)
        else:
            assert record["train/ratio_correction/max"] > 1 + 1e-4
            assert record["train/approx_kl/mean"] > 1e-7


def test_where_the_time_of_a_step_goes(model: Path, tmp_path: Path) -> None:
    run(settings_for(model, steps=3, save_every=2), FakeService(model), tmp_path)
    for record in records(tmp_path):
        parts = {name: record[f"time/{name}_s"] for name in ("claim", "train", "save", "publish", "eval_hold")}
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) <= record["time/step_s"]
        assert record["bubble/trainer/share"] == pytest.approx(parts["claim"] / record["time/step_s"])
        assert (parts["save"] > 0) == (record["train_step"] in (2, 3))


class Held:
    """An evaluation that wants every version; its calls stand in one list with the service's."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def hold(self, stop: Callable[[], bool], say: Callable[[str], None]) -> float:
        self.calls.append("hold")
        return 0.0

    def published(self, export: Any, step: int, version: int) -> None:
        self.calls.append(f"evaluate {version}")


@pytest.mark.parametrize("colocated", [False, True])
def test_a_publish_waits_for_an_evaluation_and_tells_of_the_new_version(
    model: Path, tmp_path: Path, colocated: bool
) -> None:
    service, calls = FakeService(model), list[str]()
    service.before = lambda here: calls.append(here) if here in ("claim", "publish") else None
    settings = settings_for(model, steps=2, colocated=colocated)
    trainer = Trainer(settings, make_backend(settings), service, tmp_path, lambda: False)
    trainer._evaluations = Held(calls)  # type: ignore[assignment]
    trainer.run()
    before = ["hold"] if colocated else []
    step = [*before, "claim", "hold", "publish"]
    assert calls == ["publish", "evaluate 0", *step, "evaluate 1", *step, "evaluate 2"]


def test_random_generators_go_on_after_a_restart(model: Path, tmp_path: Path) -> None:
    """Nothing of ours draws while it trains, but options of megatron do."""

    class Drawing(LedgerBackend):
        def optim_step(self, lr: float) -> Any:
            drawn.append(float(torch.rand(())))
            return super().optim_step(lr)

    def play(folder: Path, service: FakeService, stop: Callable[[], bool] = lambda: False) -> None:
        settings = settings_for(model, steps=4, save_every=1)
        Trainer(settings, Drawing(settings), service, folder, stop).run()

    drawn: list[float] = []
    torch.manual_seed(5)
    play(tmp_path / "whole", FakeService(model))
    whole, service = list(drawn), FakeService(model)
    drawn.clear()
    torch.manual_seed(5)
    play(tmp_path / "broken", service, stop=lambda: len(drawn) >= 2)
    torch.manual_seed(17)
    play(tmp_path / "broken", service)
    assert drawn == whole
    meta: Mapping[str, Any] = json.loads((tmp_path / "broken" / "checkpoints" / "step_4" / "meta.json").read_text())
    assert (meta["train_step"], meta["optimizer_steps"]) == (4, 4)
