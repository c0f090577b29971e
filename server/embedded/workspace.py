"""The workspace: keys, values and routed experts of the running requests, one slot each, slots 0..n-1 always in use.

In: positions to make room for, pages to take over. Out: tensors that attention reads and writes. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token costs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    top_k: int
    """Experts per token and layer; 0 for a dense model."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Workspace:
    """Grows with the longest running request; memory is committed by the system as it is touched."""

    def __init__(self, shape: CacheShape, slots: int, limit: int) -> None:
        self.shape, self._slots, self._limit = shape, slots, limit
        self._capacity = 0
        self.kv, self.experts = self._make(min(FIRST_CAPACITY, limit))

    def _make(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, self._capacity = self.shape, capacity
        # Zeros, not empty: a masked NaN of fresh memory would still poison the sum over values.
        kv = torch.zeros(shape.layers, 2, self._slots, shape.kv_heads, capacity, shape.head_dim, dtype=shape.dtype)
        if not shape.top_k:
            return kv, None
        return kv, torch.full((self._slots, capacity, shape.layers, shape.top_k), -1, dtype=torch.int16)

    def reserve(self, tokens: int, used: int) -> None:
        """Makes room for `tokens` in every slot; the first `used` slots keep what they hold."""
        if tokens <= self._capacity:
            return
        old_kv, old_experts, old = self.kv, self.experts, self._capacity
        self.kv, self.experts = self._make(min(max(2 * old, tokens), self._limit))
        self.kv[:, :, :used, :, :old] = old_kv[:, :, :used]
        if self.experts is not None and old_experts is not None:
            self.experts[:used, :old] = old_experts[:used]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` of a slot into another one."""
        self.kv[:, :, target, :, :tokens] = self.kv[:, :, source, :, :tokens]
        if self.experts is not None:
            self.experts[target, :tokens] = self.experts[source, :tokens]
