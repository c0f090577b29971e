"""Boxes that a run's episodes keep busy, by Little's law (F16). Pure arithmetic on a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.cli.planner.flow import boxes_needed
from palestra.envs.sandboxes import USUAL_BOXES

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case


@dataclass(frozen=True, slots=True)
class BackendCost:
    """What a box of one kind costs. Measured on two cores under other load."""

    create_s: float
    destroy_s: float
    per_s: float
    """Boxes made and destroyed per second, by all cores together."""


MEASURED_CORES = 2
COSTS = {"bubblewrap": BackendCost(0.045, 0.005, 22.0), "docker": BackendCost(0.208, 0.064, 3.5)}
"""Kinds of boxes that were measured; the others are taken for bubblewrap's, which `auto` tries first."""


@dataclass(frozen=True, slots=True)
class BoxDemand:
    """What episodes ask of a sandbox, on average (F16)."""

    rate: float
    """Boxes made per second: an episode may have one of its own and one for its grader."""
    create_s: float
    busy_s: float
    """That one of them is in use."""
    destroy_s: float

    @property
    def needed(self) -> float:
        """Boxes in use at a time."""
        return boxes_needed(self.rate, self.create_s, self.busy_s, self.destroy_s)


def cost_of(backend: str) -> BackendCost:
    """Of a backend's boxes."""
    return COSTS.get(backend, COSTS["bubblewrap"])


def backend_of(case: Case) -> str:
    """The kind of boxes; none: code runs nowhere. A run that has the table and names no kind takes the first that works."""
    given = case.input.sandbox
    return given.backend or ("auto" if given.model_fields_set else "none")


def boxes_of(case: Case) -> int:
    """Boxes that the run may have at a time."""
    given = case.input.sandbox.boxes
    return USUAL_BOXES if given is None else given


def generation_seconds(case: Case) -> float | None:
    """Seconds that the engine samples for one rollout, beside the others of its batch; None: unknown."""
    times = case.times
    return None if times is None else case.work.sampled * times.running / times.decode_tok_s


def box_demand(case: Case) -> BoxDemand | None:
    """F16 of a case; None: no sandbox, or nothing is known of times.

    A box of an episode is taken at its first tool call and kept to its end, through what the model says in between. Code that is only
    judged needs the grader's box alone.
    """
    given, work = case.input.sandbox, case.work
    sampling = generation_seconds(case)
    backend = backend_of(case)
    if backend == "none" or case.times is None or sampling is None:
        return None
    cost, tools = cost_of(backend), work.turns * case.input.workload.tool_s
    plays = tools > 0 or given.busy_s is not None
    grades = given.fresh_grader and given.judged_code
    busy = given.busy_s
    if busy is None:
        held = sampling * (work.turns - 1) / work.turns if plays and given.per_episode else 0.0
        busy = tools + held
    each = max(1, plays + grades)
    return BoxDemand(
        rate=case.rollouts * case.input.algo.oversample / case.times.period_s * each,
        create_s=cost.create_s if given.create_s is None else given.create_s,
        busy_s=(busy + (case.input.workload.judge_s if grades else 0.0)) / each,
        destroy_s=cost.destroy_s if given.destroy_s is None else given.destroy_s,
    )
