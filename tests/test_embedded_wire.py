"""Requests of /generate as the embedded engine reads them: what becomes of each wish, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from palestra.server.embedded import wire
from palestra.server.embedded.types import GenerateCall, GenerateResult, RequestRefused, Shaping

VOCAB = 50


def read(params: dict[str, Any], **fields: Any) -> GenerateCall:
    """As the surface does it."""
    raw = json.dumps({"input_ids": [1, 2, 3], "sampling_params": params, **fields})
    try:
        body = wire.GenerateBody.model_validate_json(raw)
    except ValidationError as fault:
        raise RequestRefused(wire.explain(fault)) from fault
    return wire.to_call(body, vocab_size=VOCAB, context_length=100, end_ids=frozenset({4}), allow_forced=False)


def test_a_request_without_wishes_costs_nothing() -> None:
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0.0}
    for params in ({}, neutral, {"repetition_penalty": 1.0, "logit_bias": {}, "min_new_tokens": 0, "stop": []}):
        call = read({**params, "temperature": 0.5})
        assert (call.shaping, call.stop, call.top_logprobs) == (None, (), 0)


def test_wishes_arrive() -> None:
    call = read(
        {
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "frequency_penalty": 1,
            "presence_penalty": -1,
            "repetition_penalty": 1.5,
            "logit_bias": {"7": 2.0, "07": 3, "9": -1.5},
            "min_new_tokens": 3,
            "stop_token_ids": [8, 70, -1],
            "ignore_eos": True,
            "stop": ["a", "b"],
        },
        return_logprob=True,
        top_logprobs_num=20,
    )
    assert call.shaping == Shaping(0.9, 5, 0.1, 1.0, -1.0, 1.5, ((7, 3.0), (9, -1.5)), 3, (4, 8))
    assert call.stop_ids == frozenset()
    assert call.stop == ("a", "b")
    assert call.top_logprobs == 20


def test_one_stop_text_is_a_list_of_one_and_null_is_none() -> None:
    assert read({"stop": "end"}).stop == ("end",)
    assert read({"stop": None, "logit_bias": None}).stop == ()


def test_top_logprobs_come_with_logprobs_only() -> None:
    assert read({}, top_logprobs_num=3).top_logprobs == 0


def test_a_temperature_that_leaves_no_numbers_is_greedy() -> None:
    assert read({"temperature": 1e-7}).temperature == 0.0
    assert read({"temperature": 1e-5}).temperature == 1e-5


@pytest.mark.parametrize(
    ("word", "params"),
    [
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 1.5}),
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": -3}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("temperature", {"temperature": float("nan")}),
        ("logit_bias", {"logit_bias": {"50": 1.0}}),
        ("logit_bias", {"logit_bias": {"-1": 1.0}}),
        ("logit_bias", {"logit_bias": {"x": 1.0}}),
        ("logit_bias", {"logit_bias": {"7": float("inf")}}),
        ("logit_bias", {"logit_bias": {"7": float("nan")}}),
        ("min_new_tokens", {"min_new_tokens": 9, "max_new_tokens": 8}),
        ("min_new_tokens", {"min_new_tokens": 1, "stop_token_ids": list(range(VOCAB))}),
        ("stop", {"stop": ["a", ""]}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop", {"stop": 7}),
        ("n: 2 is not built", {"n": 2}),
        ("stop_regex", {"stop_regex": "a+"}),
    ],
)
def test_what_cannot_be_is_refused_by_name(word: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refusal:
        read(params)
    assert word in str(refusal.value)


@pytest.mark.parametrize("count", [-1, 21])
def test_top_logprobs_are_bounded(count: int) -> None:
    with pytest.raises(RequestRefused, match="top_logprobs_num"):
        read({}, top_logprobs_num=count)


def test_the_answer_has_sglangs_shape() -> None:
    call = read({}, return_logprob=True, top_logprobs_num=2)
    result = GenerateResult(
        token_ids=(7, 9),
        logprobs=(-0.5, -1.0),
        finish_reason={"type": "stop", "matched": "end"},
        versions=(("v", 0, 2),),
        cached_tokens=0,
        top_logprobs=(((-0.5, 7), (-1.5, 8)), ((-0.25, 3), (-1.0, 9))),
    )
    answer = wire.to_answer(call, result, "v", 0.1, logprobs=True)
    assert answer["output_ids"] == [7, 9]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "end"}
    assert answer["meta_info"]["output_top_logprobs"] == [
        [[-0.5, 7, None], [-1.5, 8, None]],
        [[-0.25, 3, None], [-1.0, 9, None]],
    ]
    plain = read({}, return_logprob=True)
    assert "output_top_logprobs" not in wire.to_answer(plain, result, "v", 0.1, logprobs=True)["meta_info"]
