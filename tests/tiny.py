"""Tiny models for tests, made on the spot: an untied Qwen3-MoE (under 2M parameters) and a Llama, with a tokenizer trained here.

The tokenizer carries the special tokens of the Qwen3 chat format and all 256 bytes, so every text can be encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CORPUS = (
    "system\n",
    "user\n",
    "assistant\n",
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures "
    'within <tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "calculator", "description": "", '
    '"parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}\n</tools>',
    'For each function call, return a json object with function name and arguments within  XML tags:\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n',
    '\n{"name": "calculator", "arguments": {"expression": "12+30"}}\n',
    "What is 12 plus 30? What is 7 minus 45? What is 8 times 9?",
    "The answer is 42.",
)


def train_tokenizer(corpus: Iterable[str] = CORPUS, vocab_size: int = 512) -> Tokenizer:
    """Byte-level BPE with single digits, the special tokens first (ids 0..8)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(corpus) * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and the configuration that transformers wants beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_tiny_moe(folder: Path, seed: int = 0, corpus: Iterable[str] = CORPUS, **overrides: Any) -> Path:
    """An untied random Qwen3-MoE in Hugging Face form; returns `folder`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = train_tokenizer(corpus)
    save_tokenizer(tokenizer, folder)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides})).float()
    model.save_pretrained(folder)
    return folder


def make_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A tied random Llama (SmolLM2's shape in small) in Hugging Face form; returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float()
    model.save_pretrained(folder)
    return folder


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 4},
    ),
    "deepseek-plain": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""Name -> transformers' configuration, its model, and what is particular to it."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-3,  # that of the squeezed vectors is another one
}
"""Of both DeepSeek models."""


def make_tiny_family(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A random model of one of `FAMILIES` in Hugging Face form; returns `folder`.

    Norms, biases and router biases are random too: as transformers makes them, they would hide a tensor that goes to the wrong place.
    """
    import torch
    import transformers

    config_name, model_name, particular = FAMILIES[family]
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        **(LATENT if family.startswith("deepseek") else {}),
    }
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**settings, **particular, **overrides})
    model = getattr(transformers, model_name)(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return folder
