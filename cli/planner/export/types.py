"""What exports are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from palestra.cli.engines.types import EngineCommand, Topology
from palestra.cli.planner.case import Case
from palestra.cli.planner.types import PlanReport


class ExportError(ValueError):
    """A plan that cannot be written out as asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a plan, as processes."""

    topology: Topology
    commands: tuple[EngineCommand, ...]
    """One per engine and node, in order; words hold variables (`words.var`)."""
    router: EngineCommand | None
    """None: one engine, which needs none."""
    first_node: int
    """Of the plan's nodes, the first that has engines."""
    nodes: int
    """How many have some."""
    notes: tuple[str, ...] = ()
    """What the command lines do not say although the plan does."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Where engines answer."""
        return tuple(command.url for command in self.commands if command.url)


@dataclass(frozen=True, slots=True)
class Export:
    """What every file is made from."""

    report: PlanReport
    case: Case
    head: tuple[str, ...]
    """Comment lines at the top of each file."""
    fleet: Fleet | None
    """None: there are no SGLang engines for us to start."""
    no_fleet: str
    """Why there is none."""

    @property
    def apart(self) -> bool:
        """Whether engines are processes beside the training, reached by their URLs."""
        return self.fleet is not None and not self.case.colocated

    @property
    def gpus(self) -> int:
        """GPUs that the plan uses."""
        case = self.case
        if case.on_cpu:
            return 0
        if case.colocated:
            return max(case.train_gpus, case.rollout_gpus) + case.reference_gpus
        return case.train_gpus + case.rollout_gpus + case.reference_gpus

    @property
    def nodes(self) -> int:
        """Machines that the plan uses; those with training first, unless engines share them."""
        filled = max(1, -(-self.gpus // self.case.input.hardware.gpus_per_node))
        if self.fleet is None or not self.apart:
            return filled
        return max(filled, self.fleet.first_node + self.fleet.nodes)

    @property
    def node_gpus(self) -> int:
        """GPUs of a machine that the plan uses."""
        return min(self.gpus, self.case.input.hardware.gpus_per_node)


Files = Mapping[str, str]
"""Path -> text."""
