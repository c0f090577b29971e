"""The trainer's sections: what is refused, and that every field has a consumer."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from palestra.trainer import config as sections
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig

OWN_SECTIONS = (TrainConfig, OptimConfig, AlgoConfig, WeightsConfig, SftConfig)


@pytest.mark.parametrize(
    ("section", "data", "told"),
    [
        (TrainConfig, {"tp": 2}, "not built: train.tp"),
        (TrainConfig, {"dtype": "bf16"}, "not built: train.dtype = 'bf16'; use 'fp32'"),
        (TrainConfig, {"thread": 2}, "Extra inputs are not permitted"),
        (OptimConfig, {"schedule": "cosine"}, "not built: optim.schedule = 'cosine'"),
        (OptimConfig, {"betas": [0.9, 1.0]}, "must lie in"),
        (AlgoConfig, {"estimator": "ppo"}, "not built: algo.estimator = 'ppo'; use 'grpo'"),
        (AlgoConfig, {"top_p": 0.9, "ratio_correction": "tis"}, "not built: algo.ratio_correction, algo.top_p"),
        (WeightsConfig, {"transport": "nccl"}, "not built: weights.transport = 'nccl'; use 'disk' or 'tensor'"),
        (WeightsConfig, {"mode": "delta", "transport": "tensor"}, "needs weights.transport"),
        (WeightsConfig, {"t0_s": 1.0}, "not built: weights.t0_s"),
        (SftConfig, {}, "data"),
    ],
)
def test_refusals(section: type[TrainConfig], data: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(data)
    assert told in str(caught.value)


def test_groups_fields_are_inherited() -> None:
    algo = AlgoConfig.model_validate({"groups_per_step": 3, "group_size": 5, "kl_coef": 0.1})
    assert (algo.groups_per_step, algo.group_size, algo.kl_coef) == (3, 5, 0.1)


@pytest.mark.parametrize("section", OWN_SECTIONS)
def test_every_field_is_read_somewhere(section: type[TrainConfig]) -> None:
    """Fields of a section's own class are read as attributes outside of the configuration's module."""
    root = Path(sections.__file__).parent
    code = "\n".join(path.read_text() for path in root.rglob("*.py") if path.name != "config.py")
    unread = [name for name in section.__annotations__ if name in section.model_fields and f".{name}" not in code]
    assert unread == []
