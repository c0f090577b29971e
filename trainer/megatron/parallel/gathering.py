"""Tensors that are spread over the ranks, put together on rank 0, one at a time.

Every rank says once which fragments it holds; then all walk through the tensors in the same order, and whoever owns a fragment sends it.
Every rank has to walk to the end: rank 0 waits for the owners, up to the process group's deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from palestra.trainer.megatron import convert
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.parallel.shards import Cut, Local, join


@dataclass(frozen=True, slots=True, order=True)
class Fragment:
    """A stretch of one part of a tensor."""

    name: str
    part: int
    start: int
    """In the flattened part."""
    stop: int


Held = Mapping[Fragment, torch.Tensor]
"""What a rank can hand out, flattened."""


def whole_parts(values: Sequence[tuple[Local, torch.Tensor]]) -> dict[Fragment, torch.Tensor]:
    """Parts as fragments of themselves; those that another rank hands out are left out."""
    return {
        Fragment(local.name, local.part, 0, value.numel()): value.detach().reshape(-1)
        for local, value in values
        if local.primary
    }


def gather(
    held: Held, mine: Sequence[Local], arch: Architecture, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """On rank 0: name and whole tensor, in the order of `convert.pieces`. Elsewhere: nothing, while its fragments are sent.

    Tensors that nobody holds (moments before the first step) are left out.
    """
    rank = dist.get_rank()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (list(held), {local.name: local.cut for local in mine}))
    cuts: dict[str, Cut] = {}
    owners: dict[str, dict[Fragment, int]] = {}
    for owner, (fragments, known) in enumerate(told):
        cuts |= known
        for fragment in fragments:
            owners.setdefault(fragment.name, {}).setdefault(fragment, owner)
    for piece in convert.pieces(arch):
        name = piece.megatron
        if name not in owners:
            continue
        cut = cuts[name]
        parts = [torch.empty(cut.shape, device=device) for _ in range(cut.parts)] if rank == 0 else []
        for fragment, owner in sorted(owners[name].items()):
            if rank == 0:
                into = parts[fragment.part].view(-1)[fragment.start : fragment.stop]
                if owner == 0:
                    into.copy_(held[fragment])
                else:
                    dist.recv(into, owner)
            elif owner == rank:
                dist.send(held[fragment].contiguous(), 0)
        if rank == 0:
            yield name, join(parts, cut, arch)
