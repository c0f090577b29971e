"""Rules of a plan about placement and engines: their arithmetic against brute force, and their suggestions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from palestra.cli.engines import rules as sizes_of
from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import data_of
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.rules import engine_caches, engine_kinds, placement, schedule
from palestra.cli.planner.rules.engine_words import engine_count, routed, sound
from palestra.cli.planner.types import Example, Severity
from tests.enginecases import OWN, case, codes, found, only


def test_every_code_of_the_two_families_is_there() -> None:
    named = {f"P3{number:02}" for number in range(1, 13)} | {f"P4{number:02}" for number in range(1, 36)}
    assert {rule.code for rule in OWN} == named


# Arithmetic


def test_shares_of_ranks_are_whole_exactly_where_nothing_is_found() -> None:
    for total, ways in product(range(1, 65), range(1, 17)):
        assert bool(list(sizes_of.heads_spread(total, ways))) == (total / ways != total // ways)
        assert bool(list(sizes_of.expert_ranks(total, ways))) == (ways not in sizes_of.divisors(total))
        assert bool(list(sizes_of.data_ranks(total, ways))) == (ways not in sizes_of.divisors(total))
        assert bool(list(sizes_of.experts_spread(total, ways))) == (total % ways > 0)
    assert list(sizes_of.experts_spread(0, 2))
    assert not list(sizes_of.experts_spread(0, 1))


def test_blocks_are_whole_exactly_where_a_share_is_so_many_of_them() -> None:
    for width, ways in product(range(64, 2049, 64), range(1, 17)):
        whole = any(width == ways * sizes_of.BLOCK * count for count in range(1, 20))
        assert bool(list(sizes_of.blocks({"moe_ffn": (width, ways)}))) == (not whole)
    assert not list(sizes_of.blocks({"ffn": (0, 3)}))


@pytest.mark.parametrize(
    ("recipe", "experts_share"), [("qwen3-30b", "96"), ("qwen3-235b", "192"), ("qwen3-next", "64")]
)
def test_float8_is_refused_where_public_reports_say_so(recipe: str, experts_share: str) -> None:
    fp8 = {"rollout.weight_dtype": "fp8", "rollout.gpus_per_engine": 8, "rollout.dp": 1, "rollout.dp_attention": False}
    (refused,) = only(case(recipe, {**fp8, "rollout.ep": 1}), "P406")
    assert f"/ 8 = {experts_share} is no multiple of 128" in refused.message
    moe_only = not MODELS[str(data_of(Example(recipe))["model"]["preset"])].shared_ffn
    assert (only(case(recipe, {**fp8, "rollout.ep": 8}), "P406") == []) == moe_only


def test_the_nearest_candidate_is_the_larger_of_two() -> None:
    assert [sizes_of.nearest(3, [1, 2, 4, 8]), sizes_of.nearest(5, [4, 8]), sizes_of.nearest(2, [])] == [4, 4, None]


def test_engines_across_nodes_are_those_whose_gpus_are() -> None:
    for train, each, count in product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 8, 16), (1, 2, 3)):
        fields = {
            "placement.mode": "separate",
            "placement.train_gpus": train,
            "placement.rollout_gpus": each * count,
            "rollout.gpus_per_engine": each,
            "hardware.nodes": 8,
        }
        spans = [range(train + index * each, train + (index + 1) * each) for index in range(count)]
        least = -(-each // 8)
        across = sum(len({gpu // 8 for gpu in span}) > least for span in spans)
        said = [finding.message for finding in only(case("qwen3-4b", fields), "P308")]
        assert said == ([f"{across} of {count} engines would lie across nodes of 8 GPUs"] if across else []), fields


@pytest.mark.parametrize(
    ("mode", "train", "rollout", "need"), [("colocated", 8, 4, 8), ("separate", 8, 4, 12), ("external", 8, None, 8)]
)
def test_gpus_are_counted_once_where_they_are_shared(mode: str, train: int, rollout: int | None, need: int) -> None:
    fields = {"placement.mode": mode, "placement.train_gpus": train, "placement.rollout_gpus": rollout}
    assert placement.gpus_needed(case("qwen3-4b", fields)) == need
    apart = {"placement.reference": "separate_gpus", "placement.reference_gpus": 2}
    assert placement.gpus_needed(case("qwen3-4b", {**fields, **apart})) == need + 2


@pytest.mark.parametrize("mode", ["colocated", "separate", "external"])
@pytest.mark.parametrize("given", [0, 2])
def test_gpus_of_the_reference_are_taken_from_those_that_are_there(mode: str, given: int) -> None:
    """At least one where they are apart; nobody has to say what is left for training and rollout."""
    fields = {
        "placement.mode": mode,
        "placement.train_gpus": None,
        "placement.rollout_gpus": None,
        "placement.reference": "separate_gpus",
        "placement.reference_gpus": given,
    }
    of = case("qwen3-4b", fields)
    assert of.reference_gpus == max(1, given)
    assert placement.gpus_needed(of) == of.gpus_there == 8
    assert only(of, "P301") == []


def test_gpus_of_a_reference_that_is_not_apart_are_not_taken() -> None:
    idle = {"placement.mode": "separate", "placement.train_gpus": 4, "placement.reference_gpus": 3}
    of = case("qwen3-4b", idle)
    assert (of.reference_gpus, of.rollout_gpus, placement.gpus_needed(of)) == (0, 4, 8)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "separate"),
        ({"schedule.colocated": True}, "colocated"),
        ({"rollout.urls": ["http://a"]}, "external"),
        ({"placement": {"external_urls": ["http://a"]}}, "external"),
        ({"placement": {"mode": "separate"}, "schedule.colocated": True}, "separate"),
        ({"hardware.gpu": "cpu", "rollout.urls": ["http://a"]}, "cpu"),
    ],
)
def test_a_placement_that_is_left_out_follows_from_what_is_said(fields: dict[str, Any], mode: str) -> None:
    assert case("qwen3-4b", {"placement": None, **fields}).mode == mode


@pytest.mark.parametrize("mode", ["colocated", "separate", "external"])
def test_a_placement_of_gpus_that_are_not_there_is_refused(mode: str) -> None:
    urls = {"placement.external_urls": ["http://a"]} if mode == "external" else {}
    given = {"placement.mode": mode, **urls}
    (refused,) = only(case("laptop", given), "P311")
    assert (refused.path, refused.suggest) == ("placement.mode", {"placement.mode": None})
    assert only(case("laptop", {**given, **refused.suggest}), "P311") == []
    assert "P311" not in codes(case("qwen3-4b", {"placement.mode": "cpu", "placement.train_gpus": None}))


def test_engines_of_others_are_counted_once_whichever_table_names_them() -> None:
    names = ["http://a", "http://b", "http://c"]
    external = {"placement.mode": "external", "rollout.pd": None, "workload.tool_s": 1_000.0}
    here = case("two-nodes", {**external, "rollout.urls": names})
    there = case("two-nodes", {**external, "placement.external_urls": names})
    both = case("two-nodes", {**external, "rollout.urls": names[:2], "placement.external_urls": names[1:]})
    one = case("two-nodes", {**external, "rollout.urls": names[:1]})
    assert one.times is not None
    for of in (here, there, both):
        assert of.times is not None
        assert (of.sampling_engines, engine_count(of)) == (3, 3)
        assert of.running == pytest.approx(one.running / 3)
        assert of.times.rollout_s < one.times.rollout_s
        assert starved(of) == starved(here) != starved(one)
        assert starved(of)


def starved(of: Case) -> list[str]:
    """What P503 says."""
    return [finding.message for rule in schedule.RULES if rule.code == "P503" for finding in rule.findings(of)]


def test_gpus_that_no_engine_of_the_pool_has_are_idle() -> None:
    fields = {
        "placement.mode": "separate",
        "placement.train_gpus": 4,
        "placement.rollout_gpus": 4,
        "rollout.engines": 1,
    }
    (idle,) = only(case("qwen3-4b", fields), "P302")
    assert (idle.path, idle.message) == ("rollout.engines", "2 of the rollout's 4 GPUs are idle: its engines take 2")


def test_the_balanced_ratio_is_the_one_of_the_formula() -> None:
    """G6.6: qwen3-next on one rank of attention, rollouts of 8,192 tokens."""
    at = {"rollout.gpus_per_engine": 1, "workload.prompt_tokens": 192, "rollout.ep": 1}
    assert engine_caches.best_ratio(case("qwen3-next", at)) == pytest.approx(1.9189, abs=1e-4)


def test_the_balanced_ratio_lets_as_many_run_as_there_are_tokens_for() -> None:
    suggested = only(case("qwen3-next"), "P417")[0].suggest
    of = case("qwen3-next", suggested)
    engine = of.decoding
    assert engine is not None
    assert engine.pool is not None
    assert engine.max_running is not None
    assert engine.pool.kv_tokens / of.work.row_tokens == pytest.approx(engine.max_running, rel=0.01)


def test_states_bind_just_below_the_rollouts_that_are_there() -> None:
    """Five slots each: 16 rollouts of an engine take 80."""
    assert "P416" not in codes(case("qwen3-next", {"rollout.state_slots_pin": 80}))
    (refused,) = only(case("qwen3-next", {"rollout.state_slots_pin": 79}), "P416")
    assert "state_slots_pin = 79 lets 15 requests of an engine run, and 16 are there" in refused.message


def test_copies_of_the_cache_are_ranks_by_key_heads() -> None:
    """Qwen3-Next has two key heads: eight ranks keep four copies."""
    (warned,) = only(case("qwen3-next"), "P403")
    assert "kept 4 times" in warned.message
    assert "P403" not in codes(case("qwen3-next", {"rollout.dp_attention": True, "rollout.dp": 4}))


# Suggestions


def test_suggestions_mend_every_size_that_can_be_given() -> None:
    for size, ep, dp in product((1, 2, 3, 5, 6, 8, 16), (1, 3, 5, 8), (1, 2, 3)):
        fields = {
            "rollout.gpus_per_engine": size,
            "rollout.ep": ep,
            "rollout.dp": dp,
            "rollout.dp_attention": dp > 1,
        }
        of = case("qwen3-30b", fields)
        before = [each for each in found(of) if each.severity is Severity.ERROR]
        for finding in before:
            if finding.suggest:
                after = case("qwen3-30b", {**fields, **finding.suggest})
                left = {(each.code, each.path) for each in found(after) if each.severity is Severity.ERROR}
                assert left < {(each.code, each.path) for each in before}, (fields, finding)
                assert sound(after)


def test_a_pool_that_waits_is_given_a_split_that_both_layouts_allow() -> None:
    slow = {"workload.measured.train_tok_s": 200.0}
    (note,) = only(case("many-nodes", slow), "P309")
    assert "the rollout pool idles" in note.message
    assert note.suggest
    after = case("many-nodes", {**slow, **note.suggest})
    assert only(after, "P309") == []
    assert not [each for each in found(after) if each.severity is Severity.ERROR]
    assert after.train_gpus + after.rollout_gpus == 256
    assert after.train_gpus % (16 * 4) == 0


def test_a_split_of_prefill_and_decode_is_mended_by_the_best_one() -> None:
    lopsided = {"rollout.pd.prefill_gpus": 6, "rollout.pd.decode_gpus": 2}
    (warned,) = only(case("two-nodes", lopsided), "P411")
    assert warned.suggest == {"rollout.pd.prefill_gpus": 2, "rollout.pd.decode_gpus": 6}
    (link,) = only(case("two-nodes", {"workload.measured.kv_bw": 1e8}), "P411")
    assert link.path == "rollout.pd.transfer"
    assert "0.1 GB/s" in link.message


# Memory, caches


def test_whoever_stays_on_a_shared_gpu_is_named() -> None:
    stays = {"placement.offload_train": False, "train.distributed_optimizer": False}
    assert [each.path for each in only(case("qwen3-4b", stays), "P306")] == ["placement.offload_train"]
    (saver,) = only(case("qwen3-4b", {"rollout.memory_saver": False}), "P306")
    assert saver.suggest == {"rollout.memory_saver": True}
    both_fit = {"placement.offload_rollout": False, "rollout.mem_fraction": 0.3}
    assert only(case("qwen3-4b", both_fit), "P306") == []


def test_a_second_cache_is_held_to_the_host_s_memory() -> None:
    cache = {"rollout.hicache": True, "rollout.hicache_ratio": 2.0, "workload.prompt_tokens": None}
    of = case("qwen3-4b", cache)
    assert of.pool is not None
    takes = int(2.0 * of.pool.rest * 8) + engine_kinds.HOST_RESERVE
    there = [
        [each.severity for each in only(case("qwen3-4b", {**cache, "hardware.host_mem_bytes": host}), "P413")]
        for host in (takes + 8, takes - 8, 0)
    ]
    assert there == [[], [Severity.WARNING], [Severity.NOTE]]


def test_nothing_is_published_between_the_turns_of_a_synchronous_step() -> None:
    asked = {"rollout.hicache": True, "workload.tool_s": 900.0}
    assert "P414" in codes(case("many-nodes", asked))
    sync = {"schedule.kind": "sync", "schedule.max_staleness": None}
    assert "P414" not in codes(case("many-nodes", {**asked, **sync}))


def test_without_a_prefix_cache_the_share_that_is_lost_counts_groups_and_turns() -> None:
    def share(**fields: Any) -> str:
        given = {f"workload.{name}": value for name, value in fields.items()}
        (note,) = only(case("qwen3-4b", {"rollout.prefix_cache": False, **given}), "P429")
        return note.message.split(" ")[0]

    # Groups of 8 alone; then two turns, of which the second repeats prompt, reply and observation: 8 * (100 + 100 + 60) prompt tokens,
    # of which 100 + 8 * 10 are new.
    assert share() == "88%"
    turns = share(prompt_tokens=100, response_tokens=50, observation_tokens=10, turns=2)
    assert turns == f"{1 - (100 + 8 * 10) / (8 * 260):.0%}"


# Routers


@pytest.mark.parametrize(
    ("fields", "count", "behind"),
    [
        ({}, 4, True),
        ({"rollout.router": "none"}, 4, False),
        ({"rollout.gpus_per_engine": 8}, 1, False),
        ({"placement.mode": "external", "rollout.urls": ["http://a", "http://b"]}, 2, True),
        ({"rollout.engine": "embedded"}, 1, False),
    ],
)
def test_engines_behind_a_router_are_counted(fields: dict[str, Any], count: int, behind: bool) -> None:
    of = case("qwen3-4b", fields)
    assert (engine_count(of), routed(of)) == (count, behind)
