"""What engines compute with is what their folder has: `rollout.weight_dtype` is held to it before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palestra.cli.engines.assemble import check_precision
from palestra.cli.engines.types import EngineSetupError
from palestra.server.config import EngineSection


def rollout(dtype: str | None) -> EngineSection:
    return EngineSection.model_validate({"engine": "sglang", "weight_dtype": dtype})


@pytest.mark.parametrize(
    ("dtype", "quantised", "said"),
    [
        (None, True, None),
        (None, False, None),
        ("fp8", True, None),
        ("bf16", False, None),
        ("fp8", False, "is not quantised: make a folder with `palestra convert`"),
        ("bf16", True, "is quantised: leave it out"),
        ("fp32", True, "is quantised: leave it out"),
    ],
)
def test_a_precision_that_the_folder_has_not_is_refused(
    tmp_path: Path, dtype: str | None, quantised: bool, said: str | None
) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if said is None:
        check_precision(rollout(dtype), tmp_path)
    else:
        with pytest.raises(EngineSetupError, match=said):
            check_precision(rollout(dtype), tmp_path)


def test_a_folder_that_cannot_be_read_is_the_engine_s_to_refuse(tmp_path: Path) -> None:
    check_precision(rollout("fp8"), tmp_path / "nowhere")
