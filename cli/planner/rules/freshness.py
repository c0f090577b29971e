"""P507 to P513, P516: what is repeatable, and what becomes of tokens and caches of older weights."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.asking import longest_s, timed, told
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.envs.findings import Hit

RULES = Rules()
REPEATABLE = "NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8"
"""What the environment of deterministic training has."""
WHOLE = {
    "schedule.partial": None,
    "schedule.partial_old_tokens": None,
    "schedule.generation_budget_tokens": None,
}
"""Of a recipe with partial rollout: without it."""


def unclipped(case: Case) -> bool:
    """Whether the ratio of policies is taken as it is."""
    algo = case.input.algo
    return not algo.clip


@RULES.rule(
    "P507",
    ERROR,
    "train.deterministic",
    title="deterministic training of whatever arrives first",
    why="Where generation overlaps with training, the order of arrival decides which groups are in which batch; AReaL's options warn of "
    "the same. Bitwise equal kernels do not help.",
    recipe="laptop",
    fails={"train.deterministic": True, "schedule.kind": "async", "schedule.max_staleness": 1},
    passes={"train.deterministic": True},
)
def arrival_order(case: Case) -> Iterator[Hit]:
    """A schedule that overlaps."""
    kind = case.input.schedule.kind
    if case.input.train.deterministic and kind != "sync":
        yield Hit(
            f"train.deterministic with schedule.kind = {kind}: arrival order decides the batch, which is not reproducible",
            "use sync, or do without train.deterministic",
            {"train.deterministic": False},
        )


@RULES.rule(
    "P508",
    WARNING,
    "train.deterministic",
    title="deterministic training with steps that end at a budget",
    why="A budget in seconds ends at another token each time; which rollouts have ended at a budget of tokens still depends on who came "
    "first.",
    recipe="laptop",
    fails={
        "train.deterministic": True,
        "schedule.partial": "resume",
        "schedule.max_staleness": 2,
        "schedule.generation_budget_s": 5.0,
    },
    passes={"train.deterministic": True},
)
def budget_order(case: Case) -> Iterator[Hit]:
    """A wall clock, or a race for the budget."""
    schedule = case.input.schedule
    if not case.input.train.deterministic:
        return
    if schedule.generation_budget_s is not None:
        yield Hit(
            "schedule.generation_budget_s: a wall-clock budget is not reproducible",
            "use schedule.generation_budget_tokens, or whole batches (schedule.partial = off)",
        )
    elif schedule.partial == "resume":
        yield Hit(
            "schedule.partial = resume: which rollouts are ready at the budget depends on who came first",
            "train whole batches (schedule.partial = off)",
        )


@RULES.rule(
    "P509",
    NOTE,
    "train.deterministic",
    title="what deterministic training asks of its environment",
    why="Collectives and matrix products choose their algorithms by speed otherwise (NCCL's, cuBLAS' and Transformer Engine's "
    "documentation). Repeatable does not mean aligned: trainer and engine still differ, and what they differ by has to be measured.",
    recipe="laptop",
    fails={"train.deterministic": True},
)
def repeatable(case: Case) -> Iterator[Hit]:
    """The variables."""
    if case.input.train.deterministic:
        yield Hit(
            f"repeatable is not aligned with the engines; the trainer's environment needs {REPEATABLE}",
            "export them for the trainer alone: engines choose another NCCL_ALGO in their own processes",
        )


@RULES.rule(
    "P510",
    WARNING,
    "algo.ratio_correction",
    title="old tokens, neither corrected nor clipped",
    why="Unclipped importance sampling diverged at a staleness of 3 in an A/B run of tinker-cookbook (pull request 822); clipped it did "
    "not.",
    recipe="two-nodes",
    fails={"algo.ratio_correction": "none", "algo.clip": False},
    passes={"algo.clip": False},
)
def unbounded_ratio(case: Case) -> Iterator[Hit]:
    """Staleness without a bound on the ratio."""
    if case.staleness >= 1 and case.ratio_correction == "none" and unclipped(case):
        yield Hit(
            f"tokens may be {case.staleness} train steps old, and their ratio is neither corrected nor clipped",
            "correct it (tis), or clip",
            {"algo.ratio_correction": "tis"},
        )


@RULES.rule(
    "P511",
    ERROR,
    "schedule.partial",
    title="rollouts are to go on in a later step, on engines that give nothing back",
    why="Partial rollout goes on from the tokens that an aborted request had; an OpenAI-compatible endpoint gives no ids, so all of it "
    "would be sampled again. The embedded engine and SGLang give them back.",
    recipe="two-nodes",
    fails={"rollout.partial_ids": False},
)
def nothing_to_resume(case: Case) -> Iterator[Hit]:
    """Engines without partial completions."""
    rollout = case.input.rollout
    if case.input.schedule.partial == "resume" and (rollout.engine == "openai" or not rollout.partial_ids):
        yield Hit(
            'schedule.partial = "resume", but an aborted request gives back no ids here: nothing could be gone on from',
            "schedule.partial = off, or an engine that answers an abort with what it has",
        )


@RULES.rule(
    "P512",
    WARNING,
    "schedule.update_mode",
    title="requests keep their cache over a weight update",
    why="With in_place what runs keeps keys and values of the old weights, so tokens after the update are sampled by neither policy. "
    "Our publishes salt later requests, so that nothing new is computed on them.",
    recipe="two-nodes",
    fails={"schedule.update_mode": "in_place"},
)
def old_cache(case: Case) -> Iterator[Hit]:
    """in_place."""
    if case.input.schedule.update_mode == "in_place":
        yield Hit(
            "schedule.update_mode = in_place: tokens after an update read keys and values of the old weights",
            "use retract, or accept it: versions are on record by token",
            {"schedule.update_mode": "retract"},
        )


@RULES.rule(
    "P513",
    ERROR,
    "schedule.update_mode",
    title="every publish aborts rollouts that are longer than a step, and nothing of them is left",
    why="What an engine does not give back is begun anew, and aborted again by the next publish: long rollouts never end. Engines that "
    "answer an abort with what they have are gone on with by our service, whatever schedule.partial says.",
    recipe="two-nodes",
    fails={**WHOLE, "schedule.update_mode": "abort", "rollout.partial_ids": False},
    passes={**WHOLE, "schedule.update_mode": "abort"},
    after=("P511",),
)
def begun_anew(case: Case) -> Iterator[Hit]:
    """Long rollouts against the time between publishes."""
    times, schedule = timed(case), case.input.schedule
    if times is None or schedule.update_mode != "abort" or schedule.kind == "sync" or not told(case, "response_p99"):
        return
    lost = case.input.rollout.engine == "openai" or not case.input.rollout.partial_ids
    if lost and (long := longest_s(case, times)) > times.period_s:
        yield Hit(
            f"long rollouts (p99) take {long:.0f} s, and a publish aborts them every {times.period_s:.0f} s: all of their work is thrown "
            "away",
            "use retract or finish",
            {"schedule.update_mode": "retract"},
        )


@RULES.rule(
    "P516",
    ERROR,
    "rollout.prefix_cache",
    title="a prefix cache that a publish leaves as it is",
    why="SGLang's update_weights_from_disk without flush_cache goes on using keys and values of the old weights, silently (tried "
    "on 0.5.23). Our publishes flush, or salt the keys of later requests.",
    recipe="two-nodes",
    fails={"rollout.flush_on_publish": False},
)
def stale_cache(case: Case) -> Iterator[Hit]:
    """Neither flushed nor salted."""
    rollout = case.input.rollout
    if rollout.prefix_cache and not rollout.flush_on_publish:
        yield Hit(
            "caches are neither flushed nor salted when weights change: keys and values of the old weights would be reused",
            "flush on publish",
            {"rollout.flush_on_publish": True},
        )
