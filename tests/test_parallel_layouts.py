"""Every layout trains as one process does: log p, gradients and weights after three AdamW steps with uneven masks and shared beginnings.

One process is held to transformers and torch's AdamW here too, so the layouts are. Two ranks are of the `ci` tier, four of `full`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from palestra.trainer.megatron import convert
from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
from palestra.trainer.megatron.optimizer import OptimSettings
from palestra.trainer.types import MicroBatch
from tests.conformance.backend_suite import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    LR,
    hf_model,
    micro_batch,
    reference_logprobs,
    sample_rows,
    torch_step,
)
from tests.parallel_ranks import as_plan, one_step, run_ranks, steps_of
from tests.tiny import make_tiny_llama, make_tiny_moe

CLOSE = 1e-5
OPTIM = {"weight_decay": DECAY, "betas": BETAS, "eps": EPS, "clip_grad": CLIP}

TWO: dict[str, dict[str, Any]] = {
    "tp2": {"model": "moe", "layout": {"tp": 2, "etp": 2, "sp": True}},
    "ep2": {"model": "moe", "layout": {"ep": 2}, "chunk": 3},
    "dp2": {"model": "moe", "layout": {}},
    "pp2": {"model": "moe", "layout": {"pp": 2}},
    "pp2-vpp2": {"model": "moe", "layout": {"pp": 2, "vpp": 2}},
    "cp2": {"model": "moe", "layout": {"cp": 2}, "chunk": 3},
    "cp2-ep2": {"model": "moe", "layout": {"cp": 2, "ep": 2}},
    "tp2-ep2": {"model": "moe", "layout": {"tp": 2, "ep": 2, "sp": True}},
    "pp2-uneven": {"model": "llama", "layout": {"pp": 2, "first_stage_layers": 1}},
    "llama-tp2": {"model": "llama", "layout": {"tp": 2}, "chunk": 3},
    "llama-tp2-sp": {"model": "llama", "layout": {"tp": 2, "sp": True}},
    "llama-pp2": {"model": "llama", "layout": {"pp": 2}},
    "llama-cp2": {"model": "llama", "layout": {"cp": 2}},
    "llama-dp2": {"model": "llama", "layout": {}},
}
"""Layouts of two ranks."""
RESUMED: dict[str, dict[str, Any]] = {
    "same-tp2": {"model": "moe", "layout": {"tp": 2, "etp": 2, "sp": True}, "resume": "same-tp2"},
    "tp2-to-dp2": {"model": "moe", "layout": {}, "resume": "same-tp2"},
    "dp2-to-pp2": {"model": "moe", "layout": {"pp": 2}, "resume": "tp2-to-dp2"},
    "pp2-to-ep2": {"model": "moe", "layout": {"ep": 2}, "resume": "dp2-to-pp2"},
    "same-ep2": {"model": "moe", "layout": {"ep": 2}, "resume": "same-ep2"},
    "same-llama-pp2": {"model": "llama", "layout": {"pp": 2}, "resume": "same-llama-pp2"},
}
"""Those that go on from a checkpoint, and whose."""
FOUR: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"model": "moe", "layout": {"tp": 2, "etp": 2, "pp": 2, "sp": True}},
    "pp2-ep2": {"model": "moe", "layout": {"pp": 2, "ep": 2}},
    "ep4": {"model": "moe", "layout": {"ep": 4}},
    "tp2-ep2-etp1": {"model": "moe", "layout": {"tp": 2, "ep": 2, "sp": True}},
    "tp2-ep2-etp2": {"model": "moe", "layout": {"tp": 2, "ep": 2, "etp": 2, "sp": True}},
    "cp2-tp2": {"model": "moe", "layout": {"cp": 2, "tp": 2, "etp": 2, "sp": True}, "chunk": 3},
    "cp2-ep2-dp2": {"model": "moe", "layout": {"cp": 2, "ep": 2}},
    "tp2-pp2-ep2": {"model": "moe", "layout": {"tp": 2, "pp": 2, "ep": 2, "sp": True}},
    "tp2-pp2-vpp2": {"model": "moe", "layout": {"tp": 2, "etp": 2, "pp": 2, "vpp": 2, "sp": True}},
    "pp2-vpp2-ep2": {"model": "moe", "layout": {"pp": 2, "vpp": 2, "ep": 2}},
    "pp4": {"model": "moe", "layout": {"pp": 4}},
    "dp4": {"model": "moe", "layout": {}},
    "llama-cp4": {"model": "llama", "layout": {"cp": 4}},
    "llama-cp2-pp2": {"model": "llama", "layout": {"cp": 2, "pp": 2}},
    "llama-pp2-dp2": {"model": "llama", "layout": {"pp": 2}},
    "llama-tp2-dp2": {"model": "llama", "layout": {"tp": 2}},
    "llama-tp2-pp2": {"model": "llama", "layout": {"tp": 2, "pp": 2, "sp": True}, "chunk": 3},
    "qwen2-tp2-pp2": {"model": "qwen2", "layout": {"tp": 2, "pp": 2, "sp": True}},
    "qwen3-tp2-cp2": {"model": "qwen3", "layout": {"tp": 2, "cp": 2}},
    "mixtral-tp2-ep2": {"model": "mixtral", "layout": {"tp": 2, "ep": 2, "sp": True}},
}
"""Layouts of four ranks."""


def step_batches(step: int) -> list[MicroBatch]:
    """Three micro-batches, unlike in rows, tokens, weights and temperature: no number of data ranks divides them."""
    rows, starts = sample_rows(step)
    parts = ((slice(0, 3), 0.05, 0.8), (slice(3, 5), 0.04, 1.0), (slice(5, 6), 0.06, 1.0))
    return [micro_batch(rows[at], starts[at], scale, temperature) for at, scale, temperature in parts]


STEPS = [step_batches(step) for step in range(3)]


class _OneProcess(MegatronBackend):
    """The backend of one process, with the gradients that the parallel one tells."""

    def gradients(self) -> Any:
        grads = {name: parameter.main_grad for name, parameter in self.model.named_parameters()}  # type: ignore[attr-defined]
        return convert.export(grads, self.arch)


@dataclass
class Scene:
    """Tiny models of four layers, and what one process makes of them."""

    folder: Path

    @cached_property
    def models(self) -> dict[str, str]:
        small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        dense = {**small, "intermediate_size": 96}
        made = {
            "moe": make_tiny_moe(self.folder / "moe", **small, moe_intermediate_size=48),
            "llama": make_tiny_llama(self.folder / "llama", **dense),
            **{name: other_model(name, self.folder / name, dense) for name in ("qwen2", "qwen3", "mixtral")},
        }
        return {name: str(folder) for name, folder in made.items()}

    def plan(self, cases: Mapping[str, Any]) -> dict[str, Any]:
        """For `run_ranks`."""
        steps = [[as_plan(batch) for batch in batches] for batches in STEPS]
        return {"models": self.models, "optim": OPTIM, "lr": LR, "steps": steps, "cases": dict(cases)}

    def alone(self, model: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """`steps_of` in one process."""
        if model not in self._alone:
            backend = _OneProcess.from_folder(Path(self.models[model]), settings())
            self._alone[model] = steps_of(backend, STEPS, LR)
        return self._alone[model]

    @cached_property
    def _alone(self) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        return {}


def settings() -> BackendSettings:
    return BackendSettings(optim=OptimSettings(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP))


def other_model(name: str, folder: Path, sizes: Mapping[str, Any]) -> Path:
    """A random model of a family that tests.tiny has no maker for."""
    import transformers

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    }
    kind, extra = kinds[name]
    # An odd vocabulary: its last share is padded under tensor parallelism.
    config = getattr(transformers, f"{kind}Config")(**sizes, **extra, vocab_size=467, max_position_embeddings=256)
    torch.manual_seed(3)
    getattr(transformers, f"{kind}ForCausalLM")(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("models"))


@dataclass(frozen=True)
class Ran:
    """What ranks left."""

    folder: Path
    records: list[dict[str, Any]]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def two(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("two")
    return Ran(folder, run_ranks(folder, 2, scene.plan({**TWO, **RESUMED})))


@pytest.fixture(scope="module")
def four(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("four")
    return Ran(folder, run_ranks(folder, 4, scene.plan(FOUR), deadline_s=800))


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], kind: str) -> float:
    """The largest difference among tensors of a kind; of gradients, as a share of the tensor's largest where that is above 1."""
    names = {name for name in theirs if name.startswith(f"{kind}.")}
    assert names == {name for name in ours if name.startswith(f"{kind}.")}
    scale = {name: max(1.0, float(theirs[name].abs().max())) if kind == "grad" else 1.0 for name in names}
    return max(float((ours[name] - theirs[name]).abs().max()) / scale[name] for name in names)


def held_to_one_process(ran: Ran, scene: Scene, name: str, model: str) -> None:
    record, tensors = scene.alone(model)
    ours = ran.tensors(name)
    found = {kind: apart(ours, tensors, kind) for kind in ("before", "grad", "after", "param")}
    assert max(found.values()) <= CLOSE, found
    told = ran.records[0][name]
    assert all(each[name] == told for each in ran.records), "ranks were told different things"
    assert told["losses"] == pytest.approx(record["losses"], abs=CLOSE)
    assert told["norms"] == pytest.approx(record["norms"], rel=CLOSE)
    assert (told["nodes"], told["counts"]) == (record["nodes"], record["counts"])


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one_process(two: Ran, scene: Scene, name: str) -> None:
    held_to_one_process(two, scene, name, TWO[name]["model"])


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one_process(four: Ran, scene: Scene, name: str) -> None:
    held_to_one_process(four, scene, name, FOUR[name]["model"])


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_goes_on_under_any_layout(two: Ran, scene: Scene, name: str, tmp_path: Path) -> None:
    """Bit for bit under its own layout; under another, and in one process, as the run that never stopped."""
    model, ours = RESUMED[name]["model"], two.tensors(name)
    whole = scene.alone(model)[1]
    assert apart(ours, whole, "param") <= CLOSE
    if RESUMED[name]["resume"] == name:
        assert two.records[0][name]["same"] is True
    alone = MegatronBackend.from_folder(Path(scene.models[model]), settings())
    first = alone.logprobs(STEPS[-1])
    alone.load(two.folder / f"{name}.state")
    for i, kept in enumerate(alone.logprobs(STEPS[-1], reference=True)):
        np.testing.assert_allclose(kept, first[i], atol=1e-6)
        np.testing.assert_allclose(ours[f"reference.{i}"].numpy(), first[i], atol=CLOSE)
    one_step(alone, STEPS[-1], LR)
    assert apart({f"param.{key}": tensor for key, tensor in alone.export()}, whole, "param") <= CLOSE


@pytest.mark.ci
@pytest.mark.parametrize("model", ["moe", "llama"])
def test_one_process_trains_as_transformers_does(scene: Scene, model: str, tmp_path: Path) -> None:
    record, tensors = scene.alone(model)
    theirs = hf_model(Path(scene.models[model]))
    for i, batch in enumerate(STEPS[-1]):
        np.testing.assert_allclose(tensors[f"before.{i}"].numpy(), reference_logprobs(theirs, batch), atol=CLOSE)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for step, batches in enumerate(STEPS):
        loss, norm = torch_step(theirs, batches, optimizer)
        assert norm > CLIP, "the test must exercise clipping"
        assert record["losses"][step] == pytest.approx(loss, abs=CLOSE)
        assert record["norms"][step] == pytest.approx(norm, rel=1e-4)
    theirs.save_pretrained(tmp_path)
    saved = {f"param.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert apart(tensors, saved, "param") <= CLOSE
