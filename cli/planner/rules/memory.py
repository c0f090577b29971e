"""P801, P802, P806 to P808: memory of the processes that train, on their GPUs and on their hosts."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import (
    CHUNKS,
    Changes,
    Trial,
    first,
    fit_training,
    pipeline_ends,
    shorter_chunks,
    tried,
)
from palestra.cli.planner.local import RUNNING, local_engine
from palestra.cli.planner.memory import GIB, RUNTIME_BYTES, logits_bytes
from palestra.cli.planner.plan import judge
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.workload import transport
from palestra.envs.findings import Hit

RULES = Rules()
LAYOUT_CODES = ("P201", "P202", "P203", "P204", "P205", "P207")
"""Layouts that cannot be: what their ranks hold means nothing."""
MARGIN = 0.9
"""Share of a memory that a plan may fill."""
LOGITS_SHARE = 0.2
UNEVEN = 1.15


def training_limit(case: Case) -> float | None:
    """Memory that a training process can have, bytes: of its GPU, or without GPUs of the host; None: unknown."""
    if case.on_cpu:
        return case.input.hardware.host_mem_bytes or None
    return case.device.memory_bytes if case.device and case.device.memory_bytes else None


def held(case: Case) -> str:
    """What the fullest rank holds, in words."""
    if measured := case.input.workload.measured.peak_train_bytes:
        return f"training was measured to take {measured / GIB:.1f} GiB"
    stage = case.stage_memories()[case.worst_stage]
    items = {
        "state": stage.state - stage.reference,
        "reference": stage.reference,
        "activations": stage.activations,
        "logits": stage.logits,
        "runtime and fragments": stage.overhead,
    }
    parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in items.items() if size)
    where = f"stage {stage.stage}" if case.layout.pp > 1 else "training" if case.on_cpu else "each rank"
    return f"{where} holds {parts} = {case.worst_train_bytes / GIB:.1f} GiB"


def said(changes: Changes) -> str:
    """Changes as a fix names them."""
    values = ", ".join(f"{path} = {value}" for path, value in changes.items() if value is not None)
    gone = ", ".join(path for path, value in changes.items() if value is None)
    return " and ".join([*([f"set {values}"] if values else []), *([f"remove {gone}"] if gone else [])])


def _fitting(case: Case, limit: float) -> Changes:
    """What to change for the formulas to stay below `limit`. What was measured scales them, and is not true of the changed run."""
    if isinstance(case, Trial):
        return {}
    measured = case.input.workload.measured.peak_train_bytes
    if not measured:
        return fit_training(case, limit, judge)
    forget: Changes = {"workload.measured.peak_train_bytes": None}
    computed = tried(case, forget)
    changes = fit_training(computed, min(1.0, computed.worst_train_bytes / measured) * limit, judge)
    return {**changes, **forget} if changes else {}


@RULES.rule(
    "P801",
    ERROR,
    "train.max_tokens_per_gpu",
    title="training does not fit the GPU, or without GPUs the host",
    why="The fullest rank runs out of memory in its first step. State is megatron-core's arithmetic (its distributed "
    "optimizer's documentation: 18, 6 + 12/d bytes a parameter); activations agree with counted saved tensors of "
    "real layers; runtime and fragmentation are guesses.",
    recipe="qwen3-30b",
    fails={"train.optimizer_offload": 0.0},
    after=LAYOUT_CODES,
)
def training_fits(case: Case) -> Iterator[Hit]:
    """F4, F5 and the runtime against the memory there is."""
    limit = training_limit(case)
    if limit is None or not case.state or case.worst_train_bytes <= limit:
        return
    # With the margin that P802 asks for, where that can be had.
    changes = _fitting(case, MARGIN * limit) or _fitting(case, limit)
    fix = said(changes) if changes else "train on more GPUs, or with a smaller model or a shorter context"
    yield Hit(f"{held(case)}; there are {limit / GIB:.1f}", fix, changes)


@RULES.rule(
    "P802",
    WARNING,
    "train.max_tokens_per_gpu",
    title="training fills more than nine tenths of the memory",
    why="Memory falls into pieces between steps of different shapes, and the formulas are estimates: such a run may "
    "end after hours.",
    recipe="qwen3-30b",
    fails={"train.optimizer_offload": 0.0, "train.max_tokens_per_gpu": 10240},
    after=(*LAYOUT_CODES, "P801"),
)
def training_fits_barely(case: Case) -> Iterator[Hit]:
    """The margin of P801."""
    limit = training_limit(case)
    if limit is None or not case.state or case.worst_train_bytes <= MARGIN * limit:
        return
    changes = _fitting(case, MARGIN * limit)
    fix = said(changes) if changes else "leave a tenth of the memory free: shorter micro-batches, or more GPUs"
    yield Hit(f"{held(case)}, {case.worst_train_bytes / limit:.0%} of {limit / GIB:.1f}", fix, changes)


def host_items(case: Case) -> dict[str, float]:
    """What training keeps in the memory of one node, bytes by name; a node may hold the ranks of one stage alone, so all count as the
    fullest one. Engines that give their memory up drop their weights: these come back with the next publish. Without GPUs training and
    engines are on the host whole."""
    hardware, given = case.input.hardware, case.input
    if not case.state:
        return {}
    if case.on_cpu:
        engine, count = local_engine(case), case.decoding.count if case.decoding else 0
        found = {"training": case.worst_train_bytes, "engines": engine.total * count if engine else 0.0}
        return {name: size for name, size in found.items() if size}
    ranks = min(hardware.gpus_per_node, case.train_gpus)
    nodes = max(1, ceil(case.train_gpus / hardware.gpus_per_node))
    items = {"optimizer": case.optimizer_host_bytes}
    if case.offload_train:
        kept = case.stage_memories()
        items["training state while engines sample"] = ranks * max(stage.state - stage.reference for stage in kept)
        items["reference while engines sample"] = ranks * max(stage.reference for stage in kept)
    if given.train.cpu_offloading:
        items["activations"] = ranks * max(case.stage_activations(state.stage).layers for state in case.state)
    if given.weights.mode == "delta":
        items["weights that the last delta was made of"] = case.sent_bytes / nodes
    if transport(case) != "ipc":
        items["buckets of a publish"] = 2.0 * given.weights.bucket_bytes * ranks
    if case.colocated and given.rollout.hicache and given.rollout.hicache_ratio and case.pool:
        items["second cache of the engines"] = (
            given.rollout.hicache_ratio * max(0.0, case.pool.rest) * hardware.gpus_per_node
        )
    return {name: size for name, size in items.items() if size}


@RULES.rule(
    "P806",
    ERROR,
    "hardware.host_mem_bytes",
    title="what is kept on the hosts does not fit their memory",
    why="The kernel ends the process that asks last, which is as likely the service as the trainer. Sizes are exact "
    "but for engines' second cache; where the memory of a node is not given, only a note says what it has to "
    "hold.",
    recipe="qwen3-30b",
    fails={"hardware.host_mem_bytes": 400_000_000_000},
    after=LAYOUT_CODES,
)
def host_fits(case: Case) -> Iterator[Hit]:
    """Offloaded optimizer, swapped state, snapshots and buffers of a node against nine tenths of its memory."""
    items, there = host_items(case), case.input.hardware.host_mem_bytes
    total = sum(items.values())
    parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in items.items())
    where = "the host" if case.on_cpu else "each training node"
    if not there and total > RUNTIME_BYTES * case.input.hardware.gpus_per_node:
        message = f"{where} holds {parts} = {total / GIB:.1f} GiB in its own memory, which is not given"
        yield Hit(message, "give hardware.host_mem_bytes", severity=NOTE)
    elif there and total > MARGIN * there:
        changes = {} if isinstance(case, Trial) else first(case, _lighter(case), _host_holds, judge)
        fix = "train on more nodes, or let engines have GPUs of their own (placement.mode), so that nothing has to make way"
        if case.on_cpu:
            fix = "let fewer requests run (rollout.max_running), or take a smaller model"
        yield Hit(
            f"{where} holds {parts} = {total / GIB:.1f} GiB, more than {MARGIN:.0%} of {there / GIB:.1f}",
            said(changes) if changes else fix,
            changes,
        )


def _host_holds(case: Case) -> bool:
    return sum(host_items(case).values()) <= MARGIN * case.input.hardware.host_mem_bytes


def _lighter(case: Case) -> Iterator[Changes]:
    if case.on_cpu:
        running = case.input.rollout.max_running or RUNNING
        yield from ({"rollout.max_running": running // part} for part in (2, 4, 8) if running // part)
        return
    if case.input.weights.mode == "delta":
        yield {"weights.mode": "full"}
    for share in (0.75, 0.5, 0.25, 0.0):
        if share < case.input.train.optimizer_offload:
            yield {"train.optimizer_offload": share}


@RULES.rule(
    "P807",
    WARNING,
    "train.logprob_chunk_tokens",
    title="logits of a micro-batch take more than a fifth of the memory",
    why="Logits exist as bf16, as fp32, as their gradient and, where the entropy is computed, as a copy: "
    "megatron-core's vocabulary-parallel entropy clones them. Computed in pieces, and again in the backward pass, they "
    "cost time and no memory.",
    recipe="qwen3-30b",
    fails={"train.max_tokens_per_gpu": 40960},
    passes={"train.max_tokens_per_gpu": 40960, "train.logprob_chunk_tokens": 4096},
    after=(*LAYOUT_CODES, "P801"),
)
def logits_are_small(case: Case) -> Iterator[Hit]:
    """The last stage's logits against its memory."""
    limit = training_limit(case)
    if limit is None or not case.state:
        return
    logits = case.stage_activations(case.layout.pp - 1).logits
    if logits <= LOGITS_SHARE * limit:
        return
    each = logits_bytes(case.model, case.layout.tp, case.input.train.entropy)
    fitting = [chunk for chunk in CHUNKS if chunk * each <= LOGITS_SHARE * limit and chunk * each < logits]
    message = f"logits of the last stage take {logits / GIB:.1f} of {limit / GIB:.1f} GiB"
    if fitting:
        saved = (logits - fitting[0] * each) / GIB
        changes = {"train.logprob_chunk_tokens": fitting[0]}
        yield Hit(message, f"{said(changes)}: it saves {saved:.1f} GiB", changes)
    else:
        yield Hit(message, "raise train.tp, which spreads the vocabulary")


@RULES.rule(
    "P808",
    WARNING,
    "train.last_stage_layers",
    title="one pipeline stage is far fuller than the others",
    why="All stages have GPUs of the same size: the fullest one decides what fits, and the others' memory is paid for "
    "and empty. The first stage has the embedding and the most micro-batches under way, the last one the logits.",
    recipe="qwen3-235b",
    fails={"train.first_stage_layers": 10, "train.last_stage_layers": 44},
    after=(*LAYOUT_CODES, "P801"),
)
def stages_are_even(case: Case) -> Iterator[Hit]:
    """The fullest stage against the mean."""
    sizes = case.train_bytes()
    if len(sizes) < 2:
        return
    worst, mean = max(sizes), sum(sizes) / len(sizes)
    if worst <= UNEVEN * mean:
        return

    def even(trial: Case) -> bool:
        found = trial.train_bytes()
        return len(found) > 1 and max(found) <= UNEVEN * sum(found) / len(found) and max(found) <= worst

    changes: Changes = {}
    if not isinstance(case, Trial):
        ranked = sorted(pipeline_ends(case), key=lambda each: tried(case, each).worst_train_bytes)
        changes = first(case, [*ranked[:3], *shorter_chunks(case)], even, judge)
    spread = "-".join(str(layers) for layers in case.stages or ())
    yield Hit(
        f"stage {sizes.index(worst)} holds {worst / GIB:.1f} GiB, the mean of {len(sizes)} stages is {mean / GIB:.1f} (layers {spread})",
        said(changes) if changes else "move layers away from the fullest stage",
        changes,
    )
