"""The planner's arithmetic against vectors worked out by hand, by another program or read off a boot log, and laws that it keeps."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.cli.planner import flow, memory
from palestra.cli.planner import model as shapes
from palestra.cli.planner.memory import GIB
from palestra.cli.planner.presets import DEVICES, MODELS
from palestra.trainer.layout.types import Layout, stage_layers
from tests.planvectors import FORMULAS, VECTORS, Values


def same(found: Any, wanted: Any) -> bool:
    """Integers exactly; others within a thousandth, or as far as the vector was written out."""
    if not isinstance(wanted, float):
        return bool(found == wanted) or (isinstance(found, float) and found == pytest.approx(wanted, rel=1e-9))
    written = Decimal(str(wanted)).as_tuple().exponent
    assert isinstance(written, int)
    return bool(found == pytest.approx(wanted, rel=1e-3, abs=0.500001 * 10**written))


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["id"] for vector in VECTORS])
def test_a_vector_comes_out(vector: Values) -> None:
    found = FORMULAS[vector["formula"]](vector["inputs"])
    wanted = vector["outputs"]
    assert {name for name in wanted if not same(found[name], wanted[name])} == set(), (found, wanted)


def test_there_are_as_many_vectors_as_were_worked_out() -> None:
    assert len(VECTORS) == 102


LAYERED = [name for name, dims in MODELS.items() if dims.layers % 2 == 0]
SHARES = st.sampled_from([1, 2, 4, 8])
ADAM = memory.STATE["bf16", "adam"]


@given(st.sampled_from(LAYERED), SHARES, st.sampled_from([1, 2]), SHARES, SHARES, st.sampled_from([0.0, 0.5, 1.0]))
def test_more_gpus_in_data_parallel_never_take_more_memory(
    name: str, tp: int, pp: int, ep: int, copies: int, offload: float
) -> None:
    gpus = tp * pp * ep
    layout = Layout(gpus, tp=tp, pp=pp, ep=ep)
    few = memory.training_state(MODELS[name], layout, ADAM, offload)
    many = memory.training_state(MODELS[name], replace(layout, gpus=gpus * copies), ADAM, offload)
    for one, other in zip(few, many, strict=True):
        assert other.gpu_bytes <= one.gpu_bytes
        assert other.host_bytes <= one.host_bytes


@given(st.sampled_from(LAYERED), SHARES, st.sampled_from([1, 2]), st.sampled_from([2, 4]))
def test_more_tensor_parallel_ranks_never_hold_more_of_a_dense_model(name: str, tp: int, pp: int, more: int) -> None:
    model = replace(MODELS[name], experts=0, topk=0)
    one = memory.training_state(model, Layout(tp * pp, tp=tp, pp=pp), ADAM)
    other = memory.training_state(model, Layout(tp * more * pp, tp=tp * more, pp=pp), ADAM)
    for before, after in zip(one, other, strict=True):
        assert after.dense_parameters <= before.dense_parameters
        assert after.gpu_bytes <= before.gpu_bytes


@given(
    st.sampled_from([name for name, dims in MODELS.items() if dims.linear_layers]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1_000, 100_000),
    st.sampled_from([1, 3, 4, 5]),
    st.floats(20.0, 200.0),
)
def test_at_the_balanced_ratio_both_caches_run_out_together(
    name: str, tp: int, context: int, slots: int, free_gib: float
) -> None:
    token, slot = shapes.kv_token_bytes(MODELS[name], tp), shapes.state_slot_bytes(MODELS[name], tp)
    ratio = memory.balanced_ratio(slot, token, context, slots)
    pool = memory.engine_pool(
        memory_bytes=free_gib * GIB,
        fraction=1.0,
        weights=0.0,
        kv_bytes=token,
        slot_bytes=slot,
        ratio=ratio,
        slots_per_request=slots,
    )
    assert pool.max_running is not None
    assert abs(pool.kv_tokens // context - pool.max_running) <= 1


@given(st.integers(1, 64), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 200))
def test_a_share_of_prefixes_that_hit_is_a_share(group: int, prompt: int, said: int, seen: int, turns: int) -> None:
    of_group = flow.group_prefix(group, prompt, said)
    assert 0 <= of_group.hit < 1
    assert of_group.shared_tokens <= of_group.unshared_tokens
    assert 0 <= flow.turn_prefix(prompt, said, seen, turns).hit < 1


@given(st.integers(1, 200), st.integers(1, 16), st.none() | st.integers(1, 60), st.none() | st.integers(1, 60))
def test_stages_hold_every_layer_once(layers: int, pp: int, first: int | None, last: int | None) -> None:
    spread = stage_layers(layers, pp, first, last)
    if spread is not None:
        assert sum(spread) == layers
        assert len(spread) == pp
        assert min(spread) > 0


@given(st.sampled_from(sorted(MODELS)), SHARES)
def test_parameters_of_all_stages_add_up_to_the_model(name: str, ep: int) -> None:
    model = MODELS[name]
    spread = memory.training_state(model, Layout(ep, ep=ep), ADAM)
    padding = (memory.padded_vocab(model, 1) - model.vocab) * model.hidden * (1 if model.tied else 2)
    held = sum(stage.dense_parameters + stage.expert_parameters * ep for stage in spread)
    assert round(held - padding) == shapes.parameters(model).total


def test_devices_have_what_formulas_ask_for() -> None:
    for name, device in DEVICES.items():
        assert device.flops > 0, name
        assert device.hbm > 0, name
        assert (device.memory_bytes > 0) == (name != "cpu"), name
