"""The formulas of the path without GPUs, held to what our own trainer and engine really take."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import data_of
from palestra.cli.planner.local import (
    engine_memory,
    local_activations,
    local_engine,
    local_held,
    local_kept,
    local_overhead,
    local_state,
    local_tokens,
    local_total,
    publishing_bytes,
    slot_tokens,
)
from palestra.cli.planner.plan import case_of
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.types import Example
from palestra.cli.sections import ModelConfig
from palestra.server.embedded.core import Core
from palestra.server.embedded.types import EngineOptions
from palestra.trainer.packaged import resolve_model
from tests.localsteps import Scene, peak_bytes, saved_bytes, scene, state_bytes
from tests.tiny import make_tiny_llama

SMOLLM2 = MODELS["smollm2-135m"]
STEPS = [(256, 1, 0), (256, 4, 0), (1024, 4, 0), (1024, 4, 128)]
"""Nodes, rows, predictions whose logits exist at a time."""
PEAKS = [STEPS[0], STEPS[-1]]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A vocabulary that is large beside the model, as small models have it: logits are most of the memory.
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), vocab_size=4096)


@pytest.fixture(scope="module")
def folders(tiny_moe: Path, tiny_llama: Path) -> dict[str, Path]:
    return {"moe": tiny_moe, "llama": tiny_llama}


@pytest.fixture(scope="module")
def scenes(folders: dict[str, Path]) -> Callable[..., Scene]:
    """Scenes by their words, each made once: a backend is half a second."""

    @functools.cache
    def made(family: str, tokens: int, rows: int, chunk: int) -> Scene:
        return scene(folders[family], tokens=tokens, rows=rows, chunk=chunk)

    return made


def case_with(**changes: Any) -> Case:
    """The laptop's, with fields changed (`__` for a dot)."""
    case = case_of(data_of(Example("laptop", {name.replace("__", "."): value for name, value in changes.items()})))[0]
    assert case is not None
    return case


@pytest.mark.parametrize(("tokens", "rows", "chunk"), STEPS)
@pytest.mark.parametrize("family", ["moe", "llama"])
def test_the_formula_is_what_autograd_keeps(
    scenes: Callable[..., Scene], family: str, tokens: int, rows: int, chunk: int
) -> None:
    step = scenes(family, tokens, rows, chunk)
    saved, nodes = saved_bytes(step)
    assert nodes == tokens
    assert saved == pytest.approx(step.kept(nodes).saved, rel=0.02)


@pytest.mark.parametrize(("tokens", "rows", "chunk"), PEAKS)
@pytest.mark.parametrize("family", ["moe", "llama"])
def test_a_step_takes_no_more_than_the_formula_says(
    scenes: Callable[..., Scene], family: str, tokens: int, rows: int, chunk: int
) -> None:
    step = scenes(family, tokens, rows, chunk)
    step.step()  # what the first step sets up for good does not belong to a step
    assert peak_bytes(step.step) == pytest.approx(step.kept(tokens).total, rel=0.05)


@pytest.mark.parametrize("family", ["moe", "llama"])
def test_the_state_is_exact(scenes: Callable[..., Scene], family: str) -> None:
    step = scenes(family, 256, 1, 0)
    step.step()
    step.backend.optim_step(0.0)
    held = step.state()
    assert state_bytes(step.backend) == (held.weights, held.gradients, held.moments)
    assert held.reference == 0
    step.backend.freeze_reference()
    assert step.backend._reference is not None
    assert (
        sum(each.nbytes for each in step.backend._reference.values())
        == local_state(step.dims, reference=True).reference
    )


def test_pieces_of_logits_are_not_always_less() -> None:
    """The output projection's gradient is then there twice: with few predictions that is more than the logits were."""

    def total(predictions: int, chunk: int) -> int:
        return local_activations(SMOLLM2, tokens=1024, predictions=predictions, chunk=chunk).total

    assert total(300, 64) > total(300, 0)
    assert total(1000, 64) < total(1000, 0)
    assert total(64, 64) == total(64, 0)


def test_masks_grow_with_the_square() -> None:
    one = local_activations(SMOLLM2, tokens=1024, predictions=512)
    two = local_activations(SMOLLM2, tokens=2048, predictions=512)
    assert (two.layers, two.masks) == (2 * one.layers, 4 * one.masks)
    assert one.masks == 1024 * 1024 * 4
    assert local_activations(SMOLLM2, tokens=1024, predictions=512, masked=False).masks == 0


def test_the_engine_s_tensors_are_what_the_formula_says(tiny_moe: Path, scenes: Callable[..., Scene]) -> None:
    options = EngineOptions(str(tiny_moe), context_length=768, max_running=8, max_total_tokens=4096, num_threads=1)
    core = Core(options)
    space, store = core.scheduler.space, core.scheduler.store
    dims = scenes("moe", 256, 1, 0).dims
    for longest in (100, 256, 300, 700):
        space.reserve(longest, 1)
        expected = engine_memory(dims, slots=8, pooled_tokens=4096, longest=longest, context=768)
        assert space.experts is not None
        assert space.kv.nbytes + space.experts.nbytes == expected.workspace
    assert store._experts is not None
    assert store._kv.nbytes + store._experts.nbytes == expected.store
    assert sum(each.nbytes for each in core.model.module.parameters()) == expected.weights
    assert expected.total > expected.weights + expected.cache + expected.passing


def test_slots_double_and_stop_at_the_context() -> None:
    assert [slot_tokens(longest, 768) for longest in (1, 256, 257, 600, 5000)] == [256, 256, 512, 768, 768]
    assert slot_tokens(40, 128) == 128


def test_a_transport_keeps_what_it_needs() -> None:
    assert publishing_bytes(1000, "disk", "full", 64) == 0
    assert publishing_bytes(1000, "disk", "delta", 64) == 1000
    assert publishing_bytes(1000, "ipc", "full", 64) == 128
    assert publishing_bytes(1000, "gloo", "full", 4096) == 2000


def test_a_case_without_gpus_is_counted_by_the_local_formulas() -> None:
    case = case_with()
    assert local_tokens(case)[0] == 2048
    held, kept = local_held(case), local_kept(case)
    memory = case.stage_memories()
    assert len(memory) == 1
    assert memory[0].state == held.total
    assert memory[0].total == case.worst_train_bytes == pytest.approx(local_total(held, kept))
    assert case.stage_activations(0).total == kept.total
    engine = local_engine(case)
    assert engine is not None
    assert engine.weights == held.weights


def test_what_a_run_s_file_says_reaches_the_formulas() -> None:
    plain = case_with()
    assert local_held(case_with(algo__kl_coef=0.1)).reference == local_held(plain).weights
    assert local_kept(case_with(train__max_tokens_per_gpu=1024)).masks * 4 == local_kept(plain).masks
    assert local_kept(case_with(train__logprob_chunk_tokens=64)).scored < local_kept(plain).scored
    # A row that is longer than the bound goes alone.
    assert local_tokens(case_with(train__max_tokens_per_gpu=100))[0] == 768
    assert local_tokens(case_with(algo__group_size=1, algo__groups_per_step=1))[2] is False
    few, many = (local_engine(case_with(rollout__max_running=slots)) for slots in (4, 64))
    assert few is not None
    assert many is not None
    assert many.workspace == 16 * few.workspace
    assert local_engine(case_with(rollout__engine="openai", rollout__urls=["http://127.0.0.1:1"])) is None


@pytest.mark.parametrize("preset", MODELS)
def test_every_preset_has_numbers(preset: str) -> None:
    """Models that the trainer refuses included: a plan's numbers must not raise beside the finding that says so."""
    dims = MODELS[preset]
    kept = local_activations(dims, tokens=512, predictions=100)
    assert 0 < kept.saved < kept.total
    assert engine_memory(dims, slots=1, pooled_tokens=256, longest=1, context=32).total > local_state(dims).weights
    assert local_overhead(kept) > 0
    nothing = dataclasses.replace(dims, layers=0, dense_layers=0, linear_layers=0, vocab=0)
    assert local_activations(nothing, tokens=0, predictions=0).total == 0


@pytest.mark.walk
def test_the_resident_peak_of_smollm2() -> None:
    """The whole estimate, runtime and heap included: those two are guesses, so the band is wide. Seen: 0.92 to 1.02."""
    folder = resolve_model("smollm2-135m", Path(ModelConfig(path="smollm2-135m").cache).expanduser())
    words = [sys.executable, str(Path(__file__).parent / "localsteps.py"), str(folder), "128", "4", "0", "--resident"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=110, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == 128
    assert 0.85 < found["resident"] / found["resident_formula"] < 1.15
