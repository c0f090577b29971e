"""A whole training job in small: a tiny MoE, noisy demonstrations for its warm start, and the configuration that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palestra.cli.config import RunConfig, check_config
from palestra.envs.calculator import arithmetic_tasks
from palestra.envs.demonstrations import demonstrations
from tests.tiny import CORPUS, make_tiny_moe


def write_demonstrations(path: Path, n: int, noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Transcripts of the plain calculator tasks, one a line."""
    transcripts = demonstrations(arithmetic_tasks(seed=seed, prompt="plain"), n, noise, seed)
    path.write_text("".join(json.dumps(t, ensure_ascii=False) + "\n" for t in transcripts))
    return transcripts


def make_calculator_moe(folder: Path, transcripts: list[dict[str, Any]], seed: int = 0, **overrides: Any) -> Path:
    """The tiny MoE with a tokenizer that was trained on the transcripts' own text."""
    texts = [json.dumps(tool) for tool in transcripts[0]["tools"]]
    for transcript in transcripts[:300]:
        for message in transcript["messages"]:
            texts.append(str(message.get("content") or ""))
            texts += [
                f'\n{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}\n'
                for call in message.get("tool_calls") or ()
            ]
    return make_tiny_moe(folder, seed, [*CORPUS, *texts], **overrides)


def tiny_config(folder: Path, **tables: dict[str, Any]) -> RunConfig:
    """A run of two small steps below `folder`; `tables` change fields. Makes model and demonstrations where there are none."""
    data, model = folder / "demonstrations.jsonl", folder / "model"
    if not (model / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make_calculator_moe(model, write_demonstrations(data, 400, 0.3))
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "env": {"id": "palestra/Calculator-v0", "args": {"prompt": "plain"}, "concurrency": 32},
        "run": {"save_dir": str(folder / "runs"), "name": "tiny", "steps": 2, "save_every": 1},
        "algo": {
            "groups_per_step": 2,
            "group_size": 4,
            "max_response": 32,
            "max_turns": 3,
            "drop_zero_variance": False,
        },
        "rollout": {"context_len": 512, "threads": 1},
        "train": {"threads": 2, "max_tokens_per_gpu": 1024},
        "optim": {"lr": 5e-4},
        "sft": {"data": str(data), "steps": 20, "batch_size": 16, "lr": 2e-3, "warmup_steps": 5},
        "schedule": {"deadline_s": 120.0},
    }
    for table, values in tables.items():
        base[table] = {**base.get(table, {}), **values}
    if base["rollout"].get("engine", "embedded") != "embedded":
        del base["rollout"]["threads"]
    return check_config(base, "tiny")
