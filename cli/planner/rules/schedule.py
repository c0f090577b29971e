"""P501 to P506, P514, P515, P517 to P521: how far generation may run ahead, and whether that pays. Bounds count train steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import ceil

from palestra.cli.planner.case import Case
from palestra.cli.planner.flow import in_flight
from palestra.cli.planner.rules.asking import hits, longest_s, timed, told, waits_s
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.envs.findings import Hit
from palestra.server.schedulerules import (
    bound_findings,
    budget_findings,
    carrying_findings,
    least_findings,
    publish_steps,
    sharing_findings,
)

RULES = Rules()
GAIN = 1.05
"""Speed-up below which running ahead does not pay for old tokens."""
LONG_TAIL = 4.0
"""A long reply (p99) against the mean one, above which the tail decides how long a batch takes."""
ASYNC = {"schedule.kind": "async", "schedule.max_staleness": 1}


@RULES.rule(
    "P501",
    ERROR,
    "schedule.max_staleness",
    title="a staleness bound that is missing, or given where it follows from the schedule",
    why="The plan of groups admits by this bound. Ours counts train steps (batches), not optimizer steps: several updates of one batch "
    "do not age it. A synchronous run that carries nothing over, and one_step_off, have a bound that follows from "
    "schedule.publish_every, so a number there would promise what does not happen. The run's own validator refuses the same.",
    recipe="laptop",
    fails={"schedule.kind": "async"},
    passes=ASYNC,
)
def bound_given(case: Case) -> Iterator[Hit]:
    """What the section's validators say; an asynchronous bound of 0 is only a warning."""
    schedule = case.input.schedule
    yield from hits(chain(bound_findings(schedule), carrying_findings(schedule, case.input.algo.oversample)), "P501")
    if schedule.kind == "async" and schedule.max_staleness == 0:
        yield Hit(
            "schedule.max_staleness = 0: nothing is generated ahead, so this asynchronous schedule waits like a synchronous one",
            "raise it, or use sync",
            {"schedule.max_staleness": 1},
            severity=WARNING,
        )


@RULES.rule(
    "P502",
    ERROR,
    "schedule.max_staleness",
    title="a bound smaller than the train steps between two publishes",
    why="Without a publish the engines' weights grow a step older with each step that trains: at the end of the interval every batch "
    "would be beyond the bound, and the run would wait for itself. Derived from our own admission (server/plan), which counts train "
    "steps: ceil(publish_every / updates_per_batch) of them pass between publishes.",
    recipe="laptop",
    fails={**ASYNC, "schedule.publish_every": 4},
    passes={**ASYNC, "schedule.publish_every": 4, "schedule.max_staleness": 3},
    after=("P501",),
)
def bound_large_enough(case: Case) -> Iterator[Hit]:
    """What the run's own check says."""
    yield from hits(least_findings(case.input.schedule, case.input.algo.updates_per_batch), "P502")


@RULES.rule(
    "P503",
    WARNING,
    "schedule.max_staleness",
    title="the staleness bound lets fewer rollouts be under way than keep the engines busy",
    why="By Little's law a batch per period with rollouts of this length needs so many in flight; admission allows (1 + bound) batches "
    "(the rule is AReaL's, arXiv 2505.24298). Beyond that, engines wait. Times are guesses where nothing was measured.",
    recipe="two-nodes",
    fails={"workload.tool_s": 120.0},
)
def starved(case: Case) -> Iterator[Hit]:
    """F11, at the period that busy engines would have: waits of one rollout overlap with others' sampling."""
    times, schedule = timed(case), case.input.schedule
    if times is None or schedule.kind == "sync" or case.staleness < 0:
        return
    sampling = case.work.sampled / times.decode_tok_s
    busy = max(case.rollouts * sampling / case.sampling_engines, times.train_s) + times.publish_s
    duration = sampling * min(times.running, max(1.0, case.running)) + waits_s(case)
    flight = in_flight(rollouts=case.rollouts, period_s=busy, duration_s=duration, staleness=case.staleness)
    if flight.demand > flight.cap:
        enough = ceil(flight.demand / case.rollouts) - 1
        yield Hit(
            f"{flight.demand:.0f} rollouts under way would keep the engines busy, the bound allows {flight.cap}: {flight.idle:.0%} idle",
            f"schedule.max_staleness = {enough}, or shorter waits",
            {"schedule.max_staleness": enough} if schedule.kind == "async" else {},
        )


@RULES.rule(
    "P504",
    WARNING,
    "schedule.max_staleness",
    title="long rollouts that go on over steps outlive the staleness bound",
    why="A rollout that takes D seconds in steps of T has tokens of 1 + D / T versions. A claim drops a group by its oldest token "
    "(schedule.too_old), so long replies are dropped again and again and the policy learns from short ones. Measured on our "
    "schedules: see the table of docs/schedules.md. D is taken beside a full batch, which the engine samples at one speed together.",
    recipe="two-nodes",
    fails={},
    passes={"schedule.partial_old_tokens": "mask"},
)
def outlived(case: Case) -> Iterator[Hit]:
    """Versions of a long rollout against the bound, where its old tokens are to be trained."""
    times, schedule = timed(case), case.input.schedule
    if times is None or schedule.partial != "resume" or schedule.partial_old_tokens != "train":
        return
    if schedule.too_old == "mask" or case.staleness < 0 or not told(case, "response_p99"):
        return
    long = longest_s(case, times)
    versions = 1 + long / times.period_s
    if versions > case.staleness + 1:
        yield Hit(
            f"long rollouts (p99) take {long:.0f} s in steps of {times.period_s:.0f} s and span {versions:.1f} versions; "
            f"{case.staleness + 1} are within the bound, so they are dropped",
            "mask their old tokens, raise the bound, or make rollouts shorter",
            {"schedule.partial_old_tokens": "mask"},
        )


@RULES.rule(
    "P505",
    ERROR,
    "schedule.max_in_flight",
    title="fewer rollouts may be in flight than a group has",
    why="Groups are opened whole: with room for less than one, none is ever opened and the trainer waits until its deadline (our "
    "admission: server/plan/admission.py).",
    recipe="laptop",
    fails={"schedule.max_in_flight": 4},
    passes={"schedule.max_in_flight": 8},
)
def no_group_fits(case: Case) -> Iterator[Hit]:
    """The bound against the size of a group."""
    most, size = case.input.schedule.max_in_flight, case.input.algo.group_size
    if most is not None and most < size:
        yield Hit(
            f"schedule.max_in_flight = {most}, but a group has {size} rollouts: none could be opened",
            f"allow {size} at least",
            {"schedule.max_in_flight": size},
        )


@RULES.rule(
    "P506",
    WARNING,
    "schedule.max_in_flight",
    title="more rollouts may be in flight than the engines have room for",
    why="What does not fit waits in the engines' queues, or is retracted and its prompt computed again (SGLang's scheduler). Room is the "
    "cache's tokens by what a rollout holds on average, or the states' slots.",
    recipe="two-nodes",
    fails={"schedule.max_in_flight": 100_000},
    passes={"schedule.max_in_flight": 512},
)
def overfull(case: Case) -> Iterator[Hit]:
    """The bound against F6 and F14, of all engines that sample."""
    most, engine, size = case.input.schedule.max_in_flight, case.decoding, case.input.algo.group_size
    if most is None or engine is None or case.fit_running is None:
        return
    room = case.fit_running * engine.count
    if most > room:
        yield Hit(
            f"{most} rollouts may be in flight, the engines have room for {room}",
            "the others queue or are retracted: allow fewer, or give the engines more memory",
            {"schedule.max_in_flight": room // size * size} if room >= size else {},
        )


@RULES.rule(
    "P514",
    WARNING,
    "schedule.kind",
    title="running ahead gains next to nothing here",
    why="At best a step takes as long as the longer of generating and training. Where one of them is short beside the other, tokens grow "
    "old for nothing. Times are guesses where nothing was measured.",
    recipe="two-nodes",
    fails={"workload.measured.train_tok_s": 100.0},
)
def no_gain(case: Case) -> Iterator[Hit]:
    """F10."""
    times = timed(case)
    if times is not None and case.input.schedule.kind == "async" and times.step.speedup < GAIN:
        yield Hit(
            f"generating takes {times.rollout_s:.0f} s, training {times.train_s:.0f} s: overlapping them is {times.step.speedup:.2f} "
            "times as fast at best",
            "use sync, or give the slower side more GPUs",
        )


@RULES.rule(
    "P515",
    NOTE,
    "schedule.kind",
    title="a synchronous step waits for a long tail",
    why="The batch is whole when its longest rollout is: the others' places in the engines stay empty meanwhile.",
    recipe="qwen3-4b",
    fails={"workload.response_tokens": 1500},
)
def tail_decides(case: Case) -> Iterator[Hit]:
    """The p99 reply against the mean one, as far as both were given."""
    work = case.work
    if case.input.schedule.kind != "sync" or not told(case, "response_tokens", "response_p99"):
        return
    if work.response_p99 > LONG_TAIL * work.response:
        yield Hit(
            f"a long reply has {work.response_p99} tokens, the mean one {work.response}: the slowest rollout sets the step, and the "
            f"engines' places are {work.sampled / work.tail:.0%} used on average",
            "partial rollout, algo.oversample, or schedule.kind = async",
        )


@RULES.rule(
    "P517",
    WARNING,
    "schedule.publish_every",
    title="a publish interval that ends within a batch's updates",
    why="A publish is made at the end of a train step at the earliest: one in the middle of a batch's updates changes nothing before the "
    "next rollout. Our loop rounds the interval up to whole steps, so the number reads otherwise than it works.",
    recipe="laptop",
    fails={"algo.updates_per_batch": 2, "schedule.publish_every": 3},
    passes={"algo.updates_per_batch": 2, "schedule.publish_every": 4},
)
def rounded_interval(case: Case) -> Iterator[Hit]:
    """The interval against the updates of a batch; 1, the run's default, reads as every step."""
    given, updates = case.input.schedule.publish_every, case.input.algo.updates_per_batch
    if given is not None and given > 1 and given % updates:
        whole = publish_steps(given, updates) * updates
        yield Hit(
            f"schedule.publish_every = {given} ends within the {updates} updates of a batch: a publish is made every {whole}",
            f"write {whole}",
            {"schedule.publish_every": whole},
        )


@RULES.rule(
    "P518",
    ERROR,
    "schedule.partial",
    title="partial rollout without a budget, or a budget without partial rollout",
    why="The budget is what ends a step; without it nothing is ever carried over, and without partial rollout nobody looks at it.",
    recipe="laptop",
    fails={"schedule.partial": "resume", "schedule.max_staleness": 2},
    passes={"schedule.partial": "resume", "schedule.max_staleness": 2, "schedule.generation_budget_tokens": 1000},
)
def budget_given(case: Case) -> Iterator[Hit]:
    """What the section's validators say."""
    yield from hits(budget_findings(case.input.schedule), "P518")


@RULES.rule(
    "P519",
    ERROR,
    "schedule.max_staleness",
    title="a synchronous run that carries something over, without a bound for its age",
    why="What a partial step leaves, or the surplus of over-sampling, is trained a step later: with a bound of 0 it would all be "
    "dropped.",
    recipe="laptop",
    fails={"algo.oversample": 1.5},
    passes={"algo.oversample": 1.5, "schedule.max_staleness": 1},
)
def carried_over(case: Case) -> Iterator[Hit]:
    """What the section's validators say."""
    schedule = case.input.schedule
    # One hit: both may say it, of the same field.
    yield from list(
        hits(chain(budget_findings(schedule), carrying_findings(schedule, case.input.algo.oversample)), "P519")
    )[:1]


@RULES.rule(
    "P520",
    ERROR,
    "schedule.colocated",
    title="devices are shared, but generation is to overlap with training",
    why="Where engines are frozen while a step trains, nothing is generated meanwhile.",
    recipe="laptop",
    fails={**ASYNC, "schedule.colocated": True},
    passes={"schedule.colocated": True},
)
def shared_devices(case: Case) -> Iterator[Hit]:
    """What the section's validators say."""
    yield from hits(sharing_findings(case.input.schedule), "P520")


@RULES.rule(
    "P521",
    ERROR,
    "algo.oversample",
    title="over-sampling where the staleness bound already says what is under way",
    why="An asynchronous run has the surplus anyway: groups beyond the batch are trained in later steps, within the bound.",
    recipe="two-nodes",
    fails={"algo.oversample": 1.5},
)
def surplus_anyway(case: Case) -> Iterator[Hit]:
    """What the run's validators say."""
    yield from hits(carrying_findings(case.input.schedule, case.input.algo.oversample), "P521")
