"""The simulator behind `benchmarks/schedule.py`, in virtual time: its engines by hand, and what schedules may and may not do in it."""

from __future__ import annotations

import asyncio
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.schedule import gate
from benchmarks.schedule_cells import (
    BALANCED_S,
    ENGINES,
    GROUPS,
    SIZE,
    SLOTS,
    Cell,
    Figures,
    cells,
    of_bound,
    of_ceiling,
    play,
    settings_of,
    table,
)
from benchmarks.schedule_model import CAP, MEDIAN, PER_REQUEST_S, STEP_S, TAIL, Engine, Replies, Request
from benchmarks.schedule_sim import Simulation, World

SHORT = {"warmup": 1, "steps": 3}
SYNC = Cell("sync", {"kind": "sync"})


def request(tokens: int, name: str = "a") -> Request:
    return Request(name, "g", 0, 0, tokens)


def figures(name: str, **changes: Any) -> Figures:
    numbers = dict.fromkeys(Figures.__slots__, 0.0) | {"name": name, "age_max": 0, "balanced": True}
    return Figures(**{**numbers, **changes})


def test_replies_have_the_tail_that_they_are_said_to_have_and_do_not_depend_on_when_they_are_asked_for() -> None:
    replies = Replies(0, 8)
    lengths = np.array([replies.group(number)[0] for number in range(4_000)]).ravel()
    assert np.median(lengths) == pytest.approx(MEDIAN, rel=0.02)
    assert np.quantile(lengths, 0.99) / np.median(lengths) == pytest.approx(TAIL, rel=0.05)
    assert lengths.max() == CAP
    assert lengths.min() >= 1
    assert Replies(0, 8).group(7) == replies.group(7) != replies.group(8)


def test_the_asked_share_of_groups_has_equal_rewards() -> None:
    replies = Replies(1, 4, equal=0.4)
    alike = [len(set(replies.group(number)[1])) == 1 for number in range(2_000)]
    assert np.mean(alike) == pytest.approx(0.4, abs=0.04)


def test_requests_share_an_engine_and_the_rest_queue_in_order() -> None:
    engine = Engine(2)
    for tokens, name in ((10, "a"), (30, "b"), (10, "c")):
        engine.submit(request(tokens, name))
    two = STEP_S + 2 * PER_REQUEST_S
    assert engine.next_end() == pytest.approx(10 * two)
    engine.advance(engine.next_end())
    assert engine.take_ended().name == "a"
    assert engine.next_end() == pytest.approx(20 * two)  # c took the place and ends together with nobody yet
    engine.advance(engine.next_end())
    assert engine.take_ended().name == "c"
    engine.advance(engine.next_end())
    assert engine.take_ended().name == "b"
    assert engine.busy_s == pytest.approx(20 * two * 2 + 10 * (STEP_S + PER_REQUEST_S))
    assert engine.next_end() == float("inf")


def test_a_frozen_engine_samples_nothing_and_new_weights_begin_a_span() -> None:
    engine = Engine(1)
    engine.submit(request(100))
    one = STEP_S + PER_REQUEST_S
    engine.advance(40 * one)
    engine.frozen = True
    engine.advance(41.0)
    engine.change(3)
    engine.change(4)  # nothing was sampled with these
    engine.frozen = False
    assert engine.next_end() == pytest.approx(41.0 + 60 * one)
    engine.advance(engine.next_end())
    assert engine.take_ended().spans == [(3, 40)]


@pytest.fixture(scope="module")
def sync() -> Figures:
    """What the others are compared with."""
    return play(SYNC, **SHORT)


def test_a_synchronous_run_trains_whole_batches_of_its_own_weights_and_the_same_each_time(sync: Figures) -> None:
    found = play(SYNC, **SHORT)
    assert found == sync
    assert found != play(SYNC, warmup=0, steps=1)
    assert (found.groups, found.age_max, found.lost, found.masked) == (GROUPS, 0, 0.0, 0.0)
    assert found.step_s == pytest.approx(found.generate_s + found.train_s + found.publish_s)
    assert found.balanced


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("too_old", ["drop", "mask"])
def test_no_trained_token_is_beyond_the_bound(bound: int, too_old: str) -> None:
    """Law 7, in a world where rollouts outlive many steps: what is too old is dropped or masked, and the ledger says so."""
    cell = Cell("async", {"kind": "async", "max_staleness": bound, "too_old": too_old}, train_token_s=1e-5)
    found = play(cell, warmup=1, steps=4)
    assert 0 < found.age_max <= bound
    assert found.balanced
    if bound == 1:
        assert (found.masked > 0, found.lost > 0) == (too_old == "mask", too_old == "drop")


def test_overlap_hides_generation_behind_training(sync: Figures) -> None:
    off = play(Cell("o", {"kind": "one_step_off"}), **SHORT)
    assert off.tokens_per_s > 1.3 * sync.tokens_per_s
    assert off.trainer_idle < sync.trainer_idle
    assert off.age_max == 1


def test_partial_rollout_takes_what_is_ready_and_fills_the_bubble(sync: Figures) -> None:
    base = {"kind": "sync", "max_staleness": 8, "colocated": True, "partial": "resume"}
    partial = play(Cell("p", {**base, "generation_budget_tokens": 10_000}), warmup=1, steps=6)
    assert 1 <= partial.groups < GROUPS
    assert partial.bubble < 0.6 * sync.bubble
    assert partial.age_max >= 1  # stragglers were carried over
    assert partial.lost == 0
    assert partial.balanced
    masked = play(
        Cell("m", {**base, "generation_budget_tokens": 10_000, "partial_old_tokens": "mask"}), warmup=1, steps=6
    )
    assert masked.masked > 0
    assert masked.balanced


def test_a_budget_in_seconds_ends_a_step_on_time() -> None:
    cell = Cell(
        "p", {"kind": "sync", "max_staleness": 8, "partial": "resume", "generation_budget_s": 6.0}, {"oversample": 1.5}
    )
    assert play(cell, **SHORT).generate_s <= 6.0 + 1e-6


def test_a_surplus_is_kept_for_the_next_step(sync: Figures) -> None:
    more = play(Cell("o", {"kind": "sync", "max_staleness": 8, "colocated": True}, {"oversample": 1.5}), **SHORT)
    assert (more.groups, more.lost) == (GROUPS, 0.0)
    assert more.generate_s < sync.generate_s
    assert more.age_max >= 1


def test_groups_with_equal_rewards_make_a_synchronous_trainer_wait() -> None:
    waiting = play(replace(SYNC, equal=0.4), warmup=1, steps=2)
    ahead = play(Cell("a", {"kind": "async", "max_staleness": 2}, equal=0.4), warmup=1, steps=2)
    assert waiting.groups == ahead.groups == GROUPS
    assert ahead.trainer_idle < 0.5 * waiting.trainer_idle


def test_a_schedule_that_waits_for_itself_is_found_out(tmp_path: Path) -> None:
    settings = replace(settings_of(SYNC), max_in_flight=1)  # no whole group fits
    world = World(Replies(0, SIZE), ENGINES, SLOTS, BALANCED_S, 1.0)
    with pytest.raises(RuntimeError, match="nothing goes on"):
        asyncio.run(Simulation(settings, world, tmp_path).run(0, 1))


def test_the_bound_is_full_overlap_and_the_ceiling_full_engines() -> None:
    sync = figures("sync", generate_s=20.0, train_s=10.0, publish_s=2.0, tokens_per_s=100.0, step_s=32.0)
    assert of_bound(sync, figures("a", tokens_per_s=100.0 * 32 / 22)) == pytest.approx(1.0)
    assert of_bound(sync, sync) == pytest.approx(22 / 32)
    trains = figures(
        "t", tokens_per_s=1000.0, step_s=20.0
    )  # a ms a token: the trainer alone takes all the time but the publish
    assert of_ceiling(trains, 0.95e-3) == pytest.approx(1.0)


def test_the_examples_of_the_document_are_configurations() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "schedules.md").read_text()
    examples = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(examples) == 3
    for example in examples:
        tables = tomllib.loads(example)
        settings_of(Cell("an example", tables["schedule"], tables.get("algo", {})))


def test_the_gate_takes_the_worst_of_its_cells() -> None:
    base = {"generate_s": 16.0, "train_s": 16.0, "publish_s": 1.0, "step_s": 33.0, "tokens_per_s": 700.0, "bubble": 0.4}
    found = {cell.name: figures(cell.name, **base) for cell in cells()}
    found["sync, partial"] = replace(found["sync, partial"], bubble=0.1)
    found["sync, partial, over-sampling 1.5"] = replace(found["sync, partial, over-sampling 1.5"], bubble=0.18)
    said = gate(found)
    assert said["bubble_cut"] == pytest.approx(0.55)
    assert said["async_of_bound"] < 0.6
    assert len(said["trainer_idle"]) == 3
    assert len(table(found)) == len(found) + 1
