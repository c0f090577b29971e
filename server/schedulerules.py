"""What `[schedule]` is held to, by a run's own validators and by `palestra plan`: pure functions that give findings.

Bounds count train steps (batches), as `schedule.max_staleness` does; publishes count optimizer steps, as `schedule.publish_every` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from palestra.envs.findings import Finding, RefusedError, Severity


class Schedule(Protocol):
    """The fields that rules are about: of a run's section, and of the planner's."""

    @property
    def kind(self) -> str:
        """sync, one_step_off or async."""

    @property
    def max_staleness(self) -> int | None:
        """Train steps; None: derived."""

    @property
    def publish_every(self) -> int | None:
        """Optimizer steps; None: those of a batch."""

    @property
    def partial(self) -> str:
        """off or resume."""

    @property
    def partial_old_tokens(self) -> str:
        """train or mask."""

    @property
    def generation_budget_s(self) -> float | None:
        """Seconds; None: no such budget."""

    @property
    def generation_budget_tokens(self) -> int | None:
        """Sampled tokens; None: no such budget."""

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer share their devices."""


def refuse(findings: Iterable[Finding]) -> None:
    """Ends a section's validation at the first error.

    Raises:
        RefusedError: there is one.
    """
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise RefusedError(finding)


def publish_steps(publish_every: int | None, updates_per_batch: int) -> int:
    """Train steps between publishes: one is made at the end of a train step at the earliest."""
    return -(-(publish_every or 1) // updates_per_batch)


def least_bound(schedule: Schedule, updates_per_batch: int) -> int:
    """Train steps that pass without a publish: so old is what a batch is trained on at the end of them, whatever the bound."""
    return publish_steps(schedule.publish_every, updates_per_batch) - 1


def bound(schedule: Schedule, updates_per_batch: int) -> int:
    """The bound in force, unchecked."""
    least = least_bound(schedule, updates_per_batch)
    if schedule.kind == "one_step_off":
        return least + 1
    return least if schedule.max_staleness is None else schedule.max_staleness


def bound_findings(schedule: Schedule) -> Iterator[Finding]:
    """P501: a bound that is missing, or given where it follows from the kind."""
    given = schedule.max_staleness
    if schedule.kind == "async" and given is None:
        yield _error(
            "P501",
            "schedule.max_staleness",
            "schedule.max_staleness must be given when schedule.kind is async",
            "1 to 4 train steps are usual",
            {"schedule.max_staleness": max(1, (schedule.publish_every or 1) - 1)},
        )
    if schedule.kind == "one_step_off" and given is not None:
        yield _error(
            "P501",
            "schedule.max_staleness",
            "schedule.max_staleness follows from schedule.kind = 'one_step_off' and schedule.publish_every",
            "remove it, or use async",
            {"schedule.max_staleness": None},
        )


def least_findings(schedule: Schedule, updates_per_batch: int) -> Iterator[Finding]:
    """P502: a bound that the steps between two publishes alone exceed."""
    least, held = least_bound(schedule, updates_per_batch), bound(schedule, updates_per_batch)
    if held < least:
        yield _error(
            "P502",
            "schedule.max_staleness",
            f"schedule.max_staleness ({held}) is less than the {least} train steps that pass without a publish "
            f"(schedule.publish_every = {schedule.publish_every})",
            "raise it, or publish more often",
            {"schedule.max_staleness": least},
        )


def budget_findings(schedule: Schedule) -> Iterator[Finding]:
    """P518, P519: partial rollout needs a budget, and a bound for what it carries over; a budget needs partial rollout."""
    budgets = [
        name for name in ("generation_budget_s", "generation_budget_tokens") if getattr(schedule, name) is not None
    ]
    if schedule.partial == "resume" and not budgets:
        yield _error(
            "P518",
            "schedule.partial",
            'schedule.partial = "resume" needs schedule.generation_budget_s or generation_budget_tokens: when to take what is ready',
            "the tokens of half a batch are a good start",
        )
    if schedule.partial == "resume" and schedule.kind == "sync" and not schedule.max_staleness:
        yield _needs_bound(schedule, 'schedule.partial = "resume"', "what is carried over is a train step older")
    if schedule.partial == "off" and (budgets or schedule.partial_old_tokens == "mask"):
        name = (budgets or ["partial_old_tokens"])[0]
        yield _error(
            "P518",
            "schedule.partial",
            f'schedule.{name} needs schedule.partial = "resume"',
            "set it, or remove the field",
        )


def sharing_findings(schedule: Schedule) -> Iterator[Finding]:
    """P520: devices that are shared."""
    if schedule.colocated and schedule.kind != "sync":
        yield _error(
            "P520",
            "schedule.colocated",
            'schedule.colocated needs schedule.kind = "sync": devices that are shared cannot do both at once',
            suggest={"schedule.colocated": False},
        )


def carrying_findings(schedule: Schedule, oversample: float) -> Iterator[Finding]:
    """P501, P519, P521: a bound above what a synchronous run needs, and something that is carried over, ask for each other."""
    sync, given = schedule.kind == "sync", schedule.max_staleness
    if oversample > 1 and not sync:
        yield _error(
            "P521",
            "algo.oversample",
            f"algo.oversample: with schedule.kind = {schedule.kind!r} the staleness bound says what is under way",
            "leave it at 1, and raise schedule.max_staleness for more",
            {"algo.oversample": 1.0},
        )
    if sync and oversample > 1 and not given:
        yield _needs_bound(schedule, "algo.oversample", "the surplus is trained a step later")
    if sync and given is not None and oversample == 1 and schedule.partial == "off":
        yield _error(
            "P501",
            "schedule.max_staleness",
            "schedule.max_staleness: this synchronous run carries nothing over (no schedule.partial, no algo.oversample)",
            "remove it, or use async",
            {"schedule.max_staleness": None},
        )


def group_findings(min_group: int, group_size: int) -> Iterator[Finding]:
    """P720: groups that could never be whole enough."""
    if min_group > group_size:
        yield _error(
            "P720",
            "algo.min_group",
            f"algo.min_group ({min_group}) is more than algo.group_size ({group_size}): no group would be trained",
            suggest={"algo.min_group": group_size},
        )


def _needs_bound(schedule: Schedule, who: str, because: str) -> Finding:
    return _error(
        "P519",
        "schedule.max_staleness",
        f"{who} needs schedule.max_staleness of at least 1: {because}",
        suggest={"schedule.max_staleness": max(1, (schedule.publish_every or 1) - 1)},
    )


def _error(code: str, path: str, message: str, fix: str = "", suggest: dict[str, object] | None = None) -> Finding:
    return Finding(code, Severity.ERROR, path, message, fix, suggest or {})
