"""What a layout of training is held to: pure arithmetic of a model's dimensions and a layout, in the words of megatron-core.

In: `ModelDims`, `Layout`. Out: hits, with what to do in words; `palestra plan` adds codes, reasons and values that work. A model's own
shapes are in `shapes.py`. Nothing is waited for, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

from palestra.envs.findings import Hit
from palestra.trainer.layout.numbers import around, divisors, nearest, older, spreads
from palestra.trainer.layout.types import Layout, ModelDims, stage_layers

MENDED = "0.20"
"""First megatron-core whose experts are reduced, counted and balanced right for every tensor parallel size (P212 to P214)."""
LINEAR_CP = "0.19"
"""First megatron-core that takes context parallelism with a gated delta net."""


def dense_mesh(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P201: ranks are no multiple of TP*PP*CP."""
    size = layout.tp * layout.pp * layout.cp
    yield from _mesh(layout.gpus, size, f"TP*PP*CP = {layout.tp}*{layout.pp}*{layout.cp} = {size}")


def expert_mesh(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P202: ranks are no multiple of ETP*EP*PP; megatron-core lays experts' ranks out for a dense model too."""
    size = layout.etp * layout.ep * layout.pp
    yield from _mesh(layout.gpus, size, f"ETP*EP*PP = {layout.etp}*{layout.ep}*{layout.pp} = {size}")


def _mesh(gpus: int, size: int, product: str) -> Iterator[Hit]:
    if gpus % size or gpus < size:
        counts = " or ".join(map(str, around(gpus, size)))
        what = "fewer than" if gpus < size else "not a multiple of"
        yield Hit(f"{gpus} ranks of training are {what} {product}", f"train on {counts} GPUs, or split less")


def expert_split(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P203: EP does not divide the experts, or there are none."""
    if layout.ep > 1 and not model.experts:
        yield Hit(f"train.ep = {layout.ep}, but the model has no experts", "set train.ep = 1")
    elif model.experts % layout.ep:
        close = " or ".join(map(str, sorted(nearest(divisors(model.experts), layout.ep)[:2])))
        yield Hit(f"{model.experts} experts are not a multiple of EP = {layout.ep}", f"set train.ep = {close}")


def query_heads(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P204: TP does not divide the query heads."""
    if model.heads % layout.tp:
        close = " or ".join(map(str, sorted(nearest(divisors(model.heads), layout.tp)[:2])))
        yield Hit(f"{model.heads} query heads are not a multiple of TP = {layout.tp}", f"set train.tp = {close}")


def key_heads(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P205: key heads are neither a multiple nor a divisor of TP. Latent attention has none to split."""
    if not model.mla and model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        yield Hit(
            f"{model.kv_heads} key heads are neither a multiple nor a divisor of TP = {layout.tp}",
            f"set train.tp to a divisor of {model.kv_heads}, or to a multiple that divides {model.heads} query heads",
        )


def replicated_keys(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P206: more tensor parallel ranks than key heads."""
    if not model.mla and layout.tp > model.kv_heads:
        yield Hit(
            f"TP = {layout.tp} is more than {model.kv_heads} key heads: key and value projections are replicated "
            f"{layout.tp / model.kv_heads:g}x",
            f"set train.tp = {model.kv_heads} or less",
        )


def pipeline_split(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P207: the layers cannot be spread over the stages."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    ends = ", ".join(f"{name} = {size}" for name, size in (("first", first), ("last", last)) if size is not None)
    if layout.pp == 1:
        if any(size not in (None, model.layers) for size in (first, last)):
            yield Hit(f"PP = 1 has one stage of {model.layers} layers, not {ends}", "take the sizes of the ends away")
        return
    if stage_layers(model.layers, layout.pp, first, last) is not None:
        return
    words = [_pair(pair, model.layers, layout.pp) for pair in spreads(model.layers, layout.pp, layout.vpp)[:3]]
    yield Hit(
        f"{model.layers} layers cannot be spread over PP = {layout.pp} stages" + (f" with {ends}" if ends else ""),
        f"give {'; or '.join(words)}" if words else f"set train.pp to a divisor of {model.layers}",
    )


def _pair(pair: tuple[int | None, int | None], layers: int, pp: int) -> str:
    spread = stage_layers(layers, pp, *pair) or ()
    given = [f"{name}={size}" for name, size in zip(("first", "last"), pair, strict=True) if size is not None]
    shown = [*map(str, spread)] if pp <= 8 else [str(spread[0]), "...", str(spread[-1])]
    return f"{' '.join(given) or 'neither end'} -> {','.join(shown)}"


def chunks_without_pipeline(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P208: an interleaved schedule without a pipeline."""
    if layout.vpp > 1 and layout.pp == 1:
        yield Hit(f"VPP = {layout.vpp} needs a pipeline, and PP = 1", "set train.vpp = 1")


def chunk_layers(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P209: a stage's layers do not make VPP chunks."""
    spread = stage_layers(model.layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    if layout.vpp > 1 and spread and (uneven := sorted({each for each in spread if each % layout.vpp})):
        yield Hit(
            f"stages of {' and '.join(map(str, uneven))} layers do not make VPP = {layout.vpp} equal chunks",
            "set train.vpp to a number that divides the layers of every stage, or change the ends",
        )


def chunk_microbatches(layout: Layout, microbatches: int) -> Iterator[Hit]:
    """P210: the interleaved schedule takes micro-batches by PP at a time."""
    if layout.vpp > 1 and (microbatches < layout.pp or microbatches % layout.pp):
        # megatron-core's groups have PP micro-batches unless told otherwise, so that the rest of a division is always below PP.
        above = around(microbatches, layout.pp)[0]
        yield Hit(
            f"{microbatches} micro-batches of a step are not a multiple of PP = {layout.pp}",
            f"have {above} of them: smaller ones, or empty ones where sizes vary",
        )


def sequence_parallel(model: ModelDims, layout: Layout) -> Iterator[Hit]:
    """P211: sequence parallelism without tensor parallelism, or experts and tensor parallelism without it."""
    if layout.sp and layout.tp == 1:
        yield Hit("sequence parallelism needs TP > 1", "set train.sp = false")
    elif model.experts and layout.tp > 1 and not layout.sp:
        yield Hit(f"experts with TP = {layout.tp} need sequence parallelism", "set train.sp = true")


def expert_gradients(model: ModelDims, layout: Layout, mcore: str) -> Iterator[Hit]:
    """P212: EP = 1 with another tensor parallel size for experts."""
    if model.experts and layout.ep == 1 and layout.etp != layout.tp and older(mcore, MENDED):
        yield Hit(
            f"EP = 1 and ETP = {layout.etp} beside TP = {layout.tp}: megatron-core {mcore} reduces expert gradients over the wrong group, "
            "silently",
            f"set train.etp = {layout.tp}, or train.ep above 1",
        )


def expert_norm(model: ModelDims, layout: Layout, mcore: str, grouped_gemm: bool) -> Iterator[Hit]:
    """P213: the gradient's norm leaves experts out."""
    spread = layout.ep > 1 and layout.tp > 1 and layout.etp != layout.tp
    if model.experts and spread and grouped_gemm and older(mcore, MENDED):
        yield Hit(
            f"EP = {layout.ep}, TP = {layout.tp}, ETP = {layout.etp} with grouped multiplication: the gradient norm of "
            f"megatron-core {mcore} "
            "misses experts, so that clipping is weaker than set",
            f"compute the norm yourself, or use megatron-core {MENDED}",
        )


def auxiliary_losses(
    model: ModelDims, layout: Layout, mcore: str, coefficients: tuple[float, float], per_token: bool
) -> Iterator[Hit]:
    """P214: the router's own losses (balance, z) beside a loss per token."""
    if not model.experts or not per_token or not any(coefficients) or not older(mcore, MENDED):
        return
    if layout.tp > 1 or layout.cp > 1:
        yield Hit(
            f"aux and z loss ({coefficients[0]:g}, {coefficients[1]:g}) are scaled by the tokens of one rank: what they weigh depends on "
            f"TP = {layout.tp} and CP = {layout.cp}",
            "set both coefficients to 0, or train.per_token_loss = false",
        )


def linear_heads(model: ModelDims, layout: Layout, mcore: str) -> Iterator[Hit]:
    """P216: heads of linear attention that TP*CP does not divide, or context parallelism before it was there."""
    if not model.linear_layers:
        return
    if layout.cp > 1 and model.linear_kind == "gdn" and older(mcore, LINEAR_CP):
        yield Hit(
            f"CP = {layout.cp}: megatron-core {mcore} has no context parallelism for a gated delta net",
            "set train.cp = 1 and spread the layers with train.pp",
        )
    elif uneven := [each for each in (model.lin_k_heads, model.lin_v_heads) if each % (layout.tp * layout.cp)]:
        yield Hit(
            f"{' and '.join(map(str, uneven))} heads of linear attention are not a multiple of TP*CP = {layout.tp}*{layout.cp}",
            "set train.tp and train.cp so that their product divides them",
        )
