"""P416 to P419, P429, P435: states of linear attention, types of caches and weights, the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from palestra.cli.engines import rules
from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import weight_dtype
from palestra.cli.planner.fitting import tried
from palestra.cli.planner.flow import turn_prefix
from palestra.cli.planner.memory import balanced_ratio, cached_bytes
from palestra.cli.planner.model import kv_token_bytes
from palestra.cli.planner.rules.collect import ERROR, NOTE, WARNING, Rules
from palestra.cli.planner.rules.engine_words import GIB, hits, said, sizes
from palestra.envs.findings import Hit

RULES = Rules()


def best_ratio(case: Case) -> float | None:
    """Memory for states against memory for keys and values at which both run out together (F6); None: one of them is not there."""
    engine = case.decoding
    if engine is None or not engine.slot_bytes or not engine.kv_bytes:
        return None
    return balanced_ratio(engine.slot_bytes, engine.kv_bytes, max(1.0, case.work.row_tokens), engine.slots_per_request)


@RULES.rule(
    "P416",
    ERROR,
    "rollout.state_ratio",
    title="the pool of states lets fewer requests run than are there",
    why="Each request of a model with linear attention takes whole slots of the pool (F6, as SGLang's boot log prints it): those beyond "
    "their number wait, however much room there is for keys and values.",
    recipe="qwen3-next",
    fails={"rollout.state_ratio": 0.01},
    passes={"rollout.state_ratio": 0.5},
    after=("P401", "P407"),
)
def few_states(case: Case) -> Iterator[Hit]:
    """max_running of F6 is less than the rollouts of one engine."""
    engine, wanted = case.decoding, ceil(case.running)
    if engine is None or engine.max_running is None or engine.max_running >= wanted:
        return
    ratio = best_ratio(case)
    choices: list[dict[str, float | int | None]] = []
    if ratio is not None:
        choices.append({"rollout.state_ratio": round(ratio, 4), "rollout.state_slots_pin": None})
    if engine.max_running:
        choices.append({"rollout.max_running": engine.max_running})
    suggest = next((each for each in choices if _runs(tried(case, each))), {})
    asked = case.input.rollout
    sized = (
        f"state_slots_pin = {asked.state_slots_pin}"
        if asked.state_slots_pin
        else f"state_ratio = {asked.state_ratio:g}"
    )
    yield Hit(
        f"rollout.{sized} lets {engine.max_running} requests of an engine run, and {wanted} are there",
        f"take rollout.state_ratio = {ratio:.2g}, at which both pools run out together" if ratio else "fewer at a time",
        suggest,
    )


def _runs(case: Case) -> bool:
    engine = case.decoding
    return engine is None or engine.max_running is None or engine.max_running >= ceil(case.running)


@RULES.rule(
    "P417",
    WARNING,
    "rollout.state_ratio",
    title="one of an engine's two pools runs out long before the other",
    why="What states take, keys and values do not have, and the other way round (F6): at the balanced ratio both hold as many rollouts.",
    recipe="qwen3-next",
    fails={},
    passes={"rollout.state_ratio": 0.5},
    after=("P416",),
)
def unbalanced_pools(case: Case) -> Iterator[Hit]:
    """The ratio is further from the balanced one than half of it."""
    given, best = case.input.rollout, best_ratio(case)
    if best is None or given.state_slots_pin or not sizes(case) or not said(case, "response_tokens"):
        return
    if abs(given.state_ratio - best) > 0.5 * best:
        short = "keys and values" if given.state_ratio > best else "states"
        yield Hit(
            f"rollout.state_ratio is {given.state_ratio:g}, and rollouts of {case.work.row_tokens:,.0f} tokens need {best:.3g}: {short} "
            "run out first",
            f"take {best:.3g}",
            {"rollout.state_ratio": round(best, 4)},
        )


@RULES.rule(
    "P418",
    NOTE,
    "rollout.kv_dtype",
    title="a smaller type for keys and values of a model that keeps few",
    why="States of linear attention keep their own type: only the attention layers' part of the cache halves (F2, F3).",
    recipe="qwen3-next",
    fails={"rollout.kv_dtype": "fp8_e4m3"},
)
def small_part(case: Case) -> Iterator[Hit]:
    """float8 keys and values in a hybrid."""
    engine = case.decoding
    if engine is None or not engine.slot_bytes or not case.input.rollout.kv_dtype.startswith("fp8"):
        return
    tokens, slots = case.held.shared, case.held.batch * engine.slots_per_request
    both = [
        cached_bytes(tokens, kv_token_bytes(case.model, engine.attention_tp, bits), slots, engine.slot_bytes) / GIB
        for bits in (16, 8)
    ]
    yield Hit(
        f"caches of {case.held.batch} rollouts go from {both[0]:.2f} to {both[1]:.2f} GiB on each GPU, not to half",
        "rollout.ssm_dtype = bf16 makes states smaller",
    )


@RULES.rule(
    "P419",
    WARNING,
    "rollout.kv_dtype",
    title="engines compute in another precision than training, and nothing corrects for it",
    why="Tokens come from another distribution than the one that is trained, and the ratio of the loss takes the difference for a change "
    "of the policy. Truncated or masked importance weights bound what that does.",
    recipe="qwen3-4b",
    fails={"rollout.kv_dtype": "fp8_e4m3"},
    passes={"rollout.kv_dtype": "fp8_e4m3", "algo.ratio_correction": "tis"},
)
def mixed_precision(case: Case) -> Iterator[Hit]:
    """float8 or int4 in engines, not in training, ratio_correction none."""
    if case.ratio_correction != "none" or case.input.rollout.engine != "sglang":
        return
    dtype, cache = weight_dtype(case), case.input.rollout.kv_dtype
    found = {
        "rollout.weight_dtype": dtype == "int4" or (dtype == "fp8" and case.train_dtype != "fp8"),
        "rollout.kv_dtype": cache.startswith("fp8"),
    }
    if differing := [path for path, differs in found.items() if differs]:
        kept = {"rollout.weight_dtype": f"weights in {dtype}", "rollout.kv_dtype": f"keys and values in {cache}"}
        yield Hit(
            f"engines have {' and '.join(kept[path] for path in differing)}, training computes in {case.train_dtype}, and "
            "algo.ratio_correction is none",
            "correct the ratio, or expect drift",
            {"algo.ratio_correction": "tis"},
            differing[0],
        )


@RULES.rule(
    "P429",
    NOTE,
    "rollout.prefix_cache",
    title="prompts that are equal at their beginnings are computed again and again",
    why="Rollouts of one task share their prompt, and each turn the whole conversation before it (F14).",
    recipe="qwen3-4b",
    fails={"rollout.prefix_cache": False},
)
def no_prefixes(case: Case) -> Iterator[Hit]:
    """prefix_cache off with groups or turns."""
    work, group = case.work, case.input.algo.group_size
    if case.input.rollout.prefix_cache or (group == 1 and work.turns <= 1):
        return
    turns = turn_prefix(work.prompt, work.response, work.observation, work.turns)
    computed = work.prompt + group * (turns.new_tokens - work.prompt)
    reused = 1 - computed / max(1.0, group * turns.prompt_tokens)
    yield Hit(
        f"{reused:.0%} of prompt tokens would be found in the cache (groups of {group}, {work.turns:g} turns)",
        "switch it on",
        {"rollout.prefix_cache": True},
    )


@RULES.rule(
    "P435",
    ERROR,
    "rollout.state_slots_pin",
    title="the pool of states is sized twice",
    why="SGLang takes the number of slots and leaves the ratio without effect.",
    recipe="qwen3-next",
    fails={"rollout.state_ratio": 0.5, "rollout.state_slots_pin": 400},
    passes={"rollout.state_slots_pin": 400},
)
def sized_twice(case: Case) -> Iterator[Hit]:
    """state_ratio and state_slots_pin were both given."""
    rollout = case.input.rollout
    both = "state_ratio" in rollout.model_fields_set, rollout.state_slots_pin is not None
    for hit in hits(rules.sized_twice(*both)):
        yield Hit(hit.message, hit.fix, {"rollout.state_slots_pin": None})
