"""Turns a GGUF file of a Llama into a Hugging Face folder with fp32 weights.

In: one .gguf file. Out: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json in an empty folder.
Only numpy, gguf, tokenizers and safetensors are needed. Nothing is waited for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.trainer.types import F32, ModelError

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3
"""GGUF's token type of special tokens."""


def convert_gguf(source: Path, target: Path) -> None:
    """Writes `target`'s files.

    Raises:
        ModelError: the file is no Llama, or is of a kind of tokenizer that is not known here.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: value.contents() for name, value in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{source} is a {fields.get('general.architecture')}, not a llama")
    config = _config(fields, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_weights(reader, config, target / "model.safetensors")
    _write_tokenizer(fields, target)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    ends = {f"{name}_token_id": fields.get(f"tokenizer.ggml.{ggml}_token_id") for name, ggml in
            (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": fields["llama.vocab_size"],
        # GGUF stores float32: 9.999999747e-06 is meant to be 1e-05.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_theta": float(fields["llama.rope.freq_base"]), "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **ends,
    }


def _write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    out: dict[str, F32] = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        base = tensor.name.removesuffix(".weight")
        if base in TOP:
            out[f"{TOP[base]}.weight"] = values
            continue
        _, layer, part = base.split(".")
        if part in heads:
            values = _halves(values, heads[part])
        out[f"model.layers.{layer}.{LAYER[part]}.weight"] = values
    save_file(out, str(path), {"format": "pt"})


def _halves(values: NDArray[np.float32], heads: int) -> F32:
    """llama.cpp interleaves the two halves that RoPE rotates; Hugging Face keeps them apart."""
    rows, columns = values.shape
    apart = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(apart.reshape(rows, columns))


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))) != ("gpt2", "smollm"):
        raise ModelError(f"tokenizer {kind} is not known here; only SmolLM's is")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))

    def name(key: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "pad_token": name("padding"),
        "unk_token": name("unknown"),
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    ends = {key: fields.get(f"tokenizer.ggml.{ggml}_token_id") for key, ggml in
            (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))}  # fmt: skip
    (target / "generation_config.json").write_text(json.dumps(ends, indent=1), encoding="utf-8")
