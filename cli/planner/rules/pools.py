"""P803 to P805, P809 to P812: memory of engines, and room on disks."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import EngineShape
from palestra.cli.planner.fitting import Changes, Trial, first
from palestra.cli.planner.memory import GIB, RUNTIME_BYTES, checkpoint_bytes, kept_checkpoint_bytes
from palestra.cli.planner.plan import judge
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.memory import said
from palestra.cli.planner.workload import transport
from palestra.envs.findings import Hit, Severity

RULES = Rules()
ENGINE_CODES = ("P401", "P402", "P405", "P407", "P408")
"""Engines that cannot be: what they hold means nothing."""
SMALL_REST, TIGHT_REST = 8 * GIB, 4 * GIB
"""Memory beside an engine's pools that is worth a note, and a warning."""
FRACTIONS = (0.8, 0.85, 0.9)


def _name(shape: EngineShape) -> str:
    return "an engine" if shape.kind == "regular" else f"a {shape.kind} engine"


def _larger(case: Case) -> Iterator[Changes]:
    """Changes that leave an engine more room for its caches, mildest first."""
    rollout = case.input.rollout
    yield from ({"rollout.mem_fraction": each} for each in FRACTIONS if each > max(e.fraction for e in case.engines))
    if rollout.pd is None:
        gpus = 2 * rollout.gpus_per_engine
        while gpus <= case.rollout_gpus:
            yield {"rollout.gpus_per_engine": gpus}
            if case.model.experts and rollout.ep == rollout.gpus_per_engine > 1:
                yield {"rollout.gpus_per_engine": gpus, "rollout.ep": gpus}
            gpus *= 2
    if rollout.weight_dtype != "fp8" and case.train_dtype != "fp32":
        yield {"rollout.weight_dtype": "fp8", "rollout.quantised_checkpoint": True}


@RULES.rule(
    "P803",
    ERROR,
    "rollout.gpus_per_engine",
    title="weights alone are larger than the engine's share of a GPU",
    why="SGLang refuses to start where weights leave no room for a cache within mem_fraction_static.",
    recipe="qwen3-30b",
    fails={"rollout.gpus_per_engine": 1},
    after=ENGINE_CODES,
)
def weights_fit(case: Case) -> Iterator[Hit]:
    """F6: the weights of each kind of engine against its share."""
    for shape in case.engines:
        if shape.pool is None or case.device is None or shape.pool.rest > 0:
            continue
        changes = {} if isinstance(case, Trial) else first(case, _larger(case), _weights_fit, judge)
        share = shape.fraction * case.device.memory_bytes
        yield Hit(
            f"{_name(shape)} of {shape.gpus} GPUs keeps {shape.pool.weights / GIB:.1f} GiB of weights on each, and may take "
            f"{share / GIB:.1f} ({shape.fraction:g} of {case.device.memory_bytes / GIB:.1f})",
            said(changes) if changes else "spread an engine over more GPUs, or keep weights in fp8",
            changes,
        )
        return


def _weights_fit(case: Case) -> bool:
    return all(shape.pool is not None and shape.pool.rest > 0 for shape in case.engines)


def cache_tokens(case: Case, shape: EngineShape) -> int | None:
    """Tokens that one copy of an engine's attention caches, which is where a rollout has to fit; None: unknown, or, in the embedded engine,
    no bound: there each running request has room of its own."""
    if case.input.rollout.engine == "embedded":
        return None
    asked = case.input.rollout.max_total_tokens
    known = [each for each in (shape.pool.kv_tokens if shape.pool else None, asked) if each is not None]
    return min(known) if known else None


@RULES.rule(
    "P804",
    ERROR,
    "rollout.context_len",
    title="one rollout of the full length does not fit an engine's cache",
    why="SGLang ends a request that its pool cannot hold, with an error or cut short, however few others run.",
    recipe="qwen3-4b",
    fails={"rollout.max_total_tokens": 8192},
    after=(*ENGINE_CODES, "P803"),
)
def a_rollout_fits(case: Case) -> Iterator[Hit]:
    """F6: tokens of the cache against those of the longest rollout."""
    for shape in case.engines:
        tokens = cache_tokens(case, shape)
        if tokens is None or tokens >= case.longest_row:
            continue
        changes = {} if isinstance(case, Trial) else first(case, _roomier(case), _rollout_fits, judge)
        yield Hit(
            f"{_name(shape)} caches {tokens:,} tokens, the longest rollout takes {case.longest_row:,}",
            said(changes) if changes else "shorten rollouts, or spread an engine over more GPUs",
            changes,
        )
        return


def _rollout_fits(case: Case) -> bool:
    found = [cache_tokens(case, shape) for shape in case.engines]
    return all(tokens is None or tokens >= case.longest_row for tokens in found)


def _roomier(case: Case) -> Iterator[Changes]:
    if case.input.rollout.max_total_tokens is not None:
        yield {"rollout.max_total_tokens": None if not case.on_cpu else case.longest_row}
    if not case.on_cpu:
        yield from _larger(case)
        if case.input.rollout.kv_dtype in ("auto", "bf16", "fp32"):
            yield {"rollout.kv_dtype": "fp8_e4m3"}


@RULES.rule(
    "P805",
    WARNING,
    "rollout.max_running",
    title="the rollouts of an engine do not fit its cache together",
    why="SGLang takes running requests off again when its pool is full (retraction) and computes them anew later. A "
    "group shares its prompt where its rollouts meet in one engine (F14); half of the completions is there on "
    "average.",
    recipe="qwen3-4b",
    fails={"rollout.max_total_tokens": 65536},
    after=(*ENGINE_CODES, "P803", "P804"),
)
def rollouts_fit(case: Case) -> Iterator[Hit]:
    """F6 and F14: tokens that an engine's rollouts keep against those that fit."""
    shape = case.decoding
    one = None if shape is None else cache_tokens(case, shape)
    if shape is None or one is None or not case.held.each:
        return
    room = one * shape.replicas
    running = min(case.running, case.input.rollout.max_running or case.running)
    fits = int(room / case.held.each)
    if fits < running:
        changes = {"rollout.max_running": fits} if fits else {}
        yield Hit(
            f"{_name(shape)} caches {room:,} tokens: {fits} of {ceil(running)} rollouts of {case.held.each:,.0f} fit; the rest queue "
            "or are retracted",
            "have the others wait instead: set rollout.max_running = "
            f"{fits}; or play fewer at a time, or spread an engine over more GPUs",
            changes,
        )


def checkpoint_size(case: Case) -> int:
    """F17: bytes of one checkpoint."""
    state = case.state_bytes
    return checkpoint_bytes(case.model, state.weight + state.optimizer) * (2 if case.input.train.critic else 1)


@RULES.rule(
    "P809",
    ERROR,
    "run.save_dir",
    title="checkpoints do not fit the disk",
    why="A new checkpoint is written beside the old ones and renamed when it is whole, and only then the oldest goes: "
    "there is one more than are kept. Weights and the optimizer's numbers are all saved (F17).",
    recipe="qwen3-4b",
    fails={"run.free_disk_bytes": 100_000_000_000},
    passes={"run.free_disk_bytes": 1_000_000_000_000},
)
def checkpoints_fit(case: Case) -> Iterator[Hit]:
    """F17 against the free disk, where it is given."""
    given = case.input.run
    if given.free_disk_bytes is None:
        return
    one = checkpoint_size(case)
    needed = kept_checkpoint_bytes(one, given.keep_checkpoints)
    if needed <= given.free_disk_bytes:
        return
    keep = int(given.free_disk_bytes // one) - 1
    yield Hit(
        f"{given.keep_checkpoints} + 1 checkpoints of {one / 1e9:,.1f} GB take {needed / 1e9:,.1f} GB, "
        f"{given.free_disk_bytes / 1e9:,.1f} are free "
        f"for {given.save_dir}",
        f"set run.keep_checkpoints = {keep}" if keep >= 1 else "free the disk, or save elsewhere",
        {"run.keep_checkpoints": keep} if keep >= 1 else {},
    )


@RULES.rule(
    "P810",
    WARNING,
    "weights.shared_dir",
    title="the shared folder has no room for two copies of the weights",
    why="The copy of the version in force stays until all engines have the next one, which is written beside it and "
    "renamed.",
    recipe="many-nodes",
    fails={
        "weights.transport": "disk",
        "weights.shared_dir": "/shared/w",
        "hardware.shared_free_bytes": 600_000_000_000,
    },
    passes={
        "weights.transport": "disk",
        "weights.shared_dir": "/shared/w",
        "hardware.shared_free_bytes": 2_000_000_000_000,
    },
)
def copies_fit(case: Case) -> Iterator[Hit]:
    """Two copies against the free room, where it is given."""
    free = case.input.hardware.shared_free_bytes
    if transport(case) == "disk" and free and free < 2 * case.sent_bytes:
        yield Hit(
            f"two copies of the weights take {2 * case.sent_bytes / 1e9:,.1f} GB, {free / 1e9:,.1f} are free in the shared folder",
            "free it, or publish over the network (weights.transport)",
        )


@RULES.rule(
    "P811",
    NOTE,
    "rollout.mem_fraction",
    title="little memory is left beside an engine's weights and caches",
    why="Activations of prefill, CUDA graphs and communication buffers live in what mem_fraction_static leaves "
    "(SGLang's documentation of the option); under 4 GiB engines run out of memory in long prefills, between 4 "
    "and 8 it depends on the model. How much is needed is a guess.",
    recipe="many-nodes",
    fails={"rollout.mem_fraction": 0.97},
    after=(*ENGINE_CODES, "P803"),
)
def rest_is_enough(case: Case) -> Iterator[Hit]:
    """(1 - f) * M of the kind of engine with the least."""
    if case.device is None or not any(shape.pool for shape in case.engines):
        return
    fraction = max(shape.fraction for shape in case.engines)
    rest = (1 - fraction) * case.device.memory_bytes
    if rest >= SMALL_REST:
        return
    lower = int((1 - SMALL_REST / case.device.memory_bytes) * 100) / 100
    changes: Changes = {"rollout.mem_fraction": lower} if lower >= 0.1 else {}
    if isinstance(case, Trial) or not first(case, [changes], _holds_rollouts, judge):
        changes = {}
    yield Hit(
        f"{rest / GIB:.1f} GiB of {case.device.memory_bytes / GIB:.1f} are left for activations, graphs and buffers of the engine",
        said(changes) if changes else "lower rollout.mem_fraction, or spread an engine over more GPUs",
        changes,
        severity=Severity.WARNING if rest < TIGHT_REST else None,
    )


def _holds_rollouts(case: Case) -> bool:
    return _weights_fit(case) and _rollout_fits(case)


@RULES.rule(
    "P812",
    WARNING,
    "rollout.mem_fraction",
    title="an engine and what training leaves on a shared GPU do not fit together",
    why="A training process that has moved to the host keeps its context, its communicators and their buffers on the "
    "GPU: 3 GiB is a guess. The engine takes its share of the whole GPU, not of what is free.",
    recipe="qwen3-4b",
    fails={"rollout.mem_fraction": 0.97},
    after=(*ENGINE_CODES, "P803"),
)
def engine_and_residue_fit(case: Case) -> Iterator[Hit]:
    """f * M and the residue against the GPU, where both take turns on it."""
    if not case.colocated or not case.offload_train or case.device is None or not case.engines:
        return
    memory = case.device.memory_bytes
    static = max(shape.fraction for shape in case.engines) * memory
    if not memory or static + RUNTIME_BYTES <= memory:
        return
    lower = int((1 - RUNTIME_BYTES / memory) * 100) / 100
    changes: Changes = {"rollout.mem_fraction": lower} if lower >= 0.1 else {}
    if isinstance(case, Trial) or not first(case, [changes], _holds_rollouts, judge):
        changes = {}
    yield Hit(
        f"the engine takes {static / GIB:.1f} GiB and training leaves {RUNTIME_BYTES / GIB:.0f} behind, of {memory / GIB:.1f}",
        said(changes) if changes else "lower rollout.mem_fraction",
        changes,
    )
