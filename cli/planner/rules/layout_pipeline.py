"""P207 to P210, P219, P222: pipelines, their chunks and micro-batches, and activations that wait on the host."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import Changes
from palestra.cli.planner.rules.collect import ERROR, WARNING, Rules
from palestra.cli.planner.rules.mending import mended
from palestra.envs.findings import Hit
from palestra.trainer.layout import rules
from palestra.trainer.layout.numbers import around, divisors, nearest, spreads

RULES = Rules()
BUBBLE = 0.25
"""Share of a step that stages may wait before it is worth a word."""


def _ends(case: Case, first: int | None, last: int | None) -> Changes:
    """Sets ends, and takes away those that were given and are not wanted."""
    train = case.input.train
    both = (
        ("train.first_stage_layers", first, train.first_stage_layers),
        ("train.last_stage_layers", last, train.last_stage_layers),
    )
    return {name: wanted for name, wanted, given in both if wanted != given}


def _splits(case: Case) -> Iterator[Changes]:
    """Ends that fit, then numbers of stages that need none."""
    layers, layout = case.model.layers, case.layout
    for first, last in spreads(layers, layout.pp, layout.vpp)[:6]:
        yield _ends(case, first, last)
    if layout.pp == 1:
        yield _ends(case, None, None)
        return
    if layout.vpp > 1:
        for first, last in spreads(layers, layout.pp)[:6]:
            yield {**_ends(case, first, last), "train.vpp": 1}
    for size in nearest(divisors(layers), layout.pp)[:6]:
        yield {**_ends(case, None, None), "train.pp": size, **({"train.vpp": 1} if layout.vpp > 1 else {})}


def _microbatches(case: Case, step: int, least: int = 1) -> Iterator[Changes]:
    """Sizes of a micro-batch of which a step has a multiple of `step`, and at least so many."""
    train, layout = case.input.train, case.layout
    first = max(around(max(case.microbatches, least) - 1, step)[0], step)
    wanted = [first, first + step, first + 2 * step, *(each for each in (first - step,) if each >= max(step, least))]
    if not train.dynamic_batch and train.micro_batch:
        for count in wanted:
            if size := case.global_batch // (count * layout.dp):
                yield {"train.micro_batch": size}
        return
    tokens = case.global_batch * case.work.row_tokens / layout.dp
    for count in wanted:
        yield {"train.max_tokens_per_gpu": max(1, ceil(tokens / (count * layout.cp)))}


@RULES.rule(
    "P207",
    ERROR,
    "train.pp",
    title="layers cannot be spread over the stages of the pipeline",
    why="megatron-core's TransformerConfig and its transformer block raise: stages between the ends have the same number of layers, "
    "and none "
    "is empty.",
    recipe="qwen3-235b",
    fails={"train.last_stage_layers": None},
    after=("P104",),
)
def pipeline_split(case: Case) -> Iterator[Hit]:
    """Suggests the evenest ends."""
    for hit in rules.pipeline_split(case.model, case.layout):
        yield mended(case, pipeline_split, hit, _splits(case))


@RULES.rule(
    "P208",
    ERROR,
    "train.vpp",
    title="an interleaved schedule without a pipeline",
    why="megatron-core's initialize_model_parallel raises: the pipeline's size must be greater than 1 with the interleaved schedule.",
    recipe="qwen3-4b",
    fails={"train.vpp": 2},
)
def chunks_without_pipeline(case: Case) -> Iterator[Hit]:
    """Suggests no chunks."""
    for hit in rules.chunks_without_pipeline(case.model, case.layout):
        yield mended(case, chunks_without_pipeline, hit, [{"train.vpp": 1}])


@RULES.rule(
    "P209",
    ERROR,
    "train.vpp",
    title="a stage's layers do not make VPP equal chunks",
    why="megatron-core's TransformerConfig raises for the ends and for the stages between them.",
    recipe="qwen3-235b",
    fails={"train.vpp": 5},
    after=("P207", "P208"),
)
def chunk_layers(case: Case) -> Iterator[Hit]:
    """Suggests a VPP that divides all stages, or other ends."""
    for hit in rules.chunk_layers(case.model, case.layout):
        sizes = [each for each in nearest(divisors(case.model.layers), case.layout.vpp) if each < case.layout.vpp]
        tries: list[Changes] = [{"train.vpp": size} for size in {*sizes, *range(2, min(case.layout.vpp, 9))} - {1}]
        tries.sort(key=lambda change: -change["train.vpp"])
        ends = [_ends(case, *pair) for pair in spreads(case.model.layers, case.layout.pp, case.layout.vpp)[:3]]
        yield mended(case, chunk_layers, hit, [*tries, *ends, {"train.vpp": 1}])


@RULES.rule(
    "P210",
    ERROR,
    "train.vpp",
    title="micro-batches of a step do not fill the interleaved schedule",
    why="megatron-core's interleaved schedule raises unless it has at least PP micro-batches and the last group of them is full. "
    "Where rows "
    "are packed their number follows from the rollouts' lengths: a trainer has to add empty ones.",
    recipe="qwen3-235b",
    fails={"train.vpp": 2},
    passes={"train.vpp": 2, "train.max_tokens_per_gpu": 6600},
    after=("P201", "P207", "P208", "P209"),
)
def chunk_microbatches(case: Case) -> Iterator[Hit]:
    """Suggests smaller micro-batches, or no chunks."""
    for hit in rules.chunk_microbatches(case.layout, case.microbatches):
        yield mended(case, chunk_microbatches, hit, [*_microbatches(case, case.layout.pp), {"train.vpp": 1}])


@RULES.rule(
    "P219",
    ERROR,
    "train.cpu_offloading",
    title="activations go to the host although they are computed again, or although there is a pipeline",
    why="megatron-core's TransformerConfig raises for cpu_offloading with a pipeline, and with any recomputation.",
    recipe="qwen3-4b",
    fails={"train.cpu_offloading": True},
    passes={"train.cpu_offloading": True, "train.recompute": "none"},
)
def offloaded_activations(case: Case) -> Iterator[Hit]:
    """Suggests not to recompute where that fits, else not to offload."""
    pipeline = case.layout.pp > 1
    if case.input.train.cpu_offloading and (pipeline or case.recompute != "none"):
        beside = f"PP = {case.layout.pp}" if pipeline else f"train.recompute = {case.recompute!r}"
        hit = Hit(
            f"train.cpu_offloading cannot go with {beside}",
            "set train.cpu_offloading = false" + ("" if pipeline else ', or train.recompute = "none"'),
        )
        yield mended(case, offloaded_activations, hit, [{"train.recompute": "none"}, {"train.cpu_offloading": False}])


@RULES.rule(
    "P222",
    WARNING,
    "train.vpp",
    title="stages of the pipeline wait for a good part of the step",
    why="A pipeline of PP stages fills and empties once a step: (PP-1)/m of the work's time with m micro-batches, and VPP times "
    "less with VPP "
    "chunks a stage (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021).",
    recipe="qwen3-235b",
    fails={},
    passes={"algo.groups_per_step": 32},
    after=("P201", "P207"),
)
def pipeline_bubble(case: Case) -> Iterator[Hit]:
    """Suggests smaller micro-batches, or chunks."""
    pp, count = case.layout.pp, case.microbatches
    if case.layout.vpp == 1 and pp >= 4 and (pp - 1) / count > BUBBLE:
        least = ceil((pp - 1) / BUBBLE)
        hit = Hit(
            f"PP = {pp} with {count} micro-batches a step: stages wait for {(pp - 1) / count:.0%} of the work's time",
            f"have {least} micro-batches or more (smaller ones, or more rollouts a step), or set train.vpp",
        )
        smaller = list(_microbatches(case, pp, least))
        chunks = [{"train.vpp": 2, **change} for change in ({}, *_microbatches(case, pp))]
        yield mended(case, pipeline_bubble, hit, [*smaller, *chunks])
