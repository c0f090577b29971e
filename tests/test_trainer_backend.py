"""MegatronBackend passes the backends' conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
from palestra.trainer.megatron.optimizer import OptimSettings
from palestra.trainer.types import Backend
from tests.conformance.backend_suite import BETAS, CLIP, DECAY, EPS, BackendSuite, MakeBackend, folder

__all__ = ["folder"]


pytestmark = pytest.mark.walk


class TestMegatronBackend(BackendSuite):
    @pytest.fixture
    def make(self) -> MakeBackend:
        def build(folder: Path, *, chunk: int = 0) -> Backend:
            optim = OptimSettings(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP)
            return MegatronBackend.from_folder(folder, BackendSettings(optim=optim, logprob_chunk=chunk))

        return build
