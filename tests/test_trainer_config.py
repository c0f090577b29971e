"""The trainer's sections: what is refused, and that every field has a consumer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from palestra.trainer import config as sections
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import loss_of

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
        (AlgoConfig, {"top_p": 0.9, "min_p": 0.1}, "not built: algo.min_p, algo.top_p"),
        (AlgoConfig, {"ratio_correction": "sequence"}, "'none', 'tis', 'mask', 'seq_mask', 'seq_tis'"),
        (AlgoConfig, {"ratio_correction": "none", "ratio_clip": 3.0}, "algo.ratio_clip has no effect"),
        (AlgoConfig, {"ratio_correction": "tis", "sequence_clip": 1.2}, "algo.sequence_clip needs"),
        (AlgoConfig, {"ratio_clip": 1.0}, "greater than 1"),
        (AlgoConfig, {"age_decay": 0.0}, "greater than 0"),
        (AlgoConfig, {"age_decay": 1.5}, "less than or equal to 1"),
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


def test_the_correction_follows_the_schedule_where_nobody_said_one() -> None:
    for off_policy, kind in ((True, "tis"), (False, None)):
        loss = loss_of(TrainerSettings(Path("m"), 1, off_policy=off_policy))
        assert (loss.correction and loss.correction.kind) == kind
    for said in ("none", "tis", "mask", "seq_mask"):
        algo = AlgoConfig.model_validate({"ratio_correction": said, "clip_high": 0.3})
        for off_policy in (True, False):
            loss = loss_of(TrainerSettings(Path("m"), 1, algo, off_policy=off_policy))
            assert (loss.correction.kind if loss.correction else "none", loss.clip_high) == (said, 0.3)


@pytest.mark.parametrize("section", OWN_SECTIONS)
def test_every_field_is_read_somewhere(section: type[TrainConfig]) -> None:
    """Fields of a section's own class are read as attributes outside of the configuration's module."""
    root = Path(sections.__file__).parent
    code = "\n".join(path.read_text() for path in root.rglob("*.py") if path.name != "config.py")
    unread = [name for name in section.__annotations__ if name in section.model_fields and f".{name}" not in code]
    assert unread == []


@pytest.mark.parametrize(
    ("algo", "drops"),
    [
        ({}, True),
        ({"estimator": "rloo"}, True),
        ({"estimator": "reinforce_pp_baseline"}, True),
        ({"drop_zero_variance": False}, False),
        ({"estimator": "reinforce"}, False),
        ({"estimator": "reinforce_pp"}, False),
        ({"turn_discount": 0.5}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, False),
        ({"advantage": "a.b:c"}, False),
    ],
)
def test_groups_of_equal_rewards_are_dropped_where_they_teach_nothing(algo: dict[str, Any], drops: bool) -> None:
    assert AlgoConfig.model_validate(algo).drops_equal_groups is drops


def test_a_loss_of_the_user_s_is_no_gspo_whatever_its_module_is_called() -> None:
    own = AlgoConfig.model_validate({"loss": "gspo_variants.losses:mine"})
    assert (own.by_row, own.clip, own.correction(False)) == (False, (0.2, 0.2), "none")
    assert AlgoConfig.model_validate({"loss": "gspo", "clip_high": 0.01}).clip == (3e-4, 0.01)
