"""Entropies of predictions, from the logits that log p is made of: against transformers' own, and what a bonus does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.trainer.config import AlgoConfig, TrainConfig
from palestra.trainer.losses import PolicyLoss, nll_loss
from palestra.trainer.losses.entropy import BLOCK, Wanted, entropy_of
from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
from palestra.trainer.settings import TrainerSettings, make_backend
from palestra.trainer.step import train_batch
from palestra.trainer.types import TrainerError
from tests.conformance.backend_suite import hf_model, micro_batch, sample_rows
from tests.test_trainer_schedules import stale_groups
from tests.tiny import make_tiny_llama


def test_by_hand() -> None:
    p = [[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]
    logits = torch.tensor(p, dtype=torch.float64).log() + torch.tensor([[3.0], [-7.0]])
    for trained in (True, False):
        found = entropy_of(logits, trained=trained)
        assert found.tolist() == [pytest.approx(1.5 * math.log(2)), pytest.approx(math.log(3))]
    many = torch.randn(2 * BLOCK + 3, 5)
    torch.testing.assert_close(entropy_of(many, trained=False), entropy_of(many, trained=True))


def test_gradient_by_finite_difference() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entropy_of(x, trained=True), logits)
    assert not entropy_of(logits, trained=False).requires_grad


def test_another_backend_refuses_the_bonus_by_name(tmp_path: Path) -> None:
    settings = TrainerSettings(
        tmp_path, 1, AlgoConfig(entropy_coef=0.1), train=TrainConfig.model_validate({"backend": "fsdp"})
    )
    with pytest.raises(TrainerError, match=r"algo\.entropy_coef needs train\.backend"):
        make_backend(settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def backend_of(model: Path, entropy: Wanted, chunk: int = 0) -> MegatronBackend:
    return MegatronBackend.from_folder(model, BackendSettings(entropy=entropy, logprob_chunk=chunk))


@pytest.mark.walk
@pytest.mark.parametrize("chunk", [0, 4])
def test_entropies_are_those_of_transformers_logits(model: Path, chunk: int) -> None:
    rows, starts = sample_rows(0)
    batch, reference = micro_batch(rows, starts, 1.0, temperature=0.7), hf_model(model)
    right = np.zeros(batch.token_ids.shape)
    for i, length in enumerate(batch.lengths):
        with torch.no_grad():
            logits = reference(torch.from_numpy(batch.token_ids[i, :length])[None]).logits[0, :-1] / 0.7
        p = logits.double().softmax(-1).numpy()
        right[i, 1:length] = -(p * np.log(p)).sum(-1)
    seen: list[Any] = []

    def loss(logprobs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(batch["entropy"].detach().numpy().copy())
        return nll_loss(logprobs, batch)

    backend_of(model, "told", chunk).forward_backward([batch], loss)
    np.testing.assert_allclose(seen[0], np.where(batch.weights != 0, right, 0), atol=2e-5)


@pytest.mark.walk
def test_a_bonus_has_the_gradient_of_the_entropy(model: Path) -> None:
    """Advantages are 0, so the bonus is all that trains; chunks change nothing. Told entropies leave the gradient as it is."""
    rows, starts = sample_rows(1)
    batch = micro_batch(rows, starts, 0.05)
    reference = hf_model(model)
    bonus = torch.zeros(())
    for row, start in zip(rows, starts, strict=True):
        logits = reference(torch.tensor(row)[None]).logits[0, :-1]
        bonus = bonus + 0.05 * entropy_of(logits[start - 1 :], trained=True).sum()
    (-0.3 * bonus).backward()  # type: ignore[no-untyped-call]
    norm = float(torch.sqrt(sum(p.grad.square().sum() for p in reference.parameters() if p.grad is not None)))
    for chunk in (0, 4):
        backend = backend_of(model, "trained", chunk)
        stats = backend.forward_backward([batch], PolicyLoss(entropy_coef=0.3))
        assert stats.loss == pytest.approx(float(-0.3 * bonus.detach()), rel=1e-5)
        assert backend.optim_step(1e-3).grad_norm == pytest.approx(norm, rel=1e-4)
    told = backend_of(model, "told")
    told.forward_backward([batch], PolicyLoss())
    assert told.optim_step(1e-3).grad_norm == 0


@pytest.mark.walk
def test_a_step_tells_it(model: Path) -> None:
    groups = stale_groups(model)

    def told(**train: bool) -> dict[str, float]:
        settings = TrainerSettings(model, 1, train=TrainConfig.model_validate(train))
        return train_batch(make_backend(settings), groups, settings, policy_version=0, optimizer_steps=0).metrics

    # The model is random: what it samples is as likely as its entropy says, on average.
    found = told()
    assert found["train/entropy/mean"] == pytest.approx(found["train/nll/mean"], rel=0.2)
    assert "train/entropy/mean" not in told(entropy=False)
