"""The schedules that `benchmarks/schedule.py` compares, each as the configuration that a user writes, and what they come to.

In: a cell. Out: its figures in virtual time, from `schedule_sim`. Cells run in processes of their own and wait for their stores alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.schedule_model import PER_REQUEST_S, STEP_S, Replies
from benchmarks.schedule_sim import Simulation, Watched, World
from palestra.cli.config import check_config
from palestra.cli.roles.service import plan_settings
from palestra.server.ledger import read_ledger
from palestra.server.plan.claims import STALE
from palestra.server.plan.types import PlanSettings

GROUPS, SIZE = 8, 8
"""Of a batch, and rollouts of a group: 64 rollouts a step."""
ENGINES, SLOTS = 2, 8
"""Four rollouts of a batch for each slot."""
BALANCED_S, FAST_S = 0.65e-3, 0.2e-3
"""Seconds that a token of the batch takes in training: a step trains about as long as a synchronous one generates, or much shorter."""
PUBLISH_S = 1.0
WARMUP, STEPS = 4, 16
ENDLESS = 1 << 30
"""Train steps of a run that is watched in its middle: there is no end at which less is opened."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulated run."""

    name: str
    schedule: Mapping[str, Any]
    """Keys of `[schedule]`."""
    algo: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `[algo]`."""
    train_token_s: float = BALANCED_S
    equal: float = 0.0
    """Share of groups whose rewards are all equal."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cell came to; times are virtual seconds, means per step."""

    name: str
    tokens_per_s: float
    """Trained tokens over all time."""
    step_s: float
    generate_s: float
    """From the publish to the claim: the trainer waits."""
    train_s: float
    publish_s: float
    groups: float
    """Trained in a step."""
    trainer_idle: float
    """Share of all time that the trainer waits."""
    bubble: float
    """Idle share of the engines' slot-time while the trainer waits."""
    engine_idle: float
    """The same over all time."""
    age: float
    age_max: int
    """Train steps between the oldest trained token of a rollout and its training: mean, and most."""
    lost: float
    """Share of sampled tokens in groups that were dropped as stale."""
    masked: float
    """Share of the sampled tokens in trained groups that were masked."""
    balanced: bool
    """Whether the ledger of tokens balances."""


RESUME: Mapping[str, Any] = {"kind": "sync", "partial": "resume", "max_staleness": 8, "colocated": True}
SYNC: Mapping[str, Any] = {"kind": "sync"}
ONE_OFF: Mapping[str, Any] = {"kind": "one_step_off"}
ASYNC: Mapping[str, Any] = {"kind": "async", "max_staleness": 2}
SHORT, LONG = 10_000, 20_000
"""Budgets in tokens: some 0.4 and 0.8 of what a batch has."""
LATE: Mapping[str, Any] = {"partial": "resume", "generation_budget_tokens": LONG}
QUICK, EQUAL = "quick trainer: ", "40% equal: "
"""What names of cells begin with."""


def cells() -> list[Cell]:
    """All of them."""
    carry = {"kind": "sync", "max_staleness": 8}
    balanced = [
        Cell("sync", SYNC),
        Cell("sync, over-sampling 1.5", {**carry, "colocated": True}, {"oversample": 1.5}),
        Cell("sync, partial", {**RESUME, "generation_budget_tokens": SHORT}),
        Cell("sync, partial, over-sampling 1.5", {**RESUME, "generation_budget_tokens": LONG}, {"oversample": 1.5}),
        Cell("one step off", ONE_OFF),
        Cell("one step off, partial", {**ONE_OFF, **LATE}),
        Cell("async 2", ASYNC),
        Cell("async 2, partial", {**ASYNC, **LATE}),
        Cell("async 4", {**ASYNC, "max_staleness": 4}),
    ]
    quick = [
        Cell("sync", SYNC),
        Cell("one step off", ONE_OFF),
        Cell("one step off, masked", {**ONE_OFF, "too_old": "mask"}),
        Cell("async 2", ASYNC),
        Cell("async 2, partial", {**ASYNC, **LATE}),
        Cell("async 2, partial, too soon", {**ASYNC, **LATE, "generation_budget_tokens": 2_000, "min_batch": 0}),
    ]
    equal = [
        Cell("sync", SYNC),
        Cell("sync, over-sampling 2", carry, {"oversample": 2.0}),
        Cell("async 2", ASYNC),
    ]
    return [
        *balanced,
        *(replace(each, name=QUICK + each.name, train_token_s=FAST_S) for each in quick),
        *(replace(each, name=EQUAL + each.name, equal=0.4) for each in equal),
    ]


def settings_of(cell: Cell) -> PlanSettings:
    """What the plan is told where a run's file has these keys.

    Raises:
        ConfigError: they do not fit each other.
    """
    file = {
        "model": {"path": "simulated"},
        "env": {"id": "simulated", "order": "sequential"},
        "run": {"steps": ENDLESS},
        "algo": {"groups_per_step": GROUPS, "group_size": SIZE, **cell.algo},
        "schedule": dict(cell.schedule),
    }
    return plan_settings(check_config(file, cell.name))


def play(cell: Cell, warmup: int = WARMUP, steps: int = STEPS, seed: int = 0) -> Figures:
    """One cell, its store in a temporary folder: in memory where the machine has such a place, since only virtual time counts."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="palestra-schedule-") as folder:
        store = Path(folder)
        world = World(Replies(seed, SIZE, cell.equal), ENGINES, SLOTS, cell.train_token_s, PUBLISH_S)
        simulation = Simulation(settings_of(cell), world, store)
        seen = asyncio.run(simulation.run(warmup, steps))
        ledger = read_ledger(store)
    lost = ledger.discarded.get(STALE, 0) / max(1, ledger.sampled - ledger.pending)
    return figures(cell.name, seen, lost, ledger.balanced)


def figures(name: str, seen: Watched, lost: float, balanced: bool) -> Figures:
    """Sums as means and shares."""
    steps = max(seen.steps, 1)
    waiting = 1 - seen.waiting_busy_s / seen.waiting_slot_s if seen.waiting_slot_s > 0 else 0.0
    return Figures(
        name=name,
        tokens_per_s=seen.trained / seen.seconds,
        step_s=seen.seconds / steps,
        generate_s=seen.waited_s / steps,
        train_s=seen.trained_s / steps,
        publish_s=seen.publish_s / steps,
        groups=seen.groups / steps,
        trainer_idle=seen.waited_s / seen.seconds,
        bubble=waiting,
        engine_idle=1 - seen.busy_s / seen.slot_s,
        age=sum(seen.ages) / max(len(seen.ages), 1),
        age_max=max(seen.ages, default=0),
        lost=lost,
        masked=seen.masked / max(seen.trained + seen.masked, 1),
        balanced=balanced,
    )


def play_all(chosen: Sequence[Cell]) -> dict[str, Figures]:
    """All cells, two at a time where there are two cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=context) as pool:
        return {found.name: found for found in pool.map(play, chosen)}


def of_bound(sync: Figures, other: Figures) -> float:
    """Trained tokens per second over what full overlap of a synchronous run's parts would give:
    (tR + tT + tW) / (max(tR, tT) + tW) times the synchronous rate. Its tR has the long tail of a batch that starts at once."""
    whole = sync.generate_s + sync.train_s + sync.publish_s
    best = whole / (max(sync.generate_s, sync.train_s) + sync.publish_s)
    return other.tokens_per_s / (sync.tokens_per_s * best)


def of_ceiling(other: Figures, train_token_s: float) -> float:
    """The same over what no schedule can exceed: tR is the batch's tokens at the rate of engines whose every slot is full."""
    full = ENGINES * SLOTS / (STEP_S + PER_REQUEST_S * SLOTS)
    tokens = other.tokens_per_s * other.step_s
    return other.step_s**-1 * (tokens * max(1 / full, train_token_s) + PUBLISH_S)


def table(found: Mapping[str, Figures]) -> list[str]:
    """All cells as lines of text."""
    head = (
        "tok/s",
        "step s",
        "wait",
        "train",
        "groups",
        "trainer idle",
        "bubble",
        "engines idle",
        "age",
        "oldest",
        "lost",
    )
    width = max(map(len, found)) + 2
    lines = [" " * width + "".join(f"{name:>14}" for name in head)]
    for each in found.values():
        numbers = (each.tokens_per_s, each.step_s, each.generate_s, each.train_s, each.groups)
        shares = (each.trainer_idle, each.bubble, each.engine_idle)
        text = [f"{value:14.1f}" for value in numbers] + [f"{value:14.3f}" for value in shares]
        lines.append(f"{each.name:{width}}" + "".join(text) + f"{each.age:14.2f}{each.age_max:14}{each.lost:14.3f}")
    return lines


def as_json(found: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """The same for a program, rounded."""
    return {
        name: {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(each).items()}
        for name, each in found.items()
    }
