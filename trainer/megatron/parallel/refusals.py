"""Which layouts are refused before anything is built, by the planner's codes where it has one."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.trainer.layout import rules
from palestra.trainer.layout.types import Layout, ModelDims
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.types import TrainerError

MCORE = "0.16.1"
"""The megatron-core that this package pins; some rules hold only below a later one."""
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""What tests/test_parallel_layouts.py holds to one process."""


def dims_of(arch: Architecture) -> ModelDims:
    """What the rules ask of a model."""
    return ModelDims(
        layers=arch.layers,
        hidden=arch.hidden,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        vocab=arch.vocab,
        ffn=arch.ffn,
        tied=arch.tied,
        experts=arch.experts,
        topk=arch.topk,
        qk_norm=arch.qk_norm,
        qkv_bias=arch.qkv_bias,
        moe_ffn=arch.ffn if arch.experts else 0,
    )


def findings(arch: Architecture, layout: Layout) -> Iterator[str]:
    """Everything that speaks against training `arch` under `layout`."""
    dims = dims_of(arch)
    held = {
        "P201": rules.dense_mesh(dims, layout),
        "P202": rules.expert_mesh(dims, layout),
        "P203": rules.expert_split(dims, layout),
        "P204": rules.query_heads(dims, layout),
        "P205": rules.key_heads(dims, layout),
        "P207": rules.pipeline_split(dims, layout),
        "P208": rules.chunks_without_pipeline(dims, layout),
        "P209": rules.chunk_layers(dims, layout),
        "P211": rules.sequence_parallel(dims, layout),
        "P212": rules.expert_gradients(dims, layout, MCORE),
    }
    for code, hits in held.items():
        yield from (f"{code}: {hit.message}; {hit.fix}" for hit in hits)
    if arch.family not in FAMILIES:
        yield f"not built: {arch.family} over several processes; {', '.join(FAMILIES)} are"
    if layout.tp > arch.kv_heads:
        yield f"P206: not built: TP = {layout.tp} above {arch.kv_heads} key heads; set train.tp = {arch.kv_heads} or less"
    if not layout.distributed_optimizer:
        yield "not built: several processes without the distributed optimizer"
    for name, size in (("TP", layout.tp if not arch.experts else 1), ("ETP", layout.etp if arch.experts else 1)):
        if arch.ffn % size:
            yield f"an inner width of {arch.ffn} is not a multiple of {name} = {size}"


def check(arch: Architecture, layout: Layout) -> None:
    """Refuses what would crash or train wrong.

    Raises:
        TrainerError: says what, and what to change.
    """
    if found := list(findings(arch, layout)):
        raise TrainerError("this layout cannot be trained: " + "; ".join(found))
