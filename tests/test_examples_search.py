"""`examples/search-tiny.toml`: a tiny model learns to search. Run as a module, it makes the example's model and demonstrations.

The figure is the mean reward at temperature 1 of everything that was played in a step, dropped groups included; never greedy.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from palestra.cli.config import RunConfig, load_config
from palestra.envs.registry import register_builtin
from palestra.envs.search.demonstrations import search_demonstrations
from palestra.envs.search.env import Search
from tests.jobs import Job, check_laws
from tests.tinyrun import make_calculator_moe

register_builtin("palestra/Search-v0", "palestra.envs.search.env:Search")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "search-tiny.toml"
NOISE = 0.3
MARGIN = 0.15


def prepare(folder: Path, n: int = 3000, seed: int = 0) -> None:
    """Writes `model` and `demonstrations.jsonl` below `folder`: noisy transcripts of the example's own questions, and a tiny MoE with a
    tokenizer that was trained on their text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = load_config(EXAMPLE).env.args
    transcripts = search_demonstrations(Search(**arguments), n, NOISE, seed)
    lines = (json.dumps(transcript, ensure_ascii=False) + "\n" for transcript in transcripts)
    (folder / "demonstrations.jsonl").write_text("".join(lines))
    make_calculator_moe(folder / "model", transcripts, seed)


def example(folder: Path, *overrides: str) -> RunConfig:
    """The example over what `prepare` made."""
    places = {
        "model.path": folder / "model",
        "sft.data": folder / "demonstrations.jsonl",
        "run.save_dir": folder / "runs",
    }
    return load_config(EXAMPLE, [*(f"--{key}={value}" for key, value in places.items()), *overrides])


@pytest.mark.walk
@pytest.mark.timeout(300)
def test_two_steps_of_the_example(tmp_path: Path) -> None:
    prepare(tmp_path, n=200)
    small = ("--run.steps=2", "--run.save_every=2", "--sft.steps=3", "--algo.groups_per_step=2", "--algo.group_size=4")
    job = Job(example(tmp_path, *small, "--algo.drop_zero_variance=false"))
    status, out, err = job.train(timeout_s=240, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert status == 0, out + err
    check_laws(job, 2)
    assert all("env/recall_seen/mean" in entry for entry in job.steps())


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_reward_rises(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = example(tmp_path)
    job = Job(config)
    status, out, err = job.train(timeout_s=3500, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert status == 0, out + err
    check_laws(job, config.run.steps)
    rewards = [entry["reward/total/mean"] for entry in job.steps()]
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-4:])
    print(f"reward at T=1 {first:.3f} -> {last:.3f}: {' '.join(f'{reward:.2f}' for reward in rewards)}")
    assert last - first >= MARGIN


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
