"""The fake engine with the numpy model, held to the suite of all engines: quick enough for every run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.engine import ChecksIds, EngineSuite
from tests.conformance.engine_kit import DEADLINE_S, EngineUnderTest
from tests.embedded import by_value
from tests.fakes.tiny_engine import tiny_engine
from tests.fakes.tiny_model import NumpyJudge, make_tiny_numpy, next_logits, values


class TestTiny(ChecksIds, EngineSuite):
    """All of the suite; in a weight group both ranks are of this process."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
        root = tmp_path_factory.mktemp("tiny")
        one, other = make_tiny_numpy(root / "one", 1), make_tiny_numpy(root / "other", 2)
        vocab = json.loads((one / "config.json").read_text())["vocab_size"]
        with tiny_engine(one) as served:
            yield EngineUnderTest(
                served.url,
                one,
                other,
                vocab,
                judge=NumpyJudge(),
                payloads={"safetensors": by_value},
                single="out.weight",
            )

    def test_a_retracted_request_says_so(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(100), "back")
        engine.ask("/pause_generation", mode="retract")
        engine.wait_for_queued(1)
        engine.ask("/continue_generation")
        assert future.result(DEADLINE_S).meta["num_retractions"] == 1


def test_the_judge_and_the_model_agree_and_tell_weights_apart(tmp_path: Any) -> None:
    from safetensors.numpy import load_file

    one, other = make_tiny_numpy(tmp_path / "one", 1), make_tiny_numpy(tmp_path / "other", 2)
    weights, ids = load_file(one / "model.safetensors"), [9, 30, 31, 30]
    rows = NumpyJudge().logits(one, ids)
    for end in range(1, 5):
        assert np.allclose(next_logits(weights, values(weights, ids[:end])), rows[end - 1], atol=1e-5)
    assert np.abs(rows - NumpyJudge().logits(other, ids)).max() > 0.1
