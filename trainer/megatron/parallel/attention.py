"""Attention where each rank holds a slice of the nodes: keys and values of all of them are gathered, queries stay where they are.

A token tree has no order that a zigzag of chunks would balance, and with a mask every query costs the same: slices are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch

from palestra.trainer.megatron.core import mappings
from palestra.trainer.megatron.spec import SdpaAttention


class ContextAttention(SdpaAttention):
    """SdpaAttention over the context parallel group; the mask is [1, 1, nodes of this rank, all nodes]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group = kwargs["pg_collection"].cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[n, B, heads, dim] each -> [n, B, heads * dim]; waits for the other ranks' keys and values."""
        whole_key, whole_value = (
            mappings.gather_from_sequence_parallel_region(each.contiguous(), group=self._group) for each in (key, value)
        )
        return super().forward(query, whole_key, whole_value, attention_mask)
