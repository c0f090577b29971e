"""Fixtures that several test modules share: tiny models, and one engine process for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import dockerd as engine_of_containers
from tests import sglang, tokenizers
from tests.live import engine_process
from tests.tiny import make_tiny_moe

LONG = (
    "test_learning.py", "test_crash.py", "test_walk_agents.py", "test_walk.py", "test_envs_code.py", "test_examples_code.py",
    "test_examples_search.py", "test_docs_first_environment.py", "test_eval_walk.py", "test_envs_checking.py",
    "test_training_eval_walk.py", "test_service_programs.py", "test_walk_plans.py", "test_kill_matrix.py", "test_train_modes.py",
    "test_parallel_layouts.py", "test_trainer_fsdp.py", "test_trainer_fsdp_models.py",
)  # fmt: skip
"""Files that take minutes: first, so that no worker is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files in front."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3-MoE."""
    return make_tiny_moe(tmp_path_factory.mktemp("tiny-moe"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_moe: Path) -> Iterator[str]:
    """The URL of an embedded engine on `tiny_moe`, which accepts forced ids."""
    with engine_process(tiny_moe, "--context-length", "1024", "--allow-forced-ids") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sglang.SglangEngines]:
    """Two real SGLang engines behind the real router, for all tests that need them."""
    yield from sglang.started(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="session")
def dockerd() -> Iterator[str]:
    """The address of a container engine of our own that has the sandbox's image."""
    yield from engine_of_containers.started()


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    """Qwen3's tokenizer; shared, so not to be written to."""
    return tokenizers.cached(tokenizers.qwen_folder)


@pytest.fixture(scope="session")
def deepseek_folder() -> Path:
    """DeepSeek-V3's tokenizer; shared, so not to be written to."""
    return tokenizers.cached(tokenizers.deepseek_folder)


@pytest.fixture(scope="session")
def mistral_folder() -> Path:
    """Mistral's tekken tokenizer; shared, so not to be written to."""
    return tokenizers.cached(tokenizers.mistral_folder)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2's tokenizer and chat template, without weights; shared, so not to be written to."""
    return tokenizers.cached(tokenizers.smollm2_folder)
