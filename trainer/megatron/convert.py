"""Weights between Hugging Face names and megatron's, for both families, bit for bit in both directions.

A megatron tensor is made of one or more Hugging Face tensors: `Piece` says of which, and how they are joined. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from palestra.trainer.megatron.families import Architecture
from palestra.trainer.types import ModelError


@dataclass(frozen=True, slots=True)
class Piece:
    """One megatron parameter and where its values come from."""

    megatron: str
    names: tuple[str, ...]
    """Hugging Face names, joined in this order."""
    kind: str
    """copy, qkv (interleaved by key-value head) or stack (one above the other)."""


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
    projections = tuple(f"{h}self_attn.{x}_proj.weight" for x in "qkv")
    yield Piece(m + "self_attention.linear_qkv.weight", projections, "qkv")
    if arch.experts:
        for x in "qk":
            yield Piece(f"{m}self_attention.{x}_layernorm.weight", (f"{h}self_attn.{x}_norm.weight",), "copy")
    yield Piece(m + "self_attention.linear_proj.weight", (h + "self_attn.o_proj.weight",), "copy")
    yield Piece(m + "pre_mlp_layernorm.weight", (h + "post_attention_layernorm.weight",), "copy")
    if not arch.experts:
        yield from _mlp(m + "mlp.", h + "mlp.")
        return
    yield Piece(m + "mlp.router.weight", (h + "mlp.gate.weight",), "copy")
    for expert in range(arch.experts):
        yield from _mlp(f"{m}mlp.experts.local_experts.{expert}.", f"{h}mlp.experts.{expert}.")


def _mlp(m: str, h: str) -> Iterator[Piece]:
    yield Piece(m + "linear_fc1.weight", (h + "gate_proj.weight", h + "up_proj.weight"), "stack")
    yield Piece(m + "linear_fc2.weight", (h + "down_proj.weight",), "copy")


def join(arch: Architecture, piece: Piece, parts: list[torch.Tensor]) -> torch.Tensor:
    """The megatron tensor made of the Hugging Face tensors `parts`."""
    if piece.kind == "copy":
        return parts[0]
    if piece.kind == "stack":
        return torch.cat(parts)
    groups = [part.view(arch.kv_heads, -1, arch.head_dim, arch.hidden) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, arch.hidden)


def split(arch: Architecture, piece: Piece, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `join`, with names; every tensor contiguous."""
    if piece.kind == "copy":
        parts = [tensor]
    elif piece.kind == "stack":
        parts = list(tensor.chunk(2))
    else:
        per = arch.heads // arch.kv_heads
        grouped = tensor.view(arch.kv_heads, per + 2, arch.head_dim, arch.hidden)
        parts = [
            part.reshape(-1, arch.hidden)
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
    """Hugging Face name and tensor of every megatron tensor, in a stable order. Copied only where tensors were joined."""
    for piece in pieces(arch):
        yield from split(arch, piece, tensors[piece.megatron].detach())
