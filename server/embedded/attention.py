"""Attention over slots: what the model's attention layers call during a step, in place of transformers' own functions.

In: the flat queries, keys and values of all tokens of one step, and the step's `SlotPlan`. Out: the attended values.
Side effect: keys and values are written into the workspace's slots. Waits for nothing.

A slot holds the keys and values of one running request in one piece, so a step of decoding is a single batched call
without any gathering. The query heads that share a key head are folded into the query length, so keys are never
repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "palestra_slots"
"""The name under which transformers knows `slot_attention`."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start..end of the flat step: a piece of one request's sequence that is longer than one token."""

    slot: int
    start: int
    end: int
    total: int
    """Tokens of the request that are in its slot after this step."""
    mask: torch.Tensor
    """[1, 1, group * (end - start), total], added to the scores."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where the T flat tokens of one step belong. The first `singles` tokens are of requests with one token each."""

    kv: torch.Tensor
    """[layers, 2, slots, kv heads, capacity, head dim], the workspace. Keys or values that are narrower use the first columns."""
    slots: torch.Tensor
    """[T] slot of each token."""
    positions: torch.Tensor
    """[T] position of each token in its sequence."""
    singles: int
    used: int
    """Slots 0..used-1 belong to running requests."""
    reach: int
    """Longest sequence among the single-token requests, this token included."""
    mask: torch.Tensor
    """[used, 1, 1, reach], added to the scores of the single-token requests."""
    spans: tuple[Span, ...]


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: SlotPlan,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, T, dim], key and value [1, kv heads, T, dim] -> [1, T, heads, dim of the values].

    With latent attention values are narrower than keys; both are kept as the heads see them, not squeezed.
    """
    keys, values = plan.kv[module.layer_idx]
    keys, values = keys[..., : key.shape[-1]], values[..., : value.shape[-1]]
    keys[plan.slots, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.slots, :, plan.positions] = value[0].transpose(0, 1)
    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    folded = query[0].view(kv_heads, heads // kv_heads, tokens, dim)
    out = query.new_empty(tokens, heads, value.shape[-1])
    if plan.singles:
        out[: plan.singles] = _singles(folded[:, :, : plan.singles], keys, values, plan, scaling)
    for span in plan.spans:
        part = folded[:, :, span.start : span.end].reshape(1, kv_heads, -1, dim)
        k = keys[span.slot : span.slot + 1, :, : span.total]
        v = values[span.slot : span.slot + 1, :, : span.total]
        seen = scaled_dot_product_attention(part, k, v, attn_mask=span.mask, scale=scaling)
        out[span.start : span.end] = seen.view(heads, -1, value.shape[-1]).transpose(0, 1)
    return out.unsqueeze(0), None


def _singles(
    folded: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: SlotPlan, scaling: float | None
) -> torch.Tensor:
    """One token per request: [kv heads, group, n, dim] -> [n, heads, values' dim]. Slots that read a prompt meanwhile ride along unused."""
    kv_heads, group, n, dim = folded.shape
    query = folded.permute(2, 0, 1, 3)
    rows = plan.slots[:n]
    if n != plan.used:
        query = query.new_zeros(plan.used, kv_heads, group, dim).index_copy_(0, rows, query)
    k, v = keys[: plan.used, :, : plan.reach], values[: plan.used, :, : plan.reach]
    seen = scaled_dot_product_attention(query, k, v, attn_mask=plan.mask, scale=scaling)
    if n != plan.used:
        seen = seen[rows]
    return seen.reshape(n, kv_heads * group, values.shape[-1])
