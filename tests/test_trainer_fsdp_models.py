"""Which models FsdpBackend trains beside those of megatron's backend, and which ones it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from palestra.trainer.fsdp.model import sees_all
from palestra.trainer.types import CheckpointError, ModelError
from tests.conformance.backend_suite import exported, hf_model, reference_logprobs, torch_step
from tests.test_trainer_fsdp import fsdp, furthest, megatron, steps_of, uneven
from tests.tiny import make_tiny_family, make_tiny_llama

TINY: dict[str, Any] = {
    "vocab_size": 464,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def make_any(kind: str, folder: Path, **settings: Any) -> Path:
    """A random model of a type that transformers knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


OTHERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    # Rows are longer than the window of 5, and their beginnings are not shared.
    "windowed": ("mistral", {**TINY, "sliding_window": 5}, False),
    "learned positions": (
        "gpt2",
        {"vocab_size": 464, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        False,
    ),
    "some layers windowed": ("gemma3_text", {**TINY, "head_dim": 16, "sliding_window": 4}, False),
    "biases": ("qwen2", TINY, True),
    "latent attention, router bias": (
        "deepseek_v3",
        {
            **TINY,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        True,
    ),
}


@pytest.mark.walk
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_of_transformers_train_too(name: str, tmp_path: Path) -> None:
    """log p, a step and what is exported are transformers' own; a checkpoint goes on."""
    kind, settings, shares = OTHERS[name]
    model = make_any(kind, tmp_path / "model", **settings)
    backend, plain = fsdp(model, chunk=5), hf_model(model)
    assert sees_all(plain.config) is shares
    stored = load_file(model / "model.safetensors")
    assert furthest(exported(backend), stored) == 0.0
    for ours, batch in zip(backend.logprobs(uneven(0)), uneven(0), strict=True):
        np.testing.assert_allclose(ours, reference_logprobs(plain, batch), atol=2e-5)
    loss, norm = torch_step(plain, uneven(0), torch.optim.SGD(plain.parameters(), lr=0.0))
    ((its_loss, its_norm, _, _),) = steps_of(backend, range(1))
    assert (its_loss, its_norm) == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-4))
    backend.save(tmp_path / "state")
    later = fsdp(model)
    later.load(tmp_path / "state")
    steps_of(backend, range(1, 2))
    steps_of(later, range(1, 2))
    assert furthest(exported(backend), exported(later)) <= 1e-6
    with pytest.raises(CheckpointError, match="another model"):
        fsdp(make_tiny_llama(tmp_path / "llama")).load(tmp_path / "state")


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("t5", {"vocab_size": 64, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}, "T5Config"),
        ("bert", {**TINY, "is_decoder": False}, "it is no causal model"),
        ("granite", {**TINY, "logits_scaling": 4.0}, "scales or caps the logits"),
    ],
)
def test_what_cannot_be_trained_is_refused(kind: str, settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    if kind == "t5":
        config = AutoConfig.for_model(kind, **settings)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    else:
        make_any(kind, tmp_path, **settings)
    with pytest.raises(ModelError, match=told):
        fsdp(tmp_path)


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        fsdp(tmp_path)
    model = make_tiny_llama(tmp_path / "model")
    told = json.loads((model / "config.json").read_text())
    for change, said in (
        ({"model_type": "palestra-nonsense", "architectures": ["Nonsense"]}, "palestra-nonsense"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"num_hidden_layers": 3}, "lacks weights"),
        ({"num_attention_heads": 5}, "cannot be trained"),
    ):
        (model / "config.json").write_text(json.dumps({**told, **change}))
        with pytest.raises(ModelError, match=said):
            fsdp(model)


@pytest.mark.walk
@pytest.mark.parametrize("writer", [fsdp, megatron])
def test_what_no_gradient_moves_has_no_moments_in_either_backend_s_checkpoint(writer: Any, tmp_path: Path) -> None:
    """The bias of DeepSeek's router: a buffer of one backend, a parameter without gradient of the other."""
    folder = make_tiny_family(tmp_path / "model", "deepseek")
    first, second = writer(folder), (megatron if writer is fsdp else fsdp)(folder)
    steps_of(first, range(2))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert furthest(exported(first), exported(second)) == 0.0
    steps_of(first, range(2, 3))
    steps_of(second, range(2, 3))
    assert furthest(exported(first), exported(second)) <= 1e-5
