"""P605 to P608, P614, P616: publishes of changes only."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.engines.rules import agents_there
from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.workload import transport
from palestra.envs.findings import Hit
from palestra.trainer.config import delta_findings

RULES = Rules()
DELTA = {"weights.mode": "delta", "weights.transport": "disk"}


@RULES.rule(
    "P605",
    ERROR,
    "weights.mode",
    title="changes only, by a transport that copies no files",
    why="Deltas are files with changed bytes. On shared GPUs a handle crosses, not bytes, so a delta is nothing but overhead; a "
    "broadcast sends whole buckets. The run's own validator refuses the same.",
    recipe="qwen3-4b",
    fails={"weights.mode": "delta"},
)
def delta_by_disk(case: Case) -> Iterator[Hit]:
    """delta with anything but disk, or on shared GPUs."""
    given = case.input.weights
    if given.mode != "delta":
        return
    if case.colocated:
        yield Hit(
            'weights.mode = "delta" on shared GPUs: a handle crosses, not bytes, so a delta is overhead',
            "send whole weights",
            {"weights.mode": "full"},
        )
        return
    for each in delta_findings(given.mode, given.transport or transport(case)):
        yield Hit(each.message, each.fix, each.suggest)


@RULES.rule(
    "P606",
    ERROR,
    "weights.local_dir",
    title="deltas without room for a whole copy on the engines' hosts",
    why="An engine loads a whole folder: each host keeps one and puts changes into it. An agent of `rollout.agents` has a folder of its "
    "own.",
    recipe="two-nodes",
    fails={**DELTA, "hardware.local_dir": None},
    passes=DELTA,
    after=("P605",),
)
def local_copy(case: Case) -> Iterator[Hit]:
    """No folder, or too small a disk."""
    hardware = case.input.hardware
    if case.input.weights.mode != "delta" or case.on_cpu:
        return
    if not (case.input.weights.local_dir or hardware.local_dir or case.input.rollout.agents):
        yield Hit("deltas need a folder on each engine's host that holds a whole copy", "give weights.local_dir")
    elif 0 < hardware.local_free_bytes < case.sent_bytes:
        yield Hit(
            f"each engine's host keeps a whole copy of {case.sent_bytes / 1e9:.1f} GB; {hardware.local_free_bytes / 1e9:.1f} GB are free "
            "there",
            "free space, or send whole weights by another transport",
            path="hardware.local_free_bytes",
        )


@RULES.rule(
    "P607",
    WARNING,
    "weights.mode",
    title="so much changes that a whole folder is as fast as a delta",
    why="Finding changes and putting them in costs a pass over all bytes each (rates of 20 and 40 GB/s are guesses), so deltas pay below "
    "a share of changed bytes that falls with the folder's bandwidth.",
    recipe="two-nodes",
    fails={**DELTA, "workload.measured.delta_density": 0.7},
    passes=DELTA,
    after=("P605",),
)
def delta_pays(case: Case) -> Iterator[Hit]:
    """F9."""
    if case.input.weights.mode != "delta" or case.on_cpu:
        return
    delta = case.delta
    if delta.delta_s >= delta.full_s:
        yield Hit(
            f"a delta takes {delta.delta_s:.1f} s, a whole folder {delta.full_s:.1f} s; they are even where "
            f"{max(0.0, delta.break_even):.0%} of the bytes change",
            "weights.mode = full, or measure workload.measured.delta_density",
            {"weights.mode": "full"},
        )


@RULES.rule(
    "P608",
    WARNING,
    "weights.delta_encoding",
    title="differences that must be put in exactly once",
    why="An xor put in twice gives the old bytes back; overwritten runs may be put in again by whoever retries. Our agents compare every "
    "byte of the result, so a mistake costs a refused version, not wrong weights.",
    recipe="two-nodes",
    fails={**DELTA, "weights.delta_encoding": "xor"},
    passes=DELTA,
)
def idempotent(case: Case) -> Iterator[Hit]:
    """xor."""
    if case.input.weights.mode == "delta" and case.input.weights.delta_encoding == "xor":
        yield Hit(
            "weights.delta_encoding = xor: it must be applied exactly once",
            "overwrite may be applied again",
            {"weights.delta_encoding": "overwrite"},
        )


@RULES.rule(
    "P614",
    NOTE,
    "weights.mode",
    title="what the trainer keeps for deltas",
    why="Changes are told against the version before, of which the trainer keeps a copy in host memory.",
    recipe="two-nodes",
    fails=DELTA,
)
def kept_copy(case: Case) -> Iterator[Hit]:
    """The copy, by node of training."""
    if case.input.weights.mode == "delta":
        nodes = 1 if case.on_cpu else max(1, -(-case.train_gpus // case.input.hardware.gpus_per_node))
        yield Hit(
            f"the trainer keeps {case.sent_bytes / nodes / 2**30:.1f} GiB of the last version in each node's memory"
        )


@RULES.rule(
    "P616",
    ERROR,
    "weights.mode",
    title="deltas to engines that cannot put them together",
    why="SGLang 0.5.23 has no /pull_weights: that is slime's patch (its wheel was searched). `palestra engine agent` on the engine's "
    "host puts the folder together, then the engine loads it from disk. The launchers of a plan start such agents beside the engines that "
    "they start; without GPUs `palestra train` starts none, and refuses the same.",
    recipe="two-nodes",
    fails={**DELTA, "weights.agents": False},
    passes=DELTA,
    after=("P605",),
)
def host_agents(case: Case) -> Iterator[Hit]:
    """No agents, none for one of the engines that are named, or engines of which nobody starts an agent."""
    given, rollout = case.input.weights, case.input.rollout
    if given.mode != "delta":
        return
    started = not case.on_cpu and rollout.engine == "sglang"
    for each in agents_there(case.external_urls, rollout.agents, started):
        yield Hit(each.message, each.fix, {"weights.mode": "full"})
        return
    if not given.agents:
        yield Hit(
            'weights.mode = "delta" needs an agent on every engine\'s host: a stock engine reads whole folders only',
            "run `palestra engine agent` on each host, or send whole weights",
            {"weights.mode": "full"},
        )
