"""P601 to P604, P609 to P613, P615: how new weights reach the engines, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import weight_dtype
from palestra.cli.planner.rules.asking import timed
from palestra.cli.planner.rules.collect import ERROR, WARNING, Rules
from palestra.cli.planner.workload import transport
from palestra.envs.findings import Hit
from palestra.server.listen import is_loopback

RULES = Rules()
MIB = 2**20
SMALL_BUCKET = 64 * MIB
"""Below it the many small tensors of experts need a call each."""
BUCKET_SHARE = 0.5
"""Of what the fullest GPU has left, for one bucket."""
PUBLISH_SHARE = 0.2
"""Of a synchronous step, for its publish."""
USUAL = {"colocated": "ipc", "separate": "nccl"}
"""Transports that need nothing else, by placement."""


def elsewhere(case: Case) -> bool:
    """Whether there are engines on other hosts than the trainer's."""
    if case.mode == "external":
        urls = case.external_urls
        return not urls or not all(is_loopback(urlsplit(url).hostname or "") for url in urls)
    return not case.on_cpu and case.input.hardware.nodes > 1


def shared_dir(case: Case) -> str | None:
    """Where folders and deltas go that other hosts read."""
    return case.input.weights.shared_dir or case.input.hardware.shared_dir


def usual(case: Case) -> dict[str, str]:
    """A transport that works in this placement; empty where that depends on more."""
    return {"weights.transport": USUAL[case.mode]} if case.mode in USUAL else {}


@RULES.rule(
    "P601",
    ERROR,
    "weights.transport",
    title="memory handles between GPUs that are not shared",
    why="A CUDA IPC handle opens the memory of a GPU that both processes have; over two pools there is none. Without GPUs trainer and "
    "engine share the host's memory, so `tensor` works there.",
    recipe="two-nodes",
    fails={"weights.transport": "ipc"},
)
def handles(case: Case) -> Iterator[Hit]:
    """ipc outside of one machine's shared devices."""
    if transport(case) == "ipc" and case.mode in ("separate", "external"):
        yield Hit(
            f"weights.transport = {case.input.weights.transport}: handles work only on the same GPU, and placement.mode is {case.mode}",
            "use nccl or disk",
            usual(case),
        )


@RULES.rule(
    "P602",
    ERROR,
    "weights.transport",
    title="an NCCL group of trainer and engine on the same GPU",
    why="NCCL refuses two ranks on one GPU (`Duplicate GPU detected`; OpenRLHF issue 726).",
    recipe="qwen3-4b",
    fails={"weights.transport": "nccl"},
)
def duplicate_gpu(case: Case) -> Iterator[Hit]:
    """nccl where GPUs are shared."""
    if case.colocated and transport(case) == "nccl":
        yield Hit("weights.transport = nccl: trainer and engine would be two ranks on one GPU", "use ipc", usual(case))


@RULES.rule(
    "P603",
    ERROR,
    "weights.transport",
    title="an NCCL group with engines that it cannot reach",
    why="A group needs GPUs of one vendor and addresses that both sides reach; engines behind a load balancer or in another network "
    "never join, and the trainer waits until its deadline.",
    recipe="two-nodes",
    fails={
        "placement.mode": "external",
        "placement.rollout_gpus": None,
        "placement.external_urls": ["http://engine-0:30000"],
        "rollout.pd": None,
        "weights.routable": False,
    },
    passes={
        "placement.mode": "external",
        "placement.rollout_gpus": None,
        "placement.external_urls": ["http://engine-0:30000"],
        "rollout.pd": None,
    },
)
def unreachable_group(case: Case) -> Iterator[Hit]:
    """nccl to engines elsewhere that cannot join."""
    if case.mode == "external" and transport(case) == "nccl" and not case.input.weights.routable:
        yield Hit(
            "weights.transport = nccl: the engines that run elsewhere cannot join the trainer's group",
            "use disk, with a folder that they see",
            {"weights.transport": "disk"} if shared_dir(case) else {},
        )


@RULES.rule(
    "P604",
    ERROR,
    "weights.shared_dir",
    title="weights by disk, without a folder that the engines' hosts see",
    why="Engines read the folder under the name that the trainer wrote it: one in the run's own folder exists on the trainer's host "
    "alone.",
    recipe="two-nodes",
    fails={"weights.transport": "disk", "hardware.shared_dir": None},
    passes={"weights.transport": "disk"},
)
def no_shared_folder(case: Case) -> Iterator[Hit]:
    """disk to other hosts."""
    if transport(case) == "disk" and elsewhere(case) and shared_dir(case) is None:
        yield Hit(
            "weights travel by disk, engines run on other hosts, and there is no folder that both see",
            "give weights.shared_dir (or hardware.shared_dir)",
        )


@RULES.rule(
    "P609",
    ERROR,
    "weights.transport",
    title="a transport for hosts without GPUs, or none, where GPUs train",
    why="gloo would copy every tensor through the host's memory and TCP; with none the engines keep the weights that they began with, "
    "and every batch is older than the last.",
    recipe="two-nodes",
    fails={"weights.transport": "gloo"},
)
def for_hosts(case: Case) -> Iterator[Hit]:
    """gloo or none on GPUs."""
    given = case.input.weights.transport
    if not case.on_cpu and given in ("gloo", "none"):
        yield Hit(f'weights.transport = "{given}" where GPUs train', "use ipc, nccl or disk", usual(case))


@RULES.rule(
    "P610",
    WARNING,
    "weights",
    title="publishing takes a good part of a step",
    why="Engines stand still meanwhile. Bandwidths are guesses until workload.measured.publish_s is given.",
    recipe="two-nodes",
    fails={"hardware.nic_bw": 2e9},
    after=("P609",),
)
def dear_publish(case: Case) -> Iterator[Hit]:
    """F9 against F10."""
    times = timed(case)
    if times is None or (case.on_cpu and case.input.workload.measured.publish_s is None):
        return
    share = times.publish_s / times.step.sync
    if share > PUBLISH_SHARE:
        yield Hit(
            f"a publish takes {times.publish_s:.1f} s of a step of {times.step.sync:.1f} s: {share:.0%}",
            "publish less often (schedule.publish_every), by nccl, as deltas, or in larger buckets",
        )


@RULES.rule(
    "P611",
    WARNING,
    "rollout.weight_dtype",
    title="a quantised engine that was not started from a quantised folder",
    why="Publishes are quantised as the engine's own folder says in its quantization_config. Without one they travel as "
    "they are trained, and what an engine makes of that is its own affair.",
    recipe="two-nodes",
    fails={"rollout.weight_dtype": "fp8"},
    passes={"rollout.weight_dtype": "fp8", "rollout.quantised_checkpoint": True},
)
def unquantised(case: Case) -> Iterator[Hit]:
    """fp8 or int4 engines of a trainer in wider numbers."""
    dtype, given = weight_dtype(case), case.input
    if dtype not in ("fp8", "int4") or case.train_dtype == dtype:
        return
    if not given.rollout.quantised_checkpoint and given.weights.engine_model is None:
        yield Hit(
            f"engines compute in {dtype}, training in {case.train_dtype}, and no folder says how to quantise: updates would be sent "
            "unquantised",
            "make one with `palestra convert` and give it as weights.engine_model",
        )


@RULES.rule(
    "P612",
    WARNING,
    "weights.bucket_bytes",
    title="buckets that are too large for the fullest GPU, or too small for many experts",
    why="Two buckets are held beside the weights. Small ones cost a call each, and experts are many small tensors.",
    recipe="two-nodes",
    fails={"weights.bucket_bytes": 16 * MIB},
)
def bucket_size(case: Case) -> Iterator[Hit]:
    """Against what is left on the fullest GPU, and against a floor for mixtures of experts."""
    size = case.input.weights.bucket_bytes
    if case.on_cpu or transport(case) not in ("ipc", "nccl"):
        return
    if case.model.experts and size < SMALL_BUCKET:
        yield Hit(
            f"buckets of {size / MIB:.0f} MiB: experts are many small tensors, and each bucket is a call",
            f"{SMALL_BUCKET // MIB} MiB or more",
            {"weights.bucket_bytes": 8 * SMALL_BUCKET},
        )
    memory = case.device.memory_bytes if case.device else 0
    left = memory - case.worst_train_bytes
    if case.state and 0 < left < size / BUCKET_SHARE:
        yield Hit(
            f"buckets of {size / MIB:.0f} MiB, while the fullest GPU has {left / MIB:.0f} MiB left",
            "smaller buckets, or less memory in training",
        )


@RULES.rule(
    "P613",
    ERROR,
    "weights.verify",
    title="a folder that nobody compares",
    why="A file system that hosts share may show a file before all of it is there, and what is there would be read as weights. On one "
    "machine our folders are written aside and renamed, so it is a warning there.",
    recipe="two-nodes",
    fails={"weights.transport": "disk", "weights.verify": "none"},
    passes={"weights.transport": "disk"},
)
def unverified(case: Case) -> Iterator[Hit]:
    """disk with verify = none."""
    if transport(case) == "disk" and case.input.weights.verify == "none":
        yield Hit(
            'weights.verify = "none": a partial or damaged file would be read as weights',
            "verify by checksum",
            {"weights.verify": "checksum"},
            severity=ERROR if elsewhere(case) else WARNING,
        )


@RULES.rule(
    "P615",
    ERROR,
    "rollout.engine",
    title="weights in pieces, outside of an update that was begun",
    why="SGLang 0.5.23 takes tensors and broadcasts only between begin_weight_update and end_weight_update (tried on its CPU "
    "build). Our client always brackets; an updater of your own has to.",
    recipe="two-nodes",
    fails={"weights.bracketed": False},
)
def bracketed(case: Case) -> Iterator[Hit]:
    """Pieces sent to SGLang by somebody who does not bracket."""
    pieces = transport(case) in ("ipc", "nccl", "gloo")
    if case.input.rollout.engine == "sglang" and pieces and not case.input.weights.bracketed:
        yield Hit(
            "weights would be sent in pieces outside of begin_weight_update and end_weight_update, which SGLang refuses",
            "bracket them, or publish by disk",
            {"weights.bracketed": True},
        )
