"""The tiny MoE learns the calculator through two real SGLang engines behind the real router.

The engines run already and are given by their URLs, so the run probes and updates them, and neither starts nor ends them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.jobs import Job, check_laws
from tests.sglang import WINDOW, SglangEngines
from tests.tinyrun import make_calculator_moe, tiny_config

pytestmark = pytest.mark.ci
STEPS = 24
MARGIN = 0.15


@pytest.mark.timeout(600)
def test_reward_rises_through_sglang_and_its_router(sglang_engines: SglangEngines, tmp_path: Path) -> None:
    sglang_engines.fresh()
    transcripts = [json.loads(line) for line in sglang_engines.demonstrations.read_text().splitlines()]
    config = tiny_config(
        tmp_path,
        model={"path": str(make_calculator_moe(tmp_path / "model", transcripts, 2, max_position_embeddings=WINDOW))},
        run={"name": "sglang", "steps": STEPS, "save_every": STEPS},
        env={"concurrency": 64},
        algo={"groups_per_step": 8, "group_size": 8, "drop_zero_variance": True, "seed": 2},
        sft={
            "data": str(sglang_engines.demonstrations),
            "steps": 280,
            "batch_size": 32,
            "schedule": "constant",
            "seed": 2,
        },
        optim={"betas": [0.9, 0.99]},
        rollout={"engine": "sglang", "urls": list(sglang_engines.workers), "router_url": sglang_engines.router},
    )
    job = Job(config)
    status, out, err = job.train(timeout_s=580)
    assert status == 0, out + err
    check_laws(job, STEPS)
    steps = job.steps()
    assert max(entry["train/abs_dlogp/max"] for entry in steps) < 1e-4, "law 8: the trainer's logprobs are the engines'"
    assert abs(steps[0]["train/ratio/max"] - 1) < 1e-4
    assert min(entry["engine/prefix_hit/mean"] for entry in steps) > 0.5, (
        "siblings and next turns share their beginnings"
    )
    rewards = [entry["reward/total/mean"] for entry in steps]
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-4:])
    print(f"reward at T=1 {first:.3f} -> {last:.3f}, gain {last - first:+.3f}")
    assert last - first >= MARGIN
