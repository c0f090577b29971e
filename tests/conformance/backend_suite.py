"""What every training backend must do, checked against transformers and torch on tiny models. Subclass `BackendSuite` and give `make`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from palestra.trainer.losses import nll_loss
from palestra.trainer.types import Backend, CheckpointError, MicroBatch, TrainerError
from tests.tiny import make_tiny_llama, make_tiny_moe

LR, DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.95), 0.5
EPS = 1e-6
"""With 1e-8, Adam turns the rounding of a vanishing gradient into a full step, and two exact implementations differ by 1e-5."""


class MakeBackend(Protocol):
    def __call__(self, folder: Path, *, chunk: int = 0) -> Backend:
        """A backend with AdamW as in the constants above."""


def micro_batch(
    rows: Sequence[Sequence[int]], starts: Sequence[int], scale: float, temperature: float = 1.0
) -> MicroBatch:
    """Rows whose tokens from `starts` on are trained with weight `scale`."""
    shape = (len(rows), max(map(len, rows)))
    ids, weights = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[i, : len(row)] = row
        weights[i, start : len(row)] = scale
    zeros = np.zeros(shape, dtype=np.float32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return MicroBatch(ids, lengths, weights, zeros, zeros, np.full(len(rows), temperature, dtype=np.float32))


def sample_rows(seed: int, vocab: int = 460) -> tuple[list[list[int]], list[int]]:
    """Six rows: siblings with one prompt, one that leaves it in the middle, one that is a prefix of another, and a stranger."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, vocab, 12).tolist()
    rows = [prompt + draw.integers(0, vocab, n).tolist() for n in (3, 8, 5)]
    rows += [rows[1][:15], prompt[:6] + draw.integers(0, vocab, 7).tolist(), draw.integers(0, vocab, 9).tolist()]
    return rows, [12, 12, 12, 13, 6, 1]


def reference_logprobs(model: Any, batch: MicroBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Row by row through transformers, without padding or packing."""
    out = np.zeros(batch.token_ids.shape, dtype=np.float32)
    for i, length in enumerate(batch.lengths):
        ids = torch.from_numpy(batch.token_ids[i, :length])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1] / float(batch.temperature[i])
        out[i, 1:length] = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
    return np.where(batch.weights != 0, out, 0)


def torch_step(model: Any, batches: Sequence[MicroBatch], optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """One plain step on transformers' own model; returns loss and gradient norm."""
    total = torch.zeros(())
    for batch in batches:
        for i, length in enumerate(batch.lengths):
            ids = torch.from_numpy(batch.token_ids[i, :length])
            logits = model(ids[None]).logits[0, :-1] / float(batch.temperature[i])
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            total = total - (torch.from_numpy(batch.weights[i, 1:length]) * logprobs).sum()
    optimizer.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return float(total.detach()), float(norm)


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def exported(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def batches_of(step: int) -> list[MicroBatch]:
    rows, starts = sample_rows(step)
    return [micro_batch(rows[:4], starts[:4], 0.05, 0.8), micro_batch(rows[4:], starts[4:], 0.04)]


@pytest.fixture(scope="session", params=["llama", "llama-untied", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    if request.param == "qwen3_moe":
        return make_tiny_moe(path)
    return make_tiny_llama(path, tie_word_embeddings=request.param == "llama")


class BackendSuite:
    @pytest.fixture
    def make(self) -> MakeBackend:
        raise NotImplementedError

    def test_logprobs_are_those_of_transformers(self, make: MakeBackend, folder: Path) -> None:
        rows, starts = sample_rows(0)
        batch = micro_batch(rows, starts, 1.0, temperature=0.7)
        for chunk in (0, 4):
            ours = make(folder, chunk=chunk).logprobs([batch])[0]
            np.testing.assert_allclose(ours, reference_logprobs(hf_model(folder), batch), atol=2e-5)

    def test_three_steps_are_those_of_torch(self, make: MakeBackend, folder: Path, tmp_path: Path) -> None:
        backend, model = make(folder, chunk=5), hf_model(folder)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
        for step in range(3):
            loss, norm = torch_step(model, batches_of(step), optimizer)
            stats, update = backend.forward_backward(batches_of(step), nll_loss), backend.optim_step(LR)
            assert stats.loss == pytest.approx(loss, abs=1e-5)
            assert update.grad_norm == pytest.approx(norm, rel=1e-4)
            assert norm > CLIP, "the test must exercise clipping"
        model.save_pretrained(tmp_path)
        from safetensors.torch import load_file

        theirs, ours = load_file(tmp_path / "model.safetensors"), exported(backend)
        assert theirs.keys() == ours.keys()
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-5

    def test_export_is_bit_exact(self, make: MakeBackend, folder: Path) -> None:
        from safetensors.torch import load_file

        stored, ours = load_file(folder / "model.safetensors"), exported(make(folder))
        assert stored.keys() == ours.keys()
        assert all(torch.equal(stored[name], ours[name]) for name in stored)

    def test_trained_weights_reload_in_transformers(self, make: MakeBackend, folder: Path, tmp_path: Path) -> None:
        backend = make(folder)
        backend.forward_backward(batches_of(0), nll_loss)
        backend.optim_step(LR)
        save_file(exported(backend), str(tmp_path / "model.safetensors"), {"format": "pt"})
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        batch = batches_of(7)[0]
        ours, theirs = backend.logprobs([batch])[0], reference_logprobs(hf_model(tmp_path), batch)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        assert np.abs(ours - reference_logprobs(hf_model(folder), batch)).max() > 1e-3, (
            "training must have changed something"
        )

    def test_a_loaded_backend_goes_on_identically(self, make: MakeBackend, folder: Path, tmp_path: Path) -> None:
        first = make(folder)
        first.freeze_reference()
        for step in range(2):
            first.forward_backward(batches_of(step), nll_loss)
            first.optim_step(LR)
        first.save(tmp_path / "state")
        second = make(folder)
        second.forward_backward(batches_of(5), nll_loss)  # must not leak into what is loaded
        second.load(tmp_path / "state")
        for backend in (first, second):
            backend.forward_backward(batches_of(2), nll_loss)
            backend.optim_step(LR)
        left, right = exported(first), exported(second)
        assert all(torch.equal(left[name], right[name]) for name in left)
        batch = batches_of(3)
        for a, b in zip(first.logprobs(batch, reference=True), second.logprobs(batch, reference=True), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_packing_changes_nothing(self, make: MakeBackend, folder: Path) -> None:
        rows, starts = sample_rows(4)
        together, alone = make(folder), make(folder)
        one = together.forward_backward([micro_batch(rows, starts, 0.02)], nll_loss)
        each = alone.forward_backward(
            [micro_batch([r], [s], 0.02) for r, s in zip(rows, starts, strict=True)], nll_loss
        )
        assert one.tokens < each.tokens == sum(map(len, rows))
        assert one.loss == pytest.approx(each.loss, abs=1e-5)
        assert one.sums["tokens"] == each.sums["tokens"]
        assert together.optim_step(LR).grad_norm == pytest.approx(alone.optim_step(LR).grad_norm, rel=1e-5)

    def test_reference_stays_while_weights_move(self, make: MakeBackend, folder: Path) -> None:
        backend, batch = make(folder), batches_of(1)
        with pytest.raises(TrainerError, match="freeze_reference"):
            backend.logprobs(batch, reference=True)
        backend.freeze_reference()
        before = backend.logprobs(batch)
        backend.forward_backward(batch, nll_loss)
        backend.optim_step(LR)
        for old, kept, new in zip(
            before, backend.logprobs(batch, reference=True), backend.logprobs(batch), strict=True
        ):
            np.testing.assert_array_equal(old, kept)
            assert np.abs(new - kept).max() > 1e-3

    def test_gradients_that_are_not_finite_change_nothing(self, make: MakeBackend, folder: Path) -> None:
        backend = make(folder)
        before = exported(backend)
        rows, starts = sample_rows(2)
        backend.forward_backward([micro_batch(rows, starts, float("inf"))], nll_loss)
        assert backend.optim_step(LR).skipped
        assert all(torch.equal(before[name], tensor) for name, tensor in exported(backend).items())
        backend.forward_backward(batches_of(0), nll_loss)
        assert not backend.optim_step(LR).skipped, "the bad gradients must be gone"

    def test_reset_forgets_moments(self, make: MakeBackend, folder: Path, tmp_path: Path) -> None:
        fresh, reset = make(folder), make(folder)
        reset.forward_backward(batches_of(0), nll_loss)
        reset.optim_step(LR)
        reset.reset_optimizer()
        reset.save(tmp_path / "state")
        fresh.load(tmp_path / "state")
        for backend in (fresh, reset):
            backend.forward_backward(batches_of(1), nll_loss)
            backend.optim_step(LR)
        left, right = exported(fresh), exported(reset)
        assert all(torch.equal(left[name], right[name]) for name in left)

    def test_a_checkpoint_of_another_model_is_refused(self, make: MakeBackend, folder: Path, tmp_path: Path) -> None:
        other = make_tiny_llama(tmp_path / "other", num_hidden_layers=1)
        make(other).save(tmp_path / "state")
        with pytest.raises(CheckpointError, match="another model"):
            make(folder).load(tmp_path / "state")
        with pytest.raises(CheckpointError, match="not a whole checkpoint"):
            make(folder).load(tmp_path / "nowhere")

    def test_losses_see_the_batch(self, make: MakeBackend, folder: Path) -> None:
        """Every array arrives under its field's name, and log p stands where the weights are."""
        backend, batch = make(folder), batches_of(0)[0]
        batch = dataclasses.replace(batch, ref_logprobs=batch.advantages)
        expected = backend.logprobs([batch])[0]
        seen: dict[str, Any] = {}

        def loss(logprobs: torch.Tensor, given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.update({name: tensor.clone() for name, tensor in given.items()}, logprobs=logprobs.detach().clone())
            return logprobs.sum(), {"max_a": logprobs.detach().max()}

        backend.forward_backward([batch], loss)
        np.testing.assert_allclose(seen["logprobs"].numpy(), expected, atol=1e-6)
        names = {"token_ids", "lengths", "weights", "rollout_logprobs", "advantages", "temperature", "ref_logprobs"}
        assert seen.keys() == names | {"logprobs"}
        np.testing.assert_array_equal(seen["weights"].numpy(), batch.weights)
