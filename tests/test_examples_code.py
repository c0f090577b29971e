"""Training on code that the sandbox grades: the examples are runnable configurations, and reward rises."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import load_config
from palestra.envs.code.env import CodeEnv
from palestra.envs.code.generated import code_tasks
from palestra.sandbox.types import MIB
from tests.jobs import Job, check_laws
from tests.tinyrun import make_calculator_moe, tiny_config

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("code-*.toml"))
MARGIN = 0.1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_configuration_whose_environment_can_be_made(path: Path) -> None:
    config = load_config(path)
    assert config.env.id == "palestra/Code-v0"
    env = CodeEnv(**config.env.args)
    assert len(env.tasks) > config.run.steps * config.algo.groups_per_step
    env.close()


def demonstrations(n: int) -> list[dict[str, Any]]:
    """Right answers to level 1, as a policy would have given them."""
    env = CodeEnv(levels=(1,))
    shown = []
    for index in range(n):
        messages, _ = env.reset(options={"task": index})
        shown.append({"messages": [*messages, *env.oracle(env.tasks[index])], "tools": []})
    return shown


@pytest.mark.walk
@pytest.mark.timeout(300)
def test_a_run_whose_rewards_come_from_boxes(tmp_path: Path) -> None:
    transcripts = demonstrations(400)
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in transcripts))
    make_calculator_moe(tmp_path / "model", transcripts)
    config = tiny_config(
        tmp_path,
        env={"id": "palestra/Code-v0", "args": {"levels": [1], "credit": "share"}},
        run={"name": "code", "save_every": 2},
        algo={"max_response": 40, "max_turns": 1},
        sft={"steps": 60},
        sandbox={"boxes": 3, "warm": 1, "total_memory_bytes": 512 * MIB},
    )
    job = Job(config)
    status, out, err = job.train()
    assert status == 0, out + err
    check_laws(job, 2)
    # The warm start has taught it to fence a function: such an answer gets its reward from a grader's box.
    assert "(512 MiB) holds 2 boxes of its 3" in (job.folder / "log" / "worker.jsonl").read_text()
    assert max(step["env/format/mean"] for step in job.steps()) > 0


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_reward_of_smollm2_rises(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples" / "code-smollm2.toml", [f"--run.save_dir={tmp_path}"])
    job = Job(config)
    status, out, err = job.train(timeout_s=2300)
    assert status == 0, out + err
    check_laws(job, config.run.steps)
    rewards = [entry["reward/total/mean"] for entry in job.steps()]
    first, last = statistics.mean(rewards[:2]), statistics.mean(rewards[-3:])
    print(f"reward at T=1 {first:.3f} -> {last:.3f}, gain {last - first:+.3f}")
    assert last - first >= MARGIN, rewards


def test_level_one_is_one_line() -> None:
    tasks = code_tasks(levels=(1,))
    assert all(str(tasks[index].answer).count("\n") == 2 for index in range(0, 4096, 100))
