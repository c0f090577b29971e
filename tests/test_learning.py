"""The tiny MoE learns the calculator: warm start on noisy transcripts, then GRPO through every real part.

The figure is the mean reward at temperature 1 of everything that was played in a step, dropped groups included; never greedy.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.jobs import Job, check_laws
from tests.tinyrun import make_calculator_moe, tiny_config, write_demonstrations

STEPS = 24
MARGIN = 0.15


def gain(folder: Path, seed: int) -> float:
    """Mean reward of the last four steps minus that of the first two (the weights are almost those of the warm start there)."""
    transcripts = write_demonstrations(folder / "demonstrations.jsonl", 4000, noise=0.3, seed=seed)
    make_calculator_moe(folder / "model", transcripts, seed)
    config = tiny_config(
        folder,
        run={"name": f"seed-{seed}", "steps": STEPS, "save_every": STEPS},
        env={"concurrency": 64},
        algo={"groups_per_step": 8, "group_size": 8, "drop_zero_variance": True, "seed": seed},
        # The small model learns to copy digits all of a sudden, after 140 to 200 steps at this rate; a faster one can miss it.
        sft={"steps": 280, "batch_size": 32, "schedule": "constant", "seed": seed},
        optim={"betas": [0.9, 0.99]},
    )
    job = Job(config)
    status, out, err = job.train(timeout_s=580)
    assert status == 0, out + err
    check_laws(job, STEPS)
    rewards = [entry["reward/total/mean"] for entry in job.steps()]
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-4:])
    print(f"seed {seed}: reward at T=1 {first:.3f} -> {last:.3f}, gain {last - first:+.3f}")
    return last - first


@pytest.mark.walk
@pytest.mark.timeout(600)
def test_reward_rises_for_one_seed(tmp_path: Path) -> None:
    assert gain(tmp_path, seed=2) >= MARGIN


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_mean_reward_rises_over_three_seeds(tmp_path: Path) -> None:
    gains = []
    for seed in (0, 1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        gains.append(gain(folder, seed))
    assert statistics.mean(gains) >= MARGIN, gains
