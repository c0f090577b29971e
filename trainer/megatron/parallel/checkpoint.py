"""Checkpoints of a parallel run, in the form of `trainer/megatron/state.py`: whole tensors under Hugging Face names.

Any layout, one process included, reads what any other wrote. Rank 0 writes, every rank reads its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from palestra.trainer.megatron import state
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.parallel.gathering import Held, gather, whole_parts
from palestra.trainer.megatron.parallel.optimizer import ShardedOptimizer
from palestra.trainer.megatron.parallel.shards import Local, fill
from palestra.trainer.types import CheckpointError, ModelError


def save(
    folder: Path,
    arch: Architecture,
    mine: Sequence[Local],
    optimizer: ShardedOptimizer,
    reference: Sequence[torch.Tensor] | None,
    device: torch.device,
) -> None:
    """Writes weights, optimizer state and the reference, if there is one; waits for all ranks.

    Raises:
        CheckpointError: the disk refused; on every rank.
    """
    steps, (first, second) = optimizer.state()
    wanted: dict[str, Held] = {state.MODEL: whole_parts([(local, local.parameter) for local in mine])}
    if _anywhere(steps):
        wanted |= {state.FIRST: first, state.SECOND: second}
    if reference is not None:
        wanted[state.REFERENCE] = whole_parts(list(zip(mine, reference, strict=True)))
    files = {name: dict(gather(held, mine, arch, device)) for name, held in wanted.items()}
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            state.write(folder, arch, files, steps)
        except (CheckpointError, OSError) as error:
            told = [f"{folder} could not be written by rank 0: {error}"]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise CheckpointError(told[0])


def _anywhere(steps: int) -> bool:
    """Whether any rank has moments: one that owns nothing has none."""
    told: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(told, steps)
    return any(told)


def load(
    folder: Path, arch: Architecture, mine: Sequence[Local], optimizer: ShardedOptimizer
) -> list[torch.Tensor] | None:
    """Fills weights and optimizer; returns this rank's part of the reference, if one was saved.

    Raises:
        CheckpointError: it is not there, damaged or of another model.
    """
    steps, files = state.read_about(folder, arch)
    _read([(local, local.parameter) for local in mine], folder, state.MODEL, arch)
    if state.FIRST in files:
        moments = []
        for name in (state.FIRST, state.SECOND):
            targets = [(local, torch.empty_like(local.parameter.data)) for local in mine]
            _read(targets, folder, name, arch)
            moments.append({id(local.parameter): values for local, values in targets})
        optimizer.restore(steps, moments)
    if state.REFERENCE not in files:
        return None
    reference = [(local, torch.empty_like(local.parameter.data)) for local in mine]
    _read(reference, folder, state.REFERENCE, arch)
    return [values for _, values in reference]


def _read(targets: Sequence[tuple[Local, torch.Tensor]], folder: Path, name: str, arch: Architecture) -> None:
    try:
        with safe_open(str(folder / name), framework="pt") as handle:
            fill(targets, arch, handle.get_tensor)
    except (OSError, SafetensorError, ModelError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
