"""P701 to P708, P718, P720: how rollouts become batches, and whether the longest of them fits."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.engines.rules import MOST
from palestra.cli.planner.case import Case
from palestra.cli.planner.rules.asking import fits_with, hits, told
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.mending import mended
from palestra.envs.findings import Hit
from palestra.server.schedulerules import group_findings

RULES = Rules()
BASELINE = ("grpo", "dr_grpo", "rloo", "gspo", "reinforce_pp_baseline")
"""Estimators whose baseline is the group."""


@RULES.rule(
    "P701",
    ERROR,
    "algo.global_batch",
    title="a batch that its updates do not divide",
    why="megatron-core takes one size of optimizer step, and what is left over would be trained in none. Our trainer on a CPU spreads "
    "the rollouts over steps of nearly the same size, so it is a warning there: rollouts of the larger steps weigh less.",
    recipe="qwen3-4b",
    fails={"algo.global_batch": 100},
)
def batch_divides(case: Case) -> Iterator[Hit]:
    """R % u, and what was given against R / u."""
    algo = case.input.algo
    updates, rollouts = algo.updates_per_batch, case.rollouts
    made = f"{algo.groups_per_step} groups of {algo.group_size} are {rollouts} rollouts"
    if rollouts % updates:
        yield Hit(
            f"{made}, which {updates} updates do not divide",
            "choose updates_per_batch as a divisor of the rollouts",
            path="algo.updates_per_batch",
            severity=WARNING if case.on_cpu else ERROR,
        )
    elif algo.global_batch is not None and algo.global_batch != rollouts // updates:
        whole = rollouts // updates
        yield Hit(
            f"algo.global_batch = {algo.global_batch}, but {made}, over {updates} updates {whole} each",
            f"write {whole}, or leave it out",
            {"algo.global_batch": whole},
        )


@RULES.rule(
    "P702",
    ERROR,
    "algo.group_size",
    title="groups of one rollout, of which the baseline is the group",
    why="The advantage is a reward less the mean (or the others' mean) of its group: of one rollout it is always zero, or undefined.",
    recipe="laptop",
    fails={"algo.group_size": 1},
    passes={"algo.group_size": 1, "algo.estimator": "reinforce"},
)
def group_baseline(case: Case) -> Iterator[Hit]:
    """G < 2 with an estimator that compares siblings."""
    algo = case.input.algo
    if algo.group_size < 2 and algo.estimator in BASELINE and algo.advantage is None:
        yield Hit(
            f"algo.group_size = {algo.group_size}: {algo.estimator} compares the rollouts of a group, and there is nothing to compare "
            "with",
            "4 to 16 rollouts are usual",
        )


@RULES.rule(
    "P703",
    ERROR,
    "train.micro_batch",
    title="micro-batches of a fixed size that do not divide an optimizer step",
    why="megatron-core refuses a global batch that is no multiple of micro-batch times data parallel size.",
    recipe="qwen3-4b",
    fails={"train.dynamic_batch": False, "train.micro_batch": 3},
    passes={"train.dynamic_batch": False, "train.micro_batch": 4},
    after=("P201", "P701"),
)
def micro_divides(case: Case) -> Iterator[Hit]:
    """Fixed shapes only."""
    train, dp = case.input.train, case.layout.dp
    if train.dynamic_batch or train.micro_batch is None:
        return
    if case.global_batch % (train.micro_batch * dp):
        most = min(case.global_batch, MOST)
        each = [size for size in range(1, most + 1) if case.global_batch % (size * dp) == 0]
        close = min(each, key=lambda size: (abs(size - (train.micro_batch or 1)), size), default=None)
        yield Hit(
            f"an optimizer step has {case.global_batch} rollouts, no multiple of micro-batches of {train.micro_batch} on {dp} data "
            "parallel ranks",
            "choose one that divides, or train.dynamic_batch = true",
            {} if close is None else {"train.micro_batch": close},
        )


@RULES.rule(
    "P704",
    WARNING,
    "algo.global_batch",
    title="fewer rollouts in a step than data parallel ranks",
    why="Ranks without a row still have to join every collective: they compute an empty micro-batch.",
    recipe="qwen3-4b",
    fails={"algo.groups_per_step": 1, "algo.group_size": 2},
)
def empty_ranks(case: Case) -> Iterator[Hit]:
    """Packed batches smaller than DP."""
    if case.input.train.dynamic_batch and case.global_batch < case.layout.dp:
        yield Hit(
            f"{case.global_batch} rollouts of an optimizer step on {case.layout.dp} data parallel ranks: some get an empty micro-batch",
            "more rollouts a step, or less data parallelism",
        )


@RULES.rule(
    "P705",
    WARNING,
    "algo.groups_per_step",
    title="updates that cut a group in two",
    why="Siblings share a prompt and a baseline: cut apart, the prompt is computed twice and half of the comparison is made under other "
    "weights.",
    recipe="qwen3-4b",
    fails={"algo.updates_per_batch": 64},
    passes={"algo.updates_per_batch": 2},
    after=("P701",),
)
def whole_groups(case: Case) -> Iterator[Hit]:
    """Q % u."""
    algo = case.input.algo
    if algo.updates_per_batch > 1 and algo.groups_per_step % algo.updates_per_batch:
        yield Hit(
            f"{algo.groups_per_step} groups over {algo.updates_per_batch} updates: a group would be cut between two of them",
            "choose updates_per_batch as a divisor of groups_per_step",
        )


@RULES.rule(
    "P706",
    ERROR,
    "algo.max_context",
    title="the longest rollout does not fit the window",
    why="An episode that reaches the end of the window is cut there: its last turn is missing, and it seldom gets its reward. A "
    "reply as long as the window leaves no prompt at all: `palestra train` refuses that.",
    recipe="qwen3-4b",
    fails={"algo.max_context": 8192},
    passes={"algo.max_context": 9216},
)
def window(case: Case) -> Iterator[Hit]:
    """Prompt and all turns, against algo.max_context and the engine's window; where prompts have no bound, one reply alone."""
    algo, needed = case.input.algo, case.needed_context
    most = min(case.max_context, case.input.rollout.context_len)
    if needed is None and algo.max_response >= most:
        hit = Hit(
            f"algo.max_response ({algo.max_response}) leaves no room for a prompt in {most} tokens",
            "shorter replies, or a larger window",
        )
        yield mended(case, window, hit, [{"algo.max_response": most // 2}] if most > 1 else [])
    if needed is None or needed <= most:
        return
    turns = f"{algo.max_turns} x ({algo.max_response} + {algo.max_observation})"
    row = case.input.train.max_tokens_per_gpu
    room = needed <= case.input.rollout.context_len and (row is None or needed <= row * case.layout.cp)
    yield Hit(
        f"max_prompt + max_turns x (max_response + max_observation) = {algo.max_prompt} + {turns} = {needed} tokens, the window has "
        f"{most}",
        "fewer or shorter turns, or a larger window",
        {"algo.max_context": needed} if room else {},
    )


@RULES.rule(
    "P707",
    ERROR,
    "train.max_tokens_per_gpu",
    title="the longest row does not fit a packed micro-batch",
    why="A row is not cut: one that is longer than a micro-batch over all context parallel ranks cannot be trained. Our trainer on a CPU "
    "makes it a micro-batch of its own.",
    recipe="qwen3-4b",
    fails={"train.max_tokens_per_gpu": 4096},
    after=("P706",),
)
def longest_row(case: Case) -> Iterator[Hit]:
    """Rows as long as the window, or as prompt and turns may be, against the micro-batch of a GPU."""
    given = case.input.train.max_tokens_per_gpu
    if case.on_cpu or given is None or case.longest_row <= given * case.layout.cp:
        return
    enough = ceil(case.longest_row / case.layout.cp)
    yield Hit(
        f"the longest row has {case.longest_row} tokens, a packed micro-batch {given} x {case.layout.cp} (CP)",
        f"train.max_tokens_per_gpu = {enough}, more context parallelism, or a shorter window",
        {"train.max_tokens_per_gpu": enough} if fits_with(case, "train", max_tokens_per_gpu=enough) else {},
    )


@RULES.rule(
    "P708",
    WARNING,
    "train.max_tokens_per_gpu",
    title="micro-batches that hold hardly more than one row",
    why="Rows are packed whole, so a micro-batch of less than two mean rows is filled badly: on average half a row of room is left over.",
    recipe="qwen3-4b",
    fails={"train.max_tokens_per_gpu": 9216, "workload.response_tokens": 5000},
    after=("P706", "P707"),
)
def packing(case: Case) -> Iterator[Hit]:
    """Twice the mean row against the micro-batch, where rows' lengths were given."""
    room, row = case.max_tokens_per_gpu * case.layout.cp, case.work.row_tokens
    if case.on_cpu or not told(case, "response_tokens") or room >= 2 * row:
        return
    filled = row * max(1, int(room // row)) / room
    yield Hit(
        f"a mean row has {row:.0f} tokens, a packed micro-batch {room}: it is {min(1.0, filled):.0%} full",
        f"train.max_tokens_per_gpu = {ceil(2 * row / case.layout.cp)} or more",
    )


@RULES.rule(
    "P718",
    NOTE,
    "algo",
    title="the arithmetic of a batch",
    why="Learning rate and schedule are about optimizer steps: it is worth knowing what one of them sees.",
    recipe="qwen3-4b",
    fails={},
    passes={"workload.prompt_tokens": None, "workload.response_tokens": None, "workload.response_p99": None},
)
def arithmetic(case: Case) -> Iterator[Hit]:
    """Printed for every plan that has a workload."""
    if not case.input.workload.model_fields_set:
        return
    algo, dp = case.input.algo, case.layout.dp
    tokens = case.global_batch * case.work.row_tokens
    yield Hit(
        f"a batch is {algo.groups_per_step} x {algo.group_size} = {case.rollouts} rollouts; an optimizer step "
        f"({algo.updates_per_batch} a batch) sees {case.global_batch} of them, {tokens:,.0f} tokens in about {case.microbatches} "
        f"micro-batches of {case.max_tokens_per_gpu * case.layout.cp:,} on each of {dp} data parallel ranks"
    )


@RULES.rule(
    "P720",
    ERROR,
    "algo.min_group",
    title="more rollouts are asked of a group than it has",
    why="A group with fewer than algo.min_group rewards is dropped: here that is every group. The run's own validator refuses the same.",
    recipe="laptop",
    fails={"algo.min_group": 9},
)
def enough_rollouts(case: Case) -> Iterator[Hit]:
    """What the run's validators say."""
    yield from hits(group_findings(case.input.algo.min_group, case.input.algo.group_size), "P720")
