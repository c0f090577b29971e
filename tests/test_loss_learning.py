"""GRPO, GSPO and CISPO each learn the calculator on the tiny MoE, through every real part.

Two updates a batch: with one, ratios are 1 and all three have the same gradient. All runs of a seed start from the same warm weights and
play the same tasks. The figure is the mean reward at temperature 1 of all that was played, as in test_learning.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, check_laws
from tests.test_async_learning import warm
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

STEPS = 24
SEEDS = (0, 1, 2)
MARGIN = 0.15
LOSSES: Mapping[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3},
}
"""GSPO's bounds are wider than its authors': a row is ten to thirty tokens here, a thousand there, and its mean moves that much more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Path]]:
    """Of each seed, the folder with its demonstrations, and the warm weights."""
    folders = {seed: tmp_path_factory.mktemp(f"seed-{seed}") for seed in SEEDS}
    return {seed: (folder, warm(folder, seed)) for seed, folder in folders.items()}


def gain(folder: Path, model: Path, seed: int, name: str, steps: int = STEPS) -> float:
    """Mean reward of the last four steps less that of the first two, and that the loss was the one asked for."""
    config = tiny_config(
        folder,
        model={"path": str(model)},
        run={"name": f"{name}-{seed}", "steps": steps, "save_every": steps},
        env={"concurrency": 64},
        algo={"groups_per_step": 8, "group_size": 8, "updates_per_batch": 2, "seed": seed, **LOSSES[name]},
        sft={"steps": 1, "batch_size": 1, "lr": 1e-9},
        optim={"betas": [0.9, 0.99], "lr": 3e-4},
    )
    job = Job(config)
    status, out, err = job.train(timeout_s=900)
    assert status == 0, out + err
    check_laws(job, steps)
    lines = job.steps()
    clipped = [line["train/clip_fraction/all"] for line in lines]
    assert max(clipped) > 0, "the second update is past a bound somewhere"
    assert max(line["mismatch/engine/abs_dlogp/max"] for line in lines) < 1e-3, "law 8, at every step"
    rewards = [line["reward/total/mean"] for line in lines]
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-4:])
    shares = statistics.mean(clipped)
    print(f"{name}, seed {seed}: {first:.3f} -> {last:.3f}, {last - first:+.3f}; clipped {shares:.3f}", flush=True)
    return float(last - first)


@pytest.mark.parametrize("name", LOSSES)
def test_mean_reward_rises_over_three_seeds(models: dict[int, tuple[Path, Path]], name: str) -> None:
    gains = [gain(*models[seed], seed, name) for seed in SEEDS]
    assert statistics.mean(gains) >= MARGIN, gains
