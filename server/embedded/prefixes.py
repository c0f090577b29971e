"""The prefix store: pages of keys, values and routed experts that outlive their request, found again by what they
contain.

In: token sequences and the workspace's slots. Out: how much of a sequence is known, copied into a slot. Waits for
nothing.

A page is named by a digest over all tokens up to its end, so equal names mean equal prefixes. Pages are copied in and
out, never shared in place: a page can be dropped at any time, the least recently used first, and no counting of users
is needed. New weights empty the store, so nothing that old weights computed is ever found again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch

from palestra.server.embedded.workspace import CacheShape, Workspace


class PrefixStore:
    """At most `pages` pages of `page_size` tokens."""

    def __init__(self, shape: CacheShape, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._kv = torch.empty(shape.layers, 2, pages, shape.kv_heads, page_size, shape.head_dim, dtype=shape.dtype)
        experts = (pages, page_size, shape.layers, shape.top_k)
        self._experts = torch.empty(experts, dtype=torch.int16) if shape.top_k else None
        self._pages = pages
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(pages - 1, -1, -1))

    def __len__(self) -> int:
        """Pages in use."""
        return len(self._known)

    def extend_names(self, names: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Appends the names of the whole pages of `tokens` that `names` does not have yet."""
        size = self.page_size
        for page in range(len(names), len(tokens) // size):
            before = names[-1] if names else salt.encode()
            piece = array("q", tokens[page * size : (page + 1) * size]).tobytes()
            names.append(hashlib.blake2b(before + piece, digest_size=16).digest())

    def match(self, names: Sequence[bytes]) -> int:
        """How many of the leading pages are known."""
        for count, name in enumerate(names):
            if name not in self._known:
                return count
        return len(names)

    def load(self, names: Sequence[bytes], space: Workspace, slot: int) -> None:
        """Copies known pages to the start of a slot."""
        if not names:
            return
        pages = torch.tensor([self._known[name] for name in names])
        tokens = len(names) * self.page_size
        space.kv[:, :, slot, :, :tokens] = self._kv[:, :, pages].transpose(2, 3).flatten(3, 4)
        if space.experts is not None and self._experts is not None:
            space.experts[slot, :tokens] = self._experts[pages].flatten(0, 1)
        self._touch(names)

    def save(self, names: Sequence[bytes], space: Workspace, slot: int) -> None:
        """Keeps the leading pages of a slot. Of a sequence longer than the store, the start is kept."""
        names = names[: self._pages]
        self._touch([name for name in names if name in self._known])
        fresh = [i for i, name in enumerate(names) if name not in self._known]
        if not fresh:
            return
        pages = torch.tensor([self._take() for _ in fresh])
        at = torch.tensor(fresh)
        tokens = len(names) * self.page_size
        held = space.kv[:, :, slot, :, :tokens]
        held = held.reshape(*held.shape[:3], len(names), self.page_size, -1)
        self._kv[:, :, pages] = held[:, :, :, at].transpose(2, 3)
        if space.experts is not None and self._experts is not None:
            self._experts[pages] = space.experts[slot, :tokens].view(len(names), *self._experts.shape[1:])[at]
        for i, page in zip(fresh, pages.tolist(), strict=True):
            self._known[names[i]] = page
        self._touch(names)

    def clear(self) -> None:
        """Forgets everything."""
        self._free.extend(self._known.values())
        self._known.clear()

    def _take(self) -> int:
        if not self._free:
            self._free.append(self._known.popitem(last=False)[1])
        return self._free.pop()

    def _touch(self, names: Sequence[bytes]) -> None:
        """Last page first, so that a sequence's end is dropped before its start."""
        for name in reversed(names):
            self._known.move_to_end(name)
