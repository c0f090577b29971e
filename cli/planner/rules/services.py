"""P9xx: boxes for code of models, waiting for tools, wall clock, records."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.planner.boxes import MEASURED_CORES, backend_of, box_demand, boxes_of, cost_of, generation_seconds
from palestra.cli.planner.case import Case
from palestra.cli.planner.memory import GIB, RUNTIME_BYTES, record_bytes_per_token
from palestra.cli.planner.rules.asking import hits, timed
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.memory import host_items
from palestra.cli.planner.rules.mending import mended
from palestra.cli.planner.rules.pools import checkpoint_size
from palestra.envs.findings import Hit, Severity
from palestra.envs.sandboxes import refusals

RULES = Rules()
BOXES_PER_CORE = 4
TOOLS_AGAINST_SAMPLING = 2.0


def here(case: Case) -> bool:
    """Whether boxes run on the machine of the service."""
    return backend_of(case) not in ("none", "remote")


def _refused(case: Case, code: str) -> Iterator[Hit]:
    """What the run's own section says."""
    given = case.input.sandbox
    yield from hits(refusals(backend_of(case), boxes_of(case), given.i_understand), code)


@RULES.rule(
    "P901",
    WARNING,
    "sandbox.boxes",
    title="fewer boxes than episodes keep busy",
    why="Episodes wait for a box while they hold their place in the engine's batch. By Little's law the boxes in use "
    "are the boxes made per second times the seconds that one lives (F16): it is made at an episode's first tool "
    "call and kept to its end, and a grader has one of its own. Seconds to make and remove a box were measured on "
    "two cores.",
    recipe="many-nodes",
    fails={"sandbox.boxes": 64},
)
def enough_boxes(case: Case) -> Iterator[Hit]:
    """F16 against the boxes there may be."""
    demand = box_demand(case)
    there = boxes_of(case)
    if demand is None or timed(case) is None or not there or there >= demand.needed:
        return
    needed = ceil(demand.needed)
    hit = Hit(
        f"episodes wait for a box: {demand.rate:.3g} boxes per second that live "
        f"{demand.create_s + demand.busy_s + demand.destroy_s:.3g} s make "
        f"{needed} at a time by Little's law, sandbox.boxes is {there}",
        f"set sandbox.boxes = {needed}, where their machines have room for so many",
    )
    yield mended(case, enough_boxes, hit, [{"sandbox.boxes": needed}])


@RULES.rule(
    "P902",
    ERROR,
    "sandbox.boxes",
    title="no box at all, or fewer than the rollouts of a group",
    why="Without boxes every episode that runs code waits until its deadline. Rollouts of a group do not move in "
    "step, so fewer boxes than rollouts are a warning: those of one group play one after another, and the group "
    "is complete that much later.",
    recipe="many-nodes",
    fails={"sandbox.boxes": 0},
)
def some_boxes(case: Case) -> Iterator[Hit]:
    """None, or fewer than a group."""
    if backend_of(case) == "none":
        return
    there, group = boxes_of(case), case.input.algo.group_size
    if there < 1:
        yield from _refused(case, "P902")
    elif case.input.sandbox.per_episode and there < group:
        hit = Hit(
            f"sandbox.boxes is {there}: the {group} rollouts of a group cannot play at a time",
            f"set sandbox.boxes = {group}, where their machines have room for so many",
            severity=Severity.WARNING,
        )
        yield mended(case, some_boxes, hit, [{"sandbox.boxes": group}])


@RULES.rule(
    "P903",
    WARNING,
    "sandbox.backend",
    title="more boxes per second than a machine makes",
    why="Two cores made and removed 22 to 26 bubblewrap boxes per second, and 3.5 to 5 docker containers; more cores "
    "are taken to make more in proportion, which is a guess. Beyond that episodes wait, however many boxes may "
    "exist.",
    recipe="many-nodes",
    fails={"sandbox.backend": "docker", "sandbox.hosts": None, "hardware.host_cores": 8},
)
def boxes_are_made_in_time(case: Case) -> Iterator[Hit]:
    """Boxes made per second against the measured rate of the kind."""
    demand = box_demand(case)
    if demand is None or timed(case) is None or not here(case):
        return
    backend, cores = backend_of(case), case.input.hardware.host_cores or MEASURED_CORES
    rate = cost_of(backend).per_s * max(1.0, cores / MEASURED_CORES)
    if demand.rate <= rate:
        return
    faster = cost_of("bubblewrap").per_s * max(1.0, cores / MEASURED_CORES)
    changes = {"sandbox.backend": "bubblewrap"} if backend == "docker" and demand.rate <= faster else {}
    fix = (
        'set sandbox.backend = "bubblewrap"'
        if changes
        else "spread boxes over more machines (sandbox.backend = remote)"
    )
    yield Hit(
        f"{demand.rate:.3g} boxes are made per second, {backend} on {cores} cores makes about {rate:.3g}",
        f"{fix}, or keep boxes warm",
        changes,
    )


def boxes_bytes(case: Case) -> int:
    """Memory of all boxes at their limits, or what they may have together."""
    given = case.input.sandbox
    wanted = boxes_of(case) * given.memory_bytes
    return wanted if given.total_memory_bytes is None else min(wanted, given.total_memory_bytes)


@RULES.rule(
    "P904",
    ERROR,
    "sandbox.boxes",
    title="boxes at their limits do not fit beside training",
    why="Boxes of the service's machine share its memory with what training keeps there; when all are full the kernel ends "
    "processes. A pool without sandbox.total_memory_bytes takes a share of what is free when it starts, before training has grown. "
    "The limit of a box counts as used, since code of models decides about it.",
    recipe="many-nodes",
    fails={
        "sandbox.backend": "bubblewrap",
        "sandbox.hosts": None,
        "sandbox.memory_bytes": 2**30,
        "hardware.host_mem_bytes": 1_000_000_000_000,
    },
    after=("P806",),
)
def boxes_fit(case: Case) -> Iterator[Hit]:
    """Memory of all boxes against what training leaves of the host; a note where the host's memory is not given."""
    if not here(case) or not boxes_of(case):
        return
    wanted, there, each = boxes_bytes(case), case.input.hardware.host_mem_bytes, case.input.sandbox.memory_bytes
    sizes = f"{boxes_of(case)} boxes of {each / GIB:.3g} GiB may take {wanted / GIB:,.1f} GiB"
    if not there:
        if wanted > RUNTIME_BYTES and not case.on_cpu:
            message = f"{sizes} of the service's host, whose memory is not given"
            yield Hit(message, "give hardware.host_mem_bytes", severity=NOTE)
        return
    left = max(0.0, there - sum(host_items(case).values()))
    if wanted > left:
        fits = int(left // each)
        yield Hit(
            f"{sizes}, training leaves {left / GIB:,.1f} of {there / GIB:,.1f}",
            f"set sandbox.boxes = {fits}, or bound them together by sandbox.total_memory_bytes"
            if fits
            else "give boxes machines of their own",
            {"sandbox.boxes": fits} if fits else {},
        )


@RULES.rule(
    "P905",
    ERROR,
    "sandbox.backend",
    title="code of models runs without a sandbox, and nobody said that this is meant",
    why="It may read and remove everything that its user may. Where the machine is itself the sandbox that is right, "
    "and has to be said.",
    recipe="two-nodes",
    fails={"sandbox.backend": "unsafe_subprocess"},
    passes={"sandbox.backend": "unsafe_subprocess", "sandbox.i_understand": True},
)
def sandboxed(case: Case) -> Iterator[Hit]:
    """The run's own check."""
    yield from _refused(case, "P905")


@RULES.rule(
    "P906",
    WARNING,
    "sandbox.fresh_grader",
    title="code is judged in the box that it ran in",
    why="Code of a model can leave processes, files and changed modules behind, and with them write its own grade: "
    "planted conftest.py and forged PASSED lines are known from public reports. A run of this build always grades "
    "in another box.",
    recipe="two-nodes",
    fails={"sandbox.fresh_grader": False},
    passes={"sandbox.fresh_grader": False, "sandbox.judged_code": False},
)
def graded_apart(case: Case) -> Iterator[Hit]:
    """A grader without a box of its own."""
    given = case.input.sandbox
    if backend_of(case) != "none" and given.judged_code and not given.fresh_grader:
        yield Hit(
            "judged code can write its own grade: it is graded in the box that it ran in",
            "set sandbox.fresh_grader = true",
            {"sandbox.fresh_grader": True},
        )


@RULES.rule(
    "P907",
    WARNING,
    "sandbox.boxes",
    title="many boxes for the machine's cores",
    why="Code in boxes that all compute at a time gets a fraction of a core each, and runs into its time limits: a "
    "slow machine then looks like a wrong answer.",
    recipe="two-nodes",
    fails={"hardware.host_cores": 8},
    passes={"hardware.host_cores": 64},
)
def cores_for_boxes(case: Case) -> Iterator[Hit]:
    """More than four boxes a core, where the cores are given."""
    cores, there = case.input.hardware.host_cores, boxes_of(case)
    if cores and here(case) and there > BOXES_PER_CORE * cores:
        most, demand = BOXES_PER_CORE * cores, box_demand(case)
        enough = most >= case.input.algo.group_size and (demand is None or demand.needed <= most)
        yield Hit(
            f"{there} boxes on {cores} cores: {there / cores:.3g} a core",
            f"set sandbox.boxes = {most}" if enough else 'spread boxes over more machines (sandbox.backend = "remote")',
            {"sandbox.boxes": most} if enough else {},
        )


def saving_seconds(case: Case) -> float:
    """Of a checkpoint, spread over the steps between two: to the node's own disk, or to the folder that all nodes see. A guess."""
    hardware = case.input.hardware
    speed = hardware.disk_bw if case.train_gpus <= hardware.gpus_per_node else hardware.shared_fs_bw
    return checkpoint_size(case) / speed / case.input.run.save_every


@RULES.rule(
    "P908",
    WARNING,
    "run.wall_clock_s",
    title="the run is not done within its wall clock",
    why="The job ends in the middle; what is kept is the last checkpoint. Times are guesses until they are measured.",
    recipe="qwen3-4b",
    fails={"run.steps": 1000, "run.wall_clock_s": 3600},
    passes={"run.steps": 10, "run.wall_clock_s": 3600},
)
def done_in_time(case: Case) -> Iterator[Hit]:
    """Steps times their time against what is given."""
    given, times = case.input.run, timed(case)
    if given.wall_clock_s is None or times is None:
        return
    step = times.period_s + saving_seconds(case)
    predicted = given.steps * step
    if predicted > given.wall_clock_s:
        steps = int(given.wall_clock_s // step)
        yield Hit(
            f"{given.steps} steps of {step:,.1f} s, saving counted in, take {predicted:,.0f} s; run.wall_clock_s is "
            f"{given.wall_clock_s:,.0f}",
            f"set run.steps = {steps}, or go on with --resume in another job" if steps else "ask for more time",
            {"run.steps": steps} if steps else {},
        )


@RULES.rule(
    "P909",
    WARNING,
    "schedule.max_in_flight",
    title="rollouts wait for tools far longer than for the engine",
    why="While a rollout waits for its tools the engine has one request less: it runs with a part of its batch for "
    "most of the step.",
    recipe="many-nodes",
    fails={"workload.tool_s": 600.0},
)
def tools_against_sampling(case: Case) -> Iterator[Hit]:
    """Seconds of tools of one rollout against those of its sampling."""
    sampling, tools = generation_seconds(case), case.work.turns * case.input.workload.tool_s
    if sampling is None or timed(case) is None or tools <= TOOLS_AGAINST_SAMPLING * sampling:
        return
    more = "raise schedule.max_in_flight" if case.input.schedule.max_in_flight else "play more groups at a time"
    if case.input.schedule.kind == "sync":
        more = 'set schedule.kind = "async", so that other rollouts fill the engine'
    yield Hit(f"the engine waits for tools: {tools:,.1f} s of a rollout beside {sampling:,.1f} s of sampling", more)


@RULES.rule(
    "P910",
    NOTE,
    "run.buffer_dir",
    title="what the buffer writes, and whether its folder is on a network file system",
    why="Each group is on disk before its turn counts: an fsync that waits for a network makes every reply wait. "
    "Bytes are ids and logprobs of each token, and with routing replay its experts (F17).",
    recipe="two-nodes",
    fails={"run.buffer_dir": "/data/buffer"},
)
def buffer_writes(case: Case) -> Iterator[Hit]:
    """Bytes of records per step, where the folder is given."""
    given = case.input.run
    if given.buffer_dir is None:
        return
    each = record_bytes_per_token(case.model, case.input.train.router_replay == "rollout")
    size = case.rollouts * case.work.row_tokens * each
    times = timed(case)
    speed = "" if times is None else f", {size / times.period_s / 1e6:,.2f} MB a second"
    message = f"the buffer writes {size / 1e6:,.1f} MB a step{speed} to {given.buffer_dir}"
    if given.buffer_on_network:
        fix = "put it on a disk of the service's host: every turn waits for an fsync"
        yield Hit(f"{message}, on a network file system", fix, severity=Severity.WARNING)
    else:
        yield Hit(message)
