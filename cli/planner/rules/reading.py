"""P0xx: what a file says. Unknown fields and wrong types (P001, P002) and models that are not known (P003 to P005) are found while reading;
their rules are here so that `--explain` and the documentation have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.presets import DEVICES
from palestra.cli.planner.rules.collect import ERROR, NOTE, Rules
from palestra.envs.findings import Hit

RULES = Rules()


def _found_while_reading(case: Case) -> Iterator[Hit]:
    """A case exists only where reading found nothing of the kind."""
    yield from ()


RULES.rule(
    "P001",
    ERROR,
    "any",
    title="a field that nobody knows",
    why="A misspelt field would silently leave its default in force.",
    recipe="qwen3-4b",
    fails={"train.tensor_parallel": 2},
)(_found_while_reading)
RULES.rule(
    "P002",
    ERROR,
    "any",
    title="a value of another type, or out of range",
    why="The run would refuse it, or compute with nonsense.",
    recipe="qwen3-4b",
    fails={"train.tp": 0},
)(_found_while_reading)
RULES.rule(
    "P003",
    ERROR,
    "model.preset",
    title="a model that is not in presets.toml",
    why="Without dimensions nothing can be computed.",
    recipe="qwen3-4b",
    fails={"model.preset": "qwen3-5b"},
)(_found_while_reading)
RULES.rule(
    "P004",
    ERROR,
    "model.preset",
    title="a dimension that disagrees with the preset",
    why="One of the two is a mistake; which one cannot be told.",
    recipe="qwen3-4b",
    fails={"model.layers": 40},
    passes={"model.layers": 40, "model.override": True},
)(_found_while_reading)
RULES.rule(
    "P005",
    ERROR,
    "model",
    title="dimensions are missing, or a config.json is of an architecture that cannot be read",
    why="Formulas need every dimension; a guess would look like a result.",
    recipe="qwen3-4b",
    fails={"model.preset": None},
)(_found_while_reading)


@RULES.rule(
    "P006",
    NOTE,
    "hardware.gpu",
    title="the GPU's memory is from a table",
    why="What a process can have depends on driver and error correction; a plan near the limit needs the measured number.",
    recipe="qwen3-4b",
    fails={},
    passes={"hardware.gpu_mem_bytes": 84_900_000_000},
)
def table_memory(case: Case) -> Iterator[Hit]:
    """A preset's memory that was not replaced by a measured one."""
    given = case.input.hardware
    if not case.on_cpu and given.gpu_mem_bytes is None and given.gpu in DEVICES:
        gib = DEVICES[given.gpu].memory_bytes / 2**30
        yield Hit(
            f"{given.gpu}: using {gib:.1f} GiB from a table",
            "measure what a process can have there and give it as hardware.gpu_mem_bytes",
        )


@RULES.rule(
    "P007",
    ERROR,
    "schedule.deadline_s",
    title="a wait without an end",
    why="Every wait has a deadline: a process that is gone would be waited for without end.",
    recipe="qwen3-4b",
    fails={"schedule.deadline_s": math.inf},
)
def endless_wait(case: Case) -> Iterator[Hit]:
    """A deadline of zero, below, or infinity."""
    given = case.input.schedule.deadline_s
    if not math.isfinite(given) or given <= 0:
        yield Hit(
            f"schedule.deadline_s is {given:g}: every wait needs a deadline",
            "give seconds",
            {"schedule.deadline_s": 900.0},
        )


@RULES.rule(
    "P008",
    ERROR,
    "hardware.gpu",
    title="a GPU that is not in presets.toml",
    why="Its memory and speed are what most of the plan is about.",
    recipe="qwen3-4b",
    fails={"hardware.gpu": "h300"},
    passes={
        "hardware.gpu": "h300",
        "hardware.gpu_mem_bytes": 10**11,
        "hardware.gpu_flops": 1e15,
        "hardware.gpu_hbm": 4e12,
    },
)
def unknown_device(case: Case) -> Iterator[Hit]:
    """Neither a preset nor its numbers."""
    if case.device is None:
        yield Hit(
            f"no GPU {case.input.hardware.gpu!r}; known: {', '.join(DEVICES)}",
            "give hardware.gpu_mem_bytes, gpu_flops and gpu_hbm",
        )
