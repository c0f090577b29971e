"""Weights between Hugging Face names and megatron's, for every family, bit for bit in both directions.

A megatron tensor is made of one or more Hugging Face tensors: `Piece` says of which, and how they are joined. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from palestra.trainer.megatron.families import Architecture
from palestra.trainer.types import ModelError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Piece:
    """One megatron parameter and where its values come from."""

    megatron: str
    names: tuple[str, ...]
    """Hugging Face names, joined in this order."""
    kind: str
    """copy, qkv (interleaved by key-value head) or stack (one above the other)."""
    frozen: bool = False
    """It has no gradient, so an optimizer keeps nothing of it."""


def pieces(arch: Architecture) -> list[Piece]:
    """Every parameter of the model, in Hugging Face's usual order."""
    out = [Piece("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "copy")]
    for layer in range(arch.layers):
        out += _layer(arch, layer)
    out.append(Piece("decoder.final_layernorm.weight", ("model.norm.weight",), "copy"))
    if not arch.tied:
        out.append(Piece("output_layer.weight", ("lm_head.weight",), "copy"))
    return out


def _layer(arch: Architecture, index: int) -> Iterator[Piece]:
    m, h = f"decoder.layers.{index}.", f"model.layers.{index}."
    yield Piece(m + "input_layernorm.weight", (h + "input_layernorm.weight",), "copy")
    yield from (_latent if arch.latent else _attention)(arch, m + "self_attention.", h + "self_attn.")
    yield Piece(m + "self_attention.linear_proj.weight", (h + "self_attn.o_proj.weight",), "copy")
    yield Piece(m + "pre_mlp_layernorm.weight", (h + "post_attention_layernorm.weight",), "copy")
    if not arch.experts or index < arch.dense_layers:
        yield from _mlp(m + "mlp.", h + "mlp.")
        return
    mixtral = arch.family == "mixtral"
    block = h + ("block_sparse_moe." if mixtral else "mlp.")
    yield Piece(m + "mlp.router.weight", (block + "gate.weight",), "copy")
    if arch.sigmoid_router:
        yield Piece(m + "mlp.router.expert_bias", (block + "gate.e_score_correction_bias",), "copy", frozen=True)
    for expert in range(arch.experts):
        names = ("w1", "w3", "w2") if mixtral else PROJECTIONS
        yield from _mlp(f"{m}mlp.experts.local_experts.{expert}.", f"{block}experts.{expert}.", names)
    if arch.shared_ffn:
        yield from _mlp(m + "mlp.shared_experts.", block + "shared_experts.")


def _attention(arch: Architecture, m: str, h: str) -> Iterator[Piece]:
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        yield Piece(f"{m}linear_qkv.{kind}", tuple(f"{h}{x}_proj.{kind}" for x in "qkv"), "qkv")
    if arch.qk_norm:
        for x in "qk":
            yield Piece(f"{m}{x}_layernorm.weight", (f"{h}{x}_norm.weight",), "copy")


def _latent(arch: Architecture, m: str, h: str) -> Iterator[Piece]:
    assert arch.latent is not None
    named = {"linear_q_proj": "q_proj"}
    if arch.latent.q_rank:
        named = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
    named |= {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
    }
    for ours, theirs in named.items():
        yield Piece(f"{m}{ours}.weight", (f"{h}{theirs}.weight",), "copy")


def _mlp(m: str, h: str, names: tuple[str, str, str] = PROJECTIONS) -> Iterator[Piece]:
    gate, up, down = (f"{h}{name}.weight" for name in names)
    yield Piece(m + "linear_fc1.weight", (gate, up), "stack")
    yield Piece(m + "linear_fc2.weight", (down,), "copy")


def join(arch: Architecture, piece: Piece, parts: list[torch.Tensor]) -> torch.Tensor:
    """The megatron tensor made of the Hugging Face tensors `parts`."""
    if piece.kind == "copy":
        return parts[0]
    if piece.kind == "stack":
        return torch.cat(parts)
    # Weights have a second dimension, biases none.
    groups = [part.view(arch.kv_heads, -1, arch.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, *parts[0].shape[1:])


def split(arch: Architecture, piece: Piece, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `join`, with names; every tensor contiguous."""
    if piece.kind == "copy":
        parts = [tensor]
    elif piece.kind == "stack":
        parts = list(tensor.chunk(2))
    else:
        per = arch.heads // arch.kv_heads
        grouped = tensor.view(arch.kv_heads, per + 2, arch.head_dim, *tensor.shape[1:])
        parts = [
            part.reshape(-1, *tensor.shape[1:])
            for part in (grouped[:, :per], grouped[:, per : per + 1], grouped[:, per + 1 :])
        ]
    return [(name, part.contiguous()) for name, part in zip(piece.names, parts, strict=True)]


def load(targets: Mapping[str, torch.Tensor], arch: Architecture, read: Callable[[str], torch.Tensor]) -> None:
    """Fills the megatron tensors `targets` (by parameter name) from Hugging Face tensors that `read` gives by name.

    Raises:
        ModelError: a shape differs from the configuration's, or a parameter has no source.
    """
    left = dict(targets)
    with torch.no_grad():
        for piece in pieces(arch):
            if piece.frozen and piece.megatron not in left:
                continue  # moments: what no gradient moves has none
            parts = [read(name) for name in piece.names]
            target = left.pop(piece.megatron)
            try:
                value = join(arch, piece, parts)
            except RuntimeError as error:
                raise ModelError(f"{', '.join(piece.names)} do not fit config.json: {error}") from None
            if value.shape != target.shape:
                raise ModelError(
                    f"{piece.names[0]} is {tuple(value.shape)}, config.json asks for {tuple(target.shape)}"
                )
            target.copy_(value)
    if left:
        raise ModelError(f"parameters without a source in the checkpoint: {', '.join(sorted(left))}")


def export(tensors: Mapping[str, torch.Tensor], arch: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and tensor of every megatron tensor, in a stable order. Copied only where tensors were joined.

    Moments have nothing under the name of a frozen tensor: zeros stand for it, so that every file of a checkpoint has the same names.
    """
    for piece in pieces(arch):
        if piece.frozen and piece.megatron not in tensors:
            yield piece.names[0], torch.zeros(arch.experts)
            continue
        yield from split(arch, piece, tensors[piece.megatron].detach())
