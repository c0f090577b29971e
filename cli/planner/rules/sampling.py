"""P709 to P717, P719, P721: how training traffic is sampled, and what the loss makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

from palestra.cli.planner.case import Case
from palestra.cli.planner.flow import groups_to_submit
from palestra.cli.planner.rules.asking import fits_with, told
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.freshness import unclipped
from palestra.envs.findings import Hit
from palestra.server.schedulerules import least_bound
from palestra.trainer.config import BY_ROW

RULES = Rules()
BY_SEQUENCE = ("seq_tis", "seq_mis", "seq_mask", "geo_mask")
"""Corrections that look at a row's whole ratio."""
WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""What leaves the distribution as it is."""
MOST_OVERSAMPLE = 64.0


@RULES.rule(
    "P709",
    ERROR,
    "algo.top_p",
    title="training traffic from a cut or bent distribution",
    why="Engines give logprobs of the whole distribution, before top-p and the like (SGLang's sampler), and which tokens were kept is "
    "not on record: the ratio of the policies would be wrong for every token.",
    recipe="qwen3-4b",
    fails={"algo.top_p": 0.95},
)
def whole_distribution(case: Case) -> Iterator[Hit]:
    """Each field that bends it."""
    for name, whole in WHOLE.items():
        given = getattr(case.input.algo, name)
        if given != whole and not (name == "top_k" and given <= 0):
            yield Hit(
                f"algo.{name} = {given}: logprobs are those of the whole distribution, so the ratio would be wrong",
                f"train on algo.{name} = {whole}; evaluations may cut",
                {f"algo.{name}": whole},
                path=f"algo.{name}",
            )


@RULES.rule(
    "P710",
    ERROR,
    "algo.temperature",
    title="greedy training traffic, or a temperature that is no number",
    why="At temperature 0 every rollout of a group is the same, and logprobs are not those of what was sampled. Logits divided by infinity "
    "are all alike, by nan nothing at all.",
    recipe="qwen3-4b",
    fails={"algo.temperature": 0.0},
)
def greedy(case: Case) -> Iterator[Hit]:
    """0 or below, or no number that logits could be divided by."""
    if not 0 < case.input.algo.temperature < inf:
        yield Hit(
            f"algo.temperature = {case.input.algo.temperature:g}: training needs samples of a distribution",
            "1 is usual",
            {"algo.temperature": 1.0},
        )


@RULES.rule(
    "P711",
    NOTE,
    "algo.temperature",
    title="another temperature than 1",
    why="Logprobs of a token are those at the temperature at which it was drawn; our trainer divides its logits by the same number.",
    recipe="qwen3-4b",
    fails={"algo.temperature": 0.8},
    after=("P710",),
)
def tempered(case: Case) -> Iterator[Hit]:
    """Anything but 1."""
    if case.input.algo.temperature != 1:
        yield Hit(
            f"algo.temperature = {case.input.algo.temperature:g}: the trainer divides logits by the same number",
            "an evaluation at another temperature measures another policy",
        )


@RULES.rule(
    "P712",
    WARNING,
    "algo.oversample",
    title="groups without a difference in reward are dropped, and nothing makes up for them",
    why="With a share p of successes a group of G has one reward for all with probability p^G + (1-p)^G. In a synchronous run their "
    "replacements begin when the first groups have ended, so the trainer waits for several tails in a row.",
    recipe="qwen3-4b",
    fails={"workload.success_rate": 0.9},
    passes={"workload.success_rate": 0.9, "algo.drop_zero_variance": False},
)
def makes_up(case: Case) -> Iterator[Hit]:
    """F15, where the rate of success was given."""
    algo, wasted = case.input.algo, case.zero_variance
    if not algo.drop_zero_variance or not told(case, "success_rate"):
        return
    if wasted >= 1:
        yield Hit(
            f"with a success rate of {case.input.workload.success_rate:g} every group has one reward for all: none would be trained",
            "other tasks, or other weights to start from",
        )
        return
    needed = groups_to_submit(1, wasted)
    if algo.oversample >= needed:
        return
    sync, enough = case.input.schedule.kind == "sync", ceil(needed * 100) / 100
    fix, suggest = "the staleness bound says what is under way: raise schedule.max_staleness if the trainer waits", {}
    if sync:
        fix = f"algo.oversample = {enough:g}, with schedule.max_staleness of at least 1"
        suggest = {"algo.oversample": enough, "schedule.max_staleness": _bound_for_surplus(case)}
    yield Hit(
        f"{wasted:.1%} of the groups teach nothing: {groups_to_submit(algo.groups_per_step, wasted):.1f} have to be played for "
        f"{algo.groups_per_step}, and algo.oversample is {algo.oversample:g}",
        fix,
        suggest if enough <= MOST_OVERSAMPLE else {},
    )


def _bound_for_surplus(case: Case) -> int:
    least = least_bound(case.input.schedule, case.input.algo.updates_per_batch)
    return max(1, least, case.input.schedule.max_staleness or 0)


@RULES.rule(
    "P713",
    WARNING,
    "algo.max_response",
    title="more than one reply in a hundred is cut",
    why="A reply that a limit cut seldom gets its reward: that teaches to be short, not to be right.",
    recipe="two-nodes",
    fails={},
    passes={"workload.response_p99": 8000},
)
def cut_replies(case: Case) -> Iterator[Hit]:
    """The p99 reply, where it was given, against the limit."""
    algo, p99 = case.input.algo, case.work.response_p99
    if told(case, "response_p99") and p99 >= algo.max_response and not algo.mask_truncated:
        yield Hit(
            f"a long reply (p99) has {p99} tokens, algo.max_response is {algo.max_response}: more than 1% are cut, and being cut teaches "
            "shortness",
            "raise the limit, or leave what was cut out of the loss (algo.mask_truncated, algo.max_truncated)",
            {"algo.mask_truncated": True},
        )


@RULES.rule(
    "P714",
    WARNING,
    "algo.std_normalise",
    title="advantages divided by the standard deviation of very few rewards",
    why="Of two or three rewards it is mostly noise, and it makes the smallest difference as large as any.",
    recipe="qwen3-4b",
    fails={"algo.group_size": 2},
    passes={"algo.group_size": 2, "algo.std_normalise": False},
)
def noisy_deviation(case: Case) -> Iterator[Hit]:
    """G < 4."""
    algo = case.input.algo
    own = algo.estimator not in ("grpo", "gspo") or algo.advantage is not None
    if algo.std_normalise and not own and 2 <= algo.group_size < 4:
        yield Hit(
            f"algo.std_normalise with {algo.group_size} rollouts a group: the deviation is noise",
            "larger groups, or no normalising",
            {"algo.std_normalise": False},
        )


@RULES.rule(
    "P715",
    ERROR,
    "algo.kl_coef",
    title="a KL penalty without a reference policy",
    why="Somebody has to compute the reference's logprobs. Our trainer on a CPU keeps the reference in its own process, so nothing is to "
    "be said there.",
    recipe="qwen3-4b",
    fails={"algo.kl_coef": 0.001},
    passes={"algo.kl_coef": 0.001, "placement.reference": "shared"},
)
def reference_there(case: Case) -> Iterator[Hit]:
    """kl_coef on GPUs that hold no reference."""
    if case.input.algo.kl_coef > 0 and case.input.placement.reference == "none" and not case.on_cpu:
        yield Hit(
            f"algo.kl_coef = {case.input.algo.kl_coef:g}, but placement.reference is none",
            "keep it on the training GPUs (shared), or on GPUs of its own",
            {"placement.reference": "shared"} if fits_with(case, "placement", reference="shared") else {},
        )


@RULES.rule(
    "P716",
    ERROR,
    "algo.engine_seed",
    title="seeds of requests, which the engine does not honour",
    why="SGLang honours sampling_seed only with enable_deterministic_inference (its sampler's source); otherwise the same seed gives "
    "other tokens. The embedded engine always honours it.",
    recipe="qwen3-4b",
    fails={"algo.engine_seed": 1},
    passes={"algo.engine_seed": 1, "rollout.deterministic": True},
)
def seeds_honoured(case: Case) -> Iterator[Hit]:
    """A seed for an engine without deterministic kernels."""
    rollout = case.input.rollout
    if case.input.algo.engine_seed is not None and rollout.engine != "embedded" and not case.deterministic_engine:
        yield Hit(
            f"algo.engine_seed = {case.input.algo.engine_seed}, but {rollout.engine} honours seeds only in its deterministic mode",
            "rollout.deterministic = true, or no seed",
            {"algo.engine_seed": None},
        )


@RULES.rule(
    "P717",
    WARNING,
    "algo.updates_per_batch",
    title="several updates of one batch without a clipped ratio",
    why="From the second update on the policy is another than the one that sampled; nothing then bounds how far a step can go (PPO: "
    "Schulman et al. 2017, which clips for this reason).",
    recipe="qwen3-4b",
    fails={"algo.updates_per_batch": 2, "algo.clip": False},
    passes={"algo.updates_per_batch": 2},
)
def clipped_updates(case: Case) -> Iterator[Hit]:
    """u > 1 and no clip."""
    updates = case.input.algo.updates_per_batch
    if updates > 1 and unclipped(case):
        yield Hit(f"{updates} updates of a batch, and the ratio is not clipped", "clip it", {"algo.clip": True})


@RULES.rule(
    "P719",
    WARNING,
    "algo.estimator",
    title="ratios by token in a mixture of experts whose routing is not replayed",
    why="After an update a part of the experts that a token goes to are others (about a tenth in a 30B-A3B model: Zheng et al. 2025, "
    "GSPO), and these flips, not the policy, move a token's ratio. A ratio by sequence averages them; routing replay (R3) takes them "
    "away; tis and mask bound them. With R3 a ratio by sequence has nothing left to average, which is worth a note.",
    recipe="qwen3-30b",
    fails={"algo.updates_per_batch": 4},
    passes={"algo.updates_per_batch": 4, "algo.estimator": "gspo"},
)
def routing_flips(case: Case) -> Iterator[Hit]:
    """Ratios that are not 1 (several updates, or old tokens) of a model with experts."""
    algo = case.input.algo
    if not case.model.experts or (algo.updates_per_batch == 1 and case.staleness < 1):
        return
    by_sequence = algo.estimator == "gspo" or algo.loss in BY_ROW or case.ratio_correction in BY_SEQUENCE
    replayed = case.input.train.router_replay == "rollout"
    if by_sequence and replayed:
        yield Hit(
            "the ratio is taken by sequence although routing is replayed: both are there for routing flips",
            "ratios by token are as good with R3",
            severity=NOTE,
        )
    elif not by_sequence and not replayed and case.ratio_correction == "none":
        yield Hit(
            "ratios are taken by token, uncorrected, and routing is not replayed: routing flips dominate token ratios in a mixture of "
            "experts",
            "a ratio by sequence (seq_mask, gspo), routing replay, or tis",
            {"algo.ratio_correction": "seq_mask"},
        )


def _found_while_reading(case: Case) -> Iterator[Hit]:
    """The run's section says it: only that has the field."""
    yield from ()


RULES.rule(
    "P721",
    ERROR,
    "algo.ratio_clip",
    title="a bound of a correction that is not made",
    why="It would be without effect: algo.ratio_correction says whether there is such a correction. The run's own validator refuses it.",
    recipe="laptop",
    fails={"algo.ratio_correction": "none", "algo.ratio_clip": 3.0},
    passes={"algo.ratio_correction": "tis", "algo.ratio_clip": 3.0},
)(_found_while_reading)
