"""The real SGLang engine, held to the suite of all engines. Needs an engine environment; one engine serves the whole module."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from tests.conformance.engine import EngineSuite
from tests.conformance.engine_kit import EngineUnderTest
from tests.sglang import SglangEngines

pytestmark = pytest.mark.ci


def by_value(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's own form: a pickled list of names and tensors, one payload for each tensor parallel rank."""
    payload = pickle.dumps(list(tensors.items()), protocol=pickle.HIGHEST_PROTOCOL)
    return {"serialized_named_tensors": [base64.b64encode(payload).decode()]}


class TestSglang(EngineSuite):
    """A bucket is in force as it comes; a flush beside frozen requests is answered with 400, though the weights are new."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, sglang_engines: SglangEngines) -> EngineUnderTest:
        folder = sglang_engines.folder
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        return EngineUnderTest(
            sglang_engines.workers[0],
            folder,
            sglang_engines.other,
            vocab,
            deadline_s=180,
            payloads={"pickled": by_value},
            staged=False,
            frozen_flush=400,
        )
