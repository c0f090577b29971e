"""Decisions about engines, without engines: keys, waits between attempts, shares, the router's list, verdicts, what a probe refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from palestra.server.engine_wire import Meta, read_answer
from palestra.server.types import EngineError, EngineRefused
from palestra.server.workers.figures import Load, PrefixFigures, Share, read_counters, read_load
from palestra.server.workers.pins import Pins, saturated
from palestra.server.workers.probe import (
    ModelFacts,
    answers_alone,
    check_info,
    check_logprobs,
    check_temperature,
    check_text,
)
from palestra.server.workers.retries import BackOff, EngineBusy, EngineLost, Setback, failure
from palestra.server.workers.router import Changes, changes
from palestra.server.workers.types import Worker, WorkerDown, WorkerSilent, WorkerState
from palestra.server.workers.watch import Seen, Step, judge

URL = "http://127.0.0.1:1"
OUT = WorkerState.QUARANTINED


def test_a_reply_says_that_its_worker_was_full() -> None:
    assert not saturated(None, None)
    assert not saturated(0, 1.9)
    assert saturated(1, 0.0)
    assert saturated(0, 2.1)


def test_a_group_is_moved_once_by_all_that_found_the_same_worker_full() -> None:
    pins = Pins()
    assert pins.key("g") == "g"
    assert [pins.move("g", "g") for _ in range(3)] == [True, False, False]
    assert pins.key("g") == "g~1"
    assert pins.move("g", "g~1")
    assert (pins.key("g"), pins.moved, pins.key("other")) == ("g~2", 2, "other")


def test_moved_groups_are_forgotten_when_they_are_many() -> None:
    pins = Pins(most=3)
    for name in "abcd":
        pins.move(name, name)
    assert [pins.key(name) for name in "abcd"] == ["a", "b~1", "c~1", "d~1"]


BROKEN, FULL = Setback("gone", broken=True), Setback("no room", broken=False)


def test_the_first_attempt_after_a_broken_connection_is_made_at_once_and_later_ones_wait_longer() -> None:
    back_off = BackOff(30.0, lambda: 0.5)
    delays = [back_off.next_delay(BROKEN, now, 100.0) for now in (1.0, 1.0, 1.2, 1.5, 2.0)]
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])


def test_a_full_engine_is_waited_for_with_jitter_and_as_long_as_it_asks() -> None:
    low, high = BackOff(30.0, lambda: 0.0), BackOff(30.0, lambda: 1.0)
    assert (low.next_delay(FULL, 0, 100), high.next_delay(FULL, 0, 100)) == pytest.approx((0.05, 0.15))
    assert low.next_delay(Setback("later", broken=False, asked_s=7.0), 0.1, 100) == 7.0
    many = BackOff(1e9, lambda: 0.5)
    assert [many.next_delay(FULL, 0, 1e9) for _ in range(12)][-1] == 5.0


@pytest.mark.parametrize(("setback", "error"), [(BROKEN, EngineLost), (FULL, EngineBusy)])
def test_attempts_end_after_their_time_and_before_the_deadline(setback: Setback, error: type[EngineError]) -> None:
    back_off = BackOff(10.0, lambda: 0.5)
    back_off.next_delay(setback, 0.0, 100.0)
    back_off.next_delay(setback, 9.0, 100.0)
    with pytest.raises(error, match="for 11 s; last: "):
        back_off.next_delay(setback, 11.0, 100.0)
    with pytest.raises(error):
        BackOff(10.0).next_delay(setback, 5.0, 5.0)


def test_statuses_mean_refused_full_or_broken() -> None:
    assert isinstance(failure(URL, 400, None, b"too long"), EngineRefused)
    assert isinstance(failure(URL, 404, None, b""), EngineRefused)
    kinds = {status: failure(URL, status, None, b"") for status in (408, 429, 503, 500, 502, 504)}
    assert {s: f.broken for s, f in kinds.items() if isinstance(f, Setback)} == {
        **dict.fromkeys((408, 429, 503), False),
        **dict.fromkeys((500, 502, 504), True),
    }
    asked = [failure(URL, 503, text, b"") for text in ("3", "0.5", "-1", "9999", "Sun, 29 Nov 2026 20:00:00 GMT", None)]
    assert [f.asked_s for f in asked if isinstance(f, Setback)] == [3.0, 0.5, 0.0, 30.0, 0.0, 0.0]
    assert f"{URL}: HTTP 500: boom" in str(failure(URL, 500, None, b"boom"))


def test_shares_are_told_apart_by_turn_group_and_worker() -> None:
    figures = PrefixFigures(most_groups=2)
    figures.add("a", 100, 0, later=False)
    figures.add("a", 100, 80, later=False)
    figures.add("b", 200, 190, later=True)
    figures.counted("w", Share(1000, 900))
    names = {"w": "worker_0", "silent": "worker_1"}
    assert figures.take(names) == {
        "engine/prefix_hit/first": 0.4,
        "engine/prefix_hit/later": 0.95,
        "engine/prefix_hit/mean": 0.675,
        "engine/prefix_hit/group_min": 0.4,
    }
    figures.counted("w", Share(1100, 950))
    assert figures.take(names)["engine/prefix_hit/worker_0"] == 0.5
    figures.counted("w", Share(10, 1))  # it was started anew
    assert figures.take(names)["engine/prefix_hit/worker_0"] == 0.1
    assert figures.worker("w") == 0.1
    figures.add("c", 10, 5, later=False)
    assert (figures.group("a"), figures.group("b"), figures.group("c")) == (None, 0.95, 0.5)


def test_counters_and_loads_are_read_as_engines_write_them() -> None:
    exposition = (
        "# HELP sglang:prompt_tokens_total Number of prefill tokens processed.\n"
        'sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 346.0\n'
        'sglang:cached_tokens_total{cache_source="device",engine_type="unified"} 280.0\n'
        'sglang:cached_tokens_total{cache_source="host",engine_type="unified"} 6.0\n'
        'sglang:prompt_tokens_histogram_sum{engine_type="unified"} 346.0\n'
    )
    assert read_counters(exposition) == Share(346, 286)
    assert read_counters("sglang:prompt_tokens_total 12\nsglang:cached_tokens_total 3\n") == Share(12, 3)
    assert read_counters("") is None
    ranks = [
        {"num_running_reqs": 2, "num_waiting_reqs": 0, "token_usage": 0.3},
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5},
    ]
    assert read_load({"loads": ranks}) == Load(5, 1, 0.5)
    assert read_load({"text": "not found"}) is None
    assert [load.room for load in (Load(9, 0, 0.79), Load(9, 1, 0.1), Load(9, 0, 0.8))] == [True, False, False]


def test_the_routers_list_is_made_ours() -> None:
    members = [Worker("a"), Worker("b"), Worker("c", OUT), Worker("d", OUT)]
    assert changes(["a", "c", "new"], members) == Changes(remove=("c",), add=("b",), newcomers=("new",))
    assert changes(["a", "b"], members) == Changes()
    gone = [Worker("c", OUT), Worker("d", OUT)]
    assert changes(["c", "d"], gone, kept=["c"]) == Changes(remove=("d",))


def test_verdicts() -> None:
    def said(worker: Worker, seen: Seen) -> tuple[Step, str]:
        return judge(worker, seen, wanted=3)

    serving, out = Worker(URL), Worker(URL, OUT)
    assert said(serving, Seen(3))[0] is Step.NOTHING
    assert said(serving, Seen(0)) == (Step.WRONG, "has version 0, not 3")
    assert said(out, Seen(3))[0] is said(out, Seen(0))[0] is Step.MEND
    for error in (WorkerDown("refused"), WorkerSilent("nothing")):
        assert said(serving, Seen(None, error))[0] is Step.LOST
        assert said(out, Seen(None, error))[0] is Step.NOTHING
    assert "does not answer" in said(serving, Seen(None, WorkerSilent("x")))[1]
    assert said(serving, Seen(None, EngineError("HTTP 500")))[0] is Step.NOTHING


# What a probe refuses.

FACTS = ModelFacts((1, 2), vocab_size=512, architectures=("Qwen3MoeForCausalLM",), decode=lambda ids: "ab"[: len(ids)])


def answer(logprobs: list[float], top: list[list[float]] | None = None) -> Meta:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length"},
        "completion_tokens": len(logprobs),
        "weight_version": "default",
        "output_token_logprobs": [[lp, 7, None] for lp in logprobs],
    }
    if top is not None:
        meta["output_top_logprobs"] = [[[lp, n, None] for n, lp in enumerate(place)] for place in top]
    return read_answer(orjson.dumps({"meta_info": meta}))


def test_the_served_model_must_be_the_runs() -> None:
    assert check_info(URL, {"weight_version": "4", "architectures": ["Qwen3MoeForCausalLM"]}, FACTS) == 4
    assert check_info(URL, {"weight_version": "default"}, FACTS) == 0
    with pytest.raises(EngineError, match=rf"{URL} serves a LlamaForCausalLM .*start the engine with the run's model"):
        check_info(URL, {"architectures": ["LlamaForCausalLM"], "model_path": "/m"}, FACTS)
    with pytest.raises(EngineError, match=r"no policy version; start it without --weight-version"):
        check_info(URL, {"weight_version": "mine"}, FACTS)
    assert check_info(URL, {"architectures": ["LlamaForCausalLM"]}, ModelFacts((1,))) == 0


def test_uniform_logprobs_are_refused_with_and_without_a_known_vocabulary() -> None:
    flat = -math.log(512)
    check_logprobs(URL, answer([flat, -1.0]), 512)
    with pytest.raises(EngineError, match=r"uniform.*tied embeddings"):
        check_logprobs(URL, answer([flat, flat + 1e-6]), 512)
    with pytest.raises(EngineError, match="uniform"):
        check_logprobs(URL, answer([flat], [[flat, flat, flat]]), 0)
    check_logprobs(URL, answer([flat], [[flat + 0.1, flat]]), 0)
    with pytest.raises(EngineError, match="no token"):
        check_logprobs(URL, answer([]), 512)


def test_text_is_compared_but_for_white_space_and_cut_characters() -> None:
    check_text(URL, "", [1, 2], FACTS)
    check_text(URL, " a b\ufffd\n", [1, 2], FACTS)
    with pytest.raises(EngineError, match=r"reads the ids \[1, 2\] as 'xy' and the run's tokenizer as 'ab'"):
        check_text(URL, "xy", [1, 2], FACTS)


def test_logprobs_must_follow_the_temperature() -> None:
    one = {5: -1.0, 6: -1.5, 7: -2.0}
    check_temperature(URL, one, {5: -0.5, 6: -1.5, 7: -2.5})
    with pytest.raises(EngineError, match=r"1\.00 at T=1 is 1\.00 at T=0\.5, not 2\.00"):
        check_temperature(URL, one, one)
    for half in ({}, {6: -1.0, 5: -1.0}):  # not given; another first one
        check_temperature(URL, one, half)
    check_temperature(URL, {5: -1.0, 6: -1.1}, {5: -1.0, 6: -1.1})  # too near to tell


def test_prefill_and_decode_engines_are_not_asked_directly() -> None:
    assert answers_alone({})
    assert answers_alone({"disaggregation_mode": "null"})
    assert not answers_alone({"disaggregation_mode": "prefill"})


def test_facts_of_a_model_folder_and_of_a_name(tmp_path: Path) -> None:
    assert ModelFacts.of([1], [2], None, None) == ModelFacts((1,), (2,))
    (tmp_path / "config.json").write_bytes(orjson.dumps({"architectures": ["A"], "text_config": {"vocab_size": 9}}))
    assert ModelFacts.of([1], [], tmp_path, None) == ModelFacts((1,), (), 9, ("A",))
    (tmp_path / "config.json").write_bytes(orjson.dumps({"vocab_size": 7}))
    assert ModelFacts.of([1], [], tmp_path, None).vocab_size == 7


def test_an_abort_in_the_queue_is_an_empty_part() -> None:
    """SGLang 0.5.23 leaves prompt_tokens and cached_tokens out of it."""
    meta = answer([])
    assert (meta.prompt_tokens, meta.cached_tokens, meta.completion_tokens) == (0, 0, 0)
