"""P306, P307, P309: GPUs that training and rollout share in turns, and pools of which one waits for the other."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import Trial, tried
from palestra.cli.planner.flow import balanced_share
from palestra.cli.planner.memory import FRAGMENTATION, RUNTIME_BYTES
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.engine_words import GIB
from palestra.envs.findings import Hit

RULES = Rules()


@RULES.rule(
    "P306",
    ERROR,
    "placement.offload_rollout",
    title="training and engines share GPUs, and one side cannot leave them",
    why="SGLang gives memory up only when it was started with --enable-memory-saver; without it, or where a side stays by choice, both "
    "have to fit at once (F4 and F6), and whoever comes second runs out of memory.",
    recipe="qwen3-4b",
    fails={"placement.offload_rollout": False},
)
def nobody_leaves(case: Case) -> Iterator[Hit]:
    """No memory saver, or state and pools that do not fit together."""
    engine, device = case.decoding, case.device
    if not case.colocated or engine is None or device is None or not case.state:
        return
    if case.offload_rollout and not case.memory_saver:
        yield Hit(
            "the rollout is offloaded while training, and engines have no memory saver",
            "set rollout.memory_saver",
            {"rollout.memory_saver": True},
        )
    static = engine.fraction * device.memory_bytes
    limit = device.memory_bytes
    if not case.offload_rollout and case.worst_train_bytes + static > limit:
        yield Hit(
            _both(case.worst_train_bytes, static, limit) + " (placement.offload_rollout = false)",
            "let the rollout give its memory up",
            {"placement.offload_rollout": True, "rollout.memory_saver": True},
        )
    kept = max(state.gpu_bytes for state in case.state) * FRAGMENTATION + RUNTIME_BYTES
    if not case.offload_train and kept + static > limit:
        yield Hit(
            _both(kept, static, limit) + " (placement.offload_train = false)",
            "let training give its memory up",
            {"placement.offload_train": True},
            "placement.offload_train",
        )


def _both(training: float, engine: float, limit: float) -> str:
    return f"training keeps {training / GIB:.1f} GiB and an engine {engine / GIB:.1f} GiB of the same GPU, which has {limit / GIB:.1f}"


@RULES.rule(
    "P307",
    WARNING,
    "schedule.kind",
    title="a shared pool and a schedule that overlaps",
    why="GPUs that are shared cannot sample and train at once: tokens get older, and no step gets shorter.",
    recipe="qwen3-4b",
    fails={"schedule.kind": "async", "schedule.max_staleness": 1},
)
def shared_and_async(case: Case) -> Iterator[Hit]:
    """Colocated, and not sync."""
    if case.colocated and case.input.schedule.kind != "sync":
        yield Hit(
            f"GPUs are shared, and the schedule is {case.input.schedule.kind}: it buys staleness and no speed",
            "place them apart, or use the sync schedule",
            {"schedule.kind": "sync", "schedule.max_staleness": None},
        )


@RULES.rule(
    "P309",
    NOTE,
    "placement.rollout_gpus",
    title="one pool waits for the other most of the time",
    why="Pools apart only work at once for as long as the shorter phase lasts. Both times are guesses (F7, F8) until they are measured.",
    recipe="two-nodes",
    fails={},
    passes={"workload.measured.decode_tok_s": 10_000, "workload.measured.train_tok_s": 4000},
    after=("P301", "P401", "P408"),
)
def unbalanced(case: Case) -> Iterator[Hit]:
    """Rollout and training of two pools differ by more than a factor of two."""
    times = case.times
    if case.mode != "separate" or times is None or not case.rollout_gpus or min(times.rollout_s, times.train_s) <= 0:
        return
    rollout, train = times.rollout_s, times.train_s
    if max(rollout, train) <= 2 * min(rollout, train):
        return
    pool = "training" if train < rollout else "rollout"
    both = case.rollout_gpus + case.train_gpus
    share = balanced_share(rollout, case.rollout_gpus, train, case.train_gpus)
    yield Hit(
        f"a step samples for {rollout:.1f} s and trains for {train:.1f} s: the {pool} pool idles "
        f"{1 - min(rollout, train) / max(rollout, train):.0%} of the time",
        f"give the rollout about {share * both:.0f} of these {both} GPUs"
        + ("; more engines do not shorten the longest rollout" if rollout <= times.tail_s * 1.01 else ""),
        _balanced(case, share * both),
    )


def _balanced(case: Case, wanted: float) -> dict[str, int]:
    """The split next to the balanced one that both layouts allow, where it is one; empty where none is known."""
    layout, both, size = case.layout, case.rollout_gpus + case.train_gpus, case.input.rollout.gpus_per_engine
    if case.input.rollout.pd is not None or case.input.rollout.engines is not None or case.device is None:
        return {}
    if isinstance(case, Trial):
        return {}
    meshes = layout.tp * layout.pp * layout.cp, layout.etp * layout.ep * layout.pp
    ours = [each for each in range(size, both, size) if not (both - each) % meshes[0] and not (both - each) % meshes[1]]
    for each in sorted(ours, key=lambda gpus: abs(gpus - wanted))[:2]:
        fields = {"placement.rollout_gpus": each, "placement.train_gpus": both - each}
        trial = tried(case, fields)
        times, fits = trial.times, trial.worst_train_bytes <= case.device.memory_bytes
        if times and fits and max(times.rollout_s, times.train_s) <= 2 * min(times.rollout_s, times.train_s):
            return fields
    return {}
