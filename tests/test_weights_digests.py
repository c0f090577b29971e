"""Digests by the engines' own names."""

from __future__ import annotations

import hashlib

import torch

from palestra.trainer.weights.digests import sglang_place
from palestra.trainer.weights.proof import Proof

L = "model.layers.3."


def short(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def digests(kind: str, named: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    proof = Proof(kind)  # type: ignore[arg-type]
    for name, tensor in named.items():
        proof.watch(name, tensor)
    return dict(proof.digests() or {})


def test_the_embedded_engine_has_hugging_face_names() -> None:
    q = torch.randn(4, 6)
    assert digests("embedded", {L + "self_attn.q_proj.weight": q}) == {
        L + "self_attn.q_proj.weight": (short(q), (4, 6))
    }
    assert digests("embedded", {"t": q.t()}) == {"t": (short(q.t()), (6, 4))}, "bytes in the order of the shape"


def test_sglang_fuses_attention_and_mlp() -> None:
    q, k, v, gate, up, down, norm = (torch.randn(4, 6) for _ in range(7))
    named = {
        L + "self_attn.q_proj.weight": q,
        L + "self_attn.k_proj.weight": k,
        L + "self_attn.v_proj.weight": v,
        L + "mlp.gate_proj.weight": gate,
        L + "mlp.up_proj.weight": up,
        L + "mlp.down_proj.weight": down,
        L + "self_attn.q_norm.weight": norm,
    }
    assert digests("sglang", named) == {
        L + "self_attn.qkv_proj.weight": (short(q, k, v), ()),
        L + "mlp.gate_up_proj.weight": (short(gate, up), ()),
        L + "mlp.down_proj.weight": (short(down), ()),
        L + "self_attn.q_norm.weight": (short(norm), ()),
    }


def test_sglang_fuses_all_experts_of_a_layer() -> None:
    experts = [[torch.randn(3, 2) for _ in range(3)] for _ in range(3)]
    named = {
        f"{L}mlp.experts.{i}.{part}.weight": tensor
        for i, expert in enumerate(experts)
        for part, tensor in zip(("gate_proj", "up_proj", "down_proj"), expert, strict=True)
    }
    router = torch.randn(3, 2)
    assert digests("sglang", {L + "mlp.gate.weight": router, **named}) == {
        L + "mlp.gate.weight": (short(router), ()),
        L + "mlp.experts.w13_weight": (short(*(t for e in experts for t in e[:2])), ()),
        L + "mlp.experts.w2_weight": (short(*(e[2] for e in experts)), ()),
    }


def test_sglang_pads_the_vocabulary_with_zeros() -> None:
    table = torch.randn(70, 4)
    assert digests("sglang", {"lm_head.weight": table}) == {"lm_head.weight": (short(table, torch.zeros(58, 4)), ())}


def test_parts_out_of_order_are_left_to_the_comparison_between_engines() -> None:
    k, q = torch.randn(2), torch.randn(2)
    assert digests("sglang", {L + "self_attn.k_proj.weight": k, L + "self_attn.q_proj.weight": q}) == {}
    assert digests("sglang", {L + "self_attn.q_proj.weight": q}) == {}, "an unfinished fused tensor has no digest"


def test_names_that_only_look_like_parts_are_their_own() -> None:
    assert sglang_place("model.layers.0.mlp.gate.weight") is None
    assert sglang_place("model.layers.0.self_attn.o_proj.weight") is None
    assert sglang_place(L + "self_attn.v_proj.bias") == (L + "self_attn.qkv_proj.bias", 2)


def test_nothing_is_collected_where_nothing_is_verified() -> None:
    proof = Proof(None)
    proof.watch("t", torch.zeros(1))
    assert (proof.digests(), proof.collects) == (None, False)
