"""Which part of which tensor a rank holds, and the way between whole tensors and parts.

A tensor has the name that it has in one process, whatever layer or expert of the stage it is, so `convert.pieces` describes it. It is cut
over tensor parallel ranks (`Cut.parts`) or whole on all of them. Nothing is waited for; `gathering.py` sends parts about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from palestra.trainer.megatron import convert
from palestra.trainer.megatron.core import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallel_state,
)
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.parallel.model import StageModel
from palestra.trainer.types import ModelError

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""The tensors with a row per entry of the vocabulary."""
GATED = "linear_fc1.weight"
"""Two tensors, one above the other: each is cut by itself."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is spread over tensor parallel ranks."""

    name: str
    """In one process."""
    dim: int | None
    """Along which it is cut; None: whole on every rank."""
    parts: int
    shape: tuple[int, ...]
    """Of one part."""


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter of this rank."""

    cut: Cut
    part: int
    """Which of the parts it is."""
    primary: bool
    """Whether this rank, and not another with the same values, counts it in norms and hands it out. Data parallel copies are all
    primary."""
    parameter: torch.nn.Parameter

    @property
    def name(self) -> str:
        """In one process."""
        return self.cut.name


def locals_of(chunks: Sequence[StageModel], arch: Architecture) -> list[Local]:
    """Every parameter of this rank's model chunks."""
    return [each for chunk in chunks for each in _of_chunk(chunk, arch)]


def _of_chunk(chunk: StageModel, arch: Architecture) -> Iterator[Local]:
    cuts = dict(_cuts(chunk))
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    local_experts = arch.experts // max(1, parallel_state.get_expert_model_parallel_world_size())
    first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        whole = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda found: str(layers[int(found[0])]), name)
        whole = re.sub(r"(?<=\.local_experts\.)\d+", lambda found: str(int(found[0]) + first_expert), whole)
        copy = whole == OUTPUT and arch.tied  # the last stage's copy of the embedding
        dim, parts, part = cuts.get(parameter, (None, 1, 0))
        alone = parts > 1 or ".experts." in whole or tensor_rank == 0
        cut = Cut(EMBEDDING if copy else whole, dim, parts, tuple(parameter.shape))
        yield Local(cut, part, alone and not copy, parameter)


def _cuts(chunk: StageModel) -> Iterator[tuple[torch.nn.Parameter, tuple[int | None, int, int]]]:
    """Parameters that are cut: along which dimension, into how many parts, and which one is here."""
    for module in chunk.modules():
        dims: dict[str, int] = {}
        if isinstance(module, ColumnParallelLinear):
            dims = {"weight": 0, "bias": 0}
        elif isinstance(module, VocabParallelEmbedding):
            dims = {"weight": 0}
        elif isinstance(module, RowParallelLinear):
            dims = {"weight": 1}
        for name, dim in dims.items():
            parameter: Any = getattr(module, name, None)
            group: Any = getattr(module, "tp_group", None)
            if parameter is not None and group.size() > 1:
                yield parameter, (dim, group.size(), group.rank())


def take(whole: torch.Tensor, local: Local) -> torch.Tensor:
    """The part of a whole tensor that `local` holds.

    Raises:
        ModelError: it cannot be cut so, or the part has another shape.
    """
    cut = local.cut
    if cut.name in (EMBEDDING, OUTPUT) and (missing := cut.shape[0] * cut.parts - whole.shape[0]) > 0:
        whole = torch.cat([whole, whole.new_zeros((missing, *whole.shape[1:]))])
    if cut.dim is not None:
        halves = whole.chunk(2) if cut.name.endswith(GATED) else (whole,)
        if any(half.shape[cut.dim] % cut.parts for half in halves):
            raise ModelError(f"{cut.name} {tuple(whole.shape)} is not a multiple of {cut.parts} ranks")
        whole = torch.cat([half.chunk(cut.parts, cut.dim)[local.part] for half in halves])
    if tuple(whole.shape) != cut.shape:
        raise ModelError(f"{cut.name}: the checkpoint gives {tuple(whole.shape)}, config.json asks for {cut.shape}")
    return whole


def join(parts: Sequence[torch.Tensor], cut: Cut, arch: Architecture) -> torch.Tensor:
    """The inverse of `take`, from all parts in their order."""
    if cut.dim is None:
        return parts[0]
    if cut.name.endswith(GATED):
        pairs = [part.chunk(2) for part in parts]
        return torch.cat([pair[half] for half in (0, 1) for pair in pairs], dim=cut.dim)
    whole = torch.cat(list(parts), dim=cut.dim)
    return whole[: arch.vocab] if cut.name in (EMBEDDING, OUTPUT) else whole


def fill(
    targets: Sequence[tuple[Local, torch.Tensor]], arch: Architecture, read: Callable[[str], torch.Tensor]
) -> None:
    """Fills tensors of this rank from the Hugging Face tensors that `read` gives by name; reads only what is needed here.

    Raises:
        ModelError: a shape differs, or a tensor has no source.
    """
    wanted: dict[str, list[tuple[Local, torch.Tensor]]] = {}
    for local, target in targets:
        wanted.setdefault(local.name, []).append((local, target))
    with torch.no_grad():
        for piece in convert.pieces(arch):
            if not (here := wanted.pop(piece.megatron, [])):
                continue
            try:
                whole = convert.join(arch, piece, [read(name) for name in piece.names])
            except RuntimeError as error:
                raise ModelError(f"{', '.join(piece.names)} do not fit config.json: {error}") from None
            for local, target in here:
                target.copy_(take(whole, local))
    if wanted:
        raise ModelError(f"parameters without a source in the checkpoint: {', '.join(sorted(wanted))}")
