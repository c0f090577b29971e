"""The real SGLang engine, held to the suite of all engines. Needs an engine environment; one engine serves the whole module."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.conformance.engine import EngineSuite
from tests.conformance.engine_kit import EngineUnderTest
from tests.sglang import START_S, SglangEngines

pytestmark = [pytest.mark.ci, pytest.mark.timeout(START_S + 60)]  # the first test waits for the engines' start


def by_value(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's own form: a pickled list of names and tensors, one payload for each tensor parallel rank."""
    payload = pickle.dumps(list(tensors.items()), protocol=pickle.HIGHEST_PROTOCOL)
    return {"serialized_named_tensors": [base64.b64encode(payload).decode()]}


class TestSglang(EngineSuite):
    """A bucket is in force as it comes; a flush beside frozen requests is answered with 400, though the weights are new. Its
    figures stand still while it is paused. An id outside the vocabulary ends it with an IndexError."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, sglang_engines: SglangEngines) -> Iterator[EngineUnderTest]:
        folder, url = sglang_engines.folder, sglang_engines.workers[0]
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        yield EngineUnderTest(
            url,
            folder,
            sglang_engines.other,
            vocab,
            deadline_s=180,
            payloads={"pickled": by_value},
            staged=False,
            long=160,
            sampled=("realtime_tokens_total", 'mode="decode"'),
            shows_queue=False,
            frozen_flush=400,
        )
        sglang_engines.restored(url)
