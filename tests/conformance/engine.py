"""What any engine behind SGLang's native HTTP surface must do: run against a served model, with a full forward by others as the judge.

A test module derives a class from `EngineSuite` and gives it an `engine` fixture. Needs two weight folders of one
architecture, a context window of at least 2048 tokens, and that nobody else uses the engine.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest

from tests.conformance.engine_kit import (
    DEADLINE_S,
    NEAR,
    EngineUnderTest,
    Penalty,
    chosen,
    log_softmax,
    text_codec,
)
from tests.conformance.engine_updates import UpdateSuite


class EngineSuite(UpdateSuite):
    """The tests. Each starts with the weights of `engine.folder` under a version of its own, `self.base`."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_those_of_a_full_forward(self, engine: EngineUnderTest, temperature: float) -> None:
        sampled = engine.generate(engine.prompt(1), temperature=temperature, max_new_tokens=32)
        assert len(sampled.ids) == 32
        assert sampled.reason == "length"
        assert sampled.gap(engine.folder, temperature) < engine.tolerance
        assert sampled.spans == [(self.base, 0, 32)]

    def test_the_end_token_is_part_of_the_answer(self, engine: EngineUnderTest) -> None:
        ends = list(range(0, engine.vocab_size, 3))
        sampled = engine.generate(engine.prompt(2), stop_token_ids=ends, ignore_eos=False, max_new_tokens=400)
        assert sampled.reason == "stop"
        assert sampled.ids[-1] in ends
        assert not set(sampled.ids[:-1]) & set(ends)
        assert sampled.meta["finish_reason"]["matched"] == sampled.ids[-1]
        assert sampled.gap(engine.folder) < engine.tolerance

    def test_unknown_sampling_parameters_are_refused_by_name(self, engine: EngineUnderTest) -> None:
        answer = engine.post("/generate", input_ids=engine.prompt(3), sampling_params={"temprature": 0.5})
        assert answer.status_code == 400
        assert "temprature" in answer.text

    def test_a_prompt_beyond_the_window_is_refused(self, engine: EngineUnderTest) -> None:
        answer = engine.post("/generate", input_ids=[10] * 100_000, sampling_params={"max_new_tokens": 1})
        assert answer.status_code == 400
        assert "context" in answer.text
        assert len(engine.generate(engine.prompt(3)).ids) == 16

    def test_many_at_once_all_end_and_differ(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(4)
        done = list(self.pool.map(lambda _: engine.generate(prompt, max_new_tokens=24), range(64)))
        assert [len(sampled.ids) for sampled in done] == [24] * 64
        assert len({tuple(sampled.ids) for sampled in done}) == 64
        assert max(sampled.gap(engine.folder) for sampled in done[:8]) < engine.tolerance

    def test_siblings_and_next_turns_reuse_the_prefix(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(5, 64)
        first = engine.generate(prompt, max_new_tokens=40)
        assert first.meta["cached_tokens"] == 0
        sibling = engine.generate(prompt)
        assert 64 - max(engine.page, 1) <= sibling.meta["cached_tokens"] < 64
        assert sibling.gap(engine.folder) < engine.tolerance
        following = engine.generate([*prompt, *first.ids, *engine.prompt(6, 8)])
        assert following.meta["cached_tokens"] > 64
        assert following.gap(engine.folder) < engine.tolerance

    def test_an_aborted_request_answers_with_what_it_has(self, engine: EngineUnderTest) -> None:
        rid = f"{random.getrandbits(128):032x}"
        future = self.start_long(engine, engine.prompt(7), rid)
        engine.ask("/abort_request", rid=rid)
        sampled = future.result(DEADLINE_S)
        assert sampled.reason == "abort"
        assert 8 <= len(sampled.ids) < engine.long
        assert sampled.gap(engine.folder) < engine.tolerance

    def test_pause_abort_answers_and_new_requests_wait(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(8), f"{random.getrandbits(128):032x}")
        engine.ask("/pause_generation", mode="abort")
        sampled = future.result(DEADLINE_S)
        assert sampled.reason == "abort"
        assert len(sampled.ids) < engine.long
        before = engine.progress()
        waiting = self.pool.submit(engine.generate, engine.prompt(9))
        engine.wait_for_queued(1)
        engine.load(engine.other, "other")
        assert engine.progress() == before
        assert not waiting.done()
        engine.ask("/continue_generation")
        later = waiting.result(DEADLINE_S)
        assert later.spans == [("other", 0, 16)]
        assert later.gap(engine.other) < engine.tolerance

    def test_pause_retract_goes_on_as_a_full_recompute(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(10), f"{random.getrandbits(128):032x}")
        engine.ask("/pause_generation", mode="retract")
        engine.load(engine.other, "other")
        engine.ask("/continue_generation")
        sampled = future.result(DEADLINE_S)
        assert [version for version, _, _ in sampled.spans] == [self.base, "other"]
        swap = sampled.spans[1][1]
        assert len(sampled.ids) == engine.long
        assert sampled.gap(engine.folder, end=swap) < engine.tolerance
        assert sampled.gap(engine.other, start=swap) < engine.tolerance
        assert sampled.gap(engine.folder, start=swap) > 100 * engine.tolerance

    def test_pause_in_place_keeps_the_cache(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(11), f"{random.getrandbits(128):032x}")
        engine.ask("/pause_generation", mode="in_place")
        answer = engine.post(
            "/update_weights_from_disk", model_path=str(engine.other), weight_version="other", flush_cache=False
        )
        assert answer.status_code == 200, answer.text
        engine.ask("/continue_generation")
        sampled = future.result(DEADLINE_S)
        assert [version for version, _, _ in sampled.spans] == [self.base, "other"]
        swap = sampled.spans[1][1]
        assert sampled.gap(engine.folder, end=swap) < engine.tolerance
        assert sampled.gap(engine.other, start=swap) > 10 * engine.tolerance, (
            "old keys and values were expected to stay"
        )

    def test_new_weights_never_see_old_cache(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(12, 64)
        assert engine.generate(prompt).gap(engine.folder) < engine.tolerance
        engine.load(engine.other, "other")
        after = engine.generate(prompt)
        assert after.spans == [("other", 0, 16)]
        assert after.gap(engine.other) < engine.tolerance
        assert after.gap(engine.folder) > 100 * engine.tolerance

    def test_a_stop_text_ends_at_the_token_that_completes_it(self, engine: EngineUnderTest) -> None:
        """The text begins within one token and ends within the next."""
        codec = text_codec(engine.folder)
        for seed in range(500, 530):
            prompt = engine.prompt(seed)
            free = engine.generate(prompt, temperature=0, max_new_tokens=64)
            pieces = [codec.decode([token]) for token in free.ids]
            seams = [a[-1] + b[0] for a, b in itertools.pairwise(pieces) if len(a) > 1 and len(b) > 1]
            if stop := next((seam for seam in seams if seam.isascii()), ""):
                break
        end = next(n for n in range(1, 65) if stop in codec.decode(free.ids[:n]))
        assert end > 1, "no greedy completion had a seam between two tokens of several characters"
        for wish in (stop, ["\u2603 never", stop]):
            sampled = engine.generate(prompt, temperature=0, max_new_tokens=64, stop=wish, no_stop_trim=True)
            assert sampled.ids == free.ids[:end]
            assert sampled.meta["finish_reason"] == {"type": "stop", "matched": stop}
        unmet = engine.generate(prompt, temperature=0, max_new_tokens=64, stop=["\u2603 never"])
        assert (unmet.ids, unmet.reason) == (free.ids, "length")

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_top_logprobs_are_those_of_a_full_forward(self, engine: EngineUnderTest, temperature: float) -> None:
        more = {"top_logprobs_num": 5}
        sampled = engine.generate(engine.prompt(51), temperature=temperature, max_new_tokens=24, more=more)
        rows = log_softmax(sampled.rows(engine.folder) / temperature)
        tops = sampled.meta["output_top_logprobs"]
        assert [len(top) for top in tops] == [5] * 24
        for row, top, token, logprob in zip(rows, tops, sampled.ids, sampled.logprobs, strict=True):
            found = [entry[0] for entry in top]
            assert found == sorted(found, reverse=True)
            assert found == pytest.approx(sorted(row)[:-6:-1], abs=engine.tolerance)
            assert found == pytest.approx([float(row[entry[1]]) for entry in top], abs=engine.tolerance)
            assert [entry[2] for entry in top] == [None] * 5
            assert all(entry[0] == logprob for entry in top if entry[1] == token)

    @pytest.mark.parametrize("wish", [{"top_k": 3}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
    def test_filters_cut_the_draw_and_not_the_logprobs(self, engine: EngineUnderTest, wish: dict[str, float]) -> None:
        ask = functools.partial(engine.generate, max_new_tokens=48, **wish)
        cut_mass = 0.0
        for sampled in self.pool.map(ask, [engine.prompt(60 + i) for i in range(4)]):
            probs = np.exp(log_softmax(sampled.rows(engine.folder)))
            ranked = np.sort(probs, -1)[:, ::-1]
            before = ranked.cumsum(-1) - ranked
            kept = (before <= wish.get("top_p", 1)) & (ranked >= ranked[:, :1] * wish.get("min_p", 0))
            kept[:, int(wish.get("top_k", kept.shape[1])) :] = False
            cut_mass += float((ranked * ~kept).sum())
            picked = probs[range(48), sampled.ids]
            assert (picked >= np.where(kept, ranked, 2).min(-1) * (1 - NEAR)).all()
            assert sampled.logprobs == pytest.approx(np.log(picked).tolist(), abs=engine.tolerance)
        assert cut_mass > 15, "without the filter, so many draws were expected outside it"

    @pytest.mark.parametrize(
        "wish",
        [{"frequency_penalty": 0.7, "presence_penalty": 0.4}, {"presence_penalty": -1.5}, {"repetition_penalty": 1.6}],
        ids=str,
    )
    def test_penalties_bend_the_draw_as_the_formula_says(self, engine: EngineUnderTest, wish: dict[str, float]) -> None:
        sampled = engine.generate(engine.prompt(52), temperature=0, max_new_tokens=96, **wish)
        assert Penalty(**wish).check_greedy(sampled.rows(engine.folder), sampled.ids) > 0

    def test_a_logit_bias_moves_the_draw(self, engine: EngineUnderTest) -> None:
        assert engine.generate(engine.prompt(53), logit_bias={"17": 200.0}).ids == [17] * 16
        either = engine.generate(engine.prompt(53), logit_bias={"17": 200.0, "18": 200.0}, max_new_tokens=64).ids
        assert set(either) == {17, 18}
        first = engine.generate(engine.prompt(53), temperature=0).ids[0]
        assert engine.generate(engine.prompt(53), temperature=0, logit_bias={str(first): -200.0}).ids[0] != first

    def test_no_stop_id_before_min_new_tokens(self, engine: EngineUnderTest) -> None:
        ends = list(range(0, engine.vocab_size, 3))
        wish = {"stop_token_ids": ends, "ignore_eos": False, "max_new_tokens": 400}
        sampled = engine.generate(engine.prompt(54), min_new_tokens=40, **wish)
        assert sampled.reason == "stop"
        assert not set(sampled.ids[:40]) & set(ends)
        assert len(sampled.ids) > 40

    @pytest.mark.parametrize(
        "wish",
        [
            {"top_p": 0},
            {"top_p": 1.5},
            {"top_k": 0},
            {"min_p": 2},
            {"frequency_penalty": 3},
            {"presence_penalty": -3},
            {"repetition_penalty": 0},
            {"min_new_tokens": 9, "max_new_tokens": 8},
            {"logit_bias": {"1000000": 1}},
        ],
        ids=str,
    )
    def test_wishes_out_of_bounds_are_refused_by_name(self, engine: EngineUnderTest, wish: dict[str, Any]) -> None:
        answer = engine.post("/generate", input_ids=engine.prompt(55), sampling_params=wish)
        assert answer.status_code == 400
        assert next(iter(wish)) in answer.text
        assert len(engine.generate(engine.prompt(55)).ids) == 16

    @pytest.mark.parametrize(("start", "new", "temperature"), [(0, 1, 1.0), (0, 0, 1.0), (25, 1, 0.5), (40, 1, 1.0)])
    def test_input_logprobs_are_those_of_a_full_forward(
        self, engine: EngineUnderTest, start: int, new: int, temperature: float
    ) -> None:
        """At the temperature 1, whatever the request's; the first place has none. What the cache holds of the prompt is read again."""
        prompt = engine.prompt(70)
        engine.generate(prompt)
        sampled = engine.generate(
            prompt, max_new_tokens=new, temperature=temperature, more={"logprob_start_len": start}
        )
        told = sampled.meta["input_token_logprobs"]
        assert [entry[1:] for entry in told] == [[token, None] for token in prompt[start:]]
        assert [entry[0] for entry in told[:1]] == [None] * len(told[:1])
        rows = engine.judge.logits(engine.folder, prompt)[:-1]
        expected = chosen(rows, prompt[1:])[start:]
        assert [entry[0] for entry in told[1:]] == pytest.approx(expected, abs=engine.tolerance)
        assert len(sampled.ids) == new
        assert sampled.meta["cached_tokens"] <= start
        if new:
            assert sampled.gap(engine.folder, temperature) < engine.tolerance

    def test_input_logprobs_beyond_the_prompt_are_refused(self, engine: EngineUnderTest) -> None:
        answer = engine.post("/generate", input_ids=[10, 11], return_logprob=True, logprob_start_len=3)
        assert answer.status_code == 400
        assert "logprob_start_len" in answer.text

    def test_a_key_keeps_caches_apart(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(71, 64)
        for key in ("one", "two"):
            assert engine.generate(prompt, more={"extra_key": key}).meta["cached_tokens"] == 0
        again = engine.generate(prompt, more={"extra_key": "one"})
        assert again.meta["cached_tokens"] >= 64 - max(engine.page, 1)
        assert again.gap(engine.folder) < engine.tolerance

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b'{"input_ids": []}',
            b'{"input_ids": "10 11"}',
            b'{"input_ids": [1.5]}',
            b'{"input_ids": [null]}',
            b'{"input_ids": [10], "sampling_params": {"max_new_tokens": -1}}',
            b'{"input_ids": [10], "sampling_params": {"max_new_tokens": "many"}}',
            b'{"input_ids": [10], "sampling_params": {"temperature": -1}}',
            b'{"input_ids": [10], "sampling_params": 7}',
            b'{"sampling_params": {"max_new_tokens": 1}}',
            b'{"input_ids": [' + b"10," * 1_000_000 + b"10]}",
        ],
        ids=lambda body: body[:60].decode(),
    )
    def test_a_bad_request_is_refused_with_a_message(self, engine: EngineUnderTest, body: bytes) -> None:
        answer = engine.raw("/generate", body)
        assert answer.status_code == 400, answer.text[:300]
        assert len(answer.text) > 10
        assert len(engine.generate(engine.prompt(72)).ids) == 16

    def test_abort_all_answers_everybody(self, engine: EngineUnderTest) -> None:
        """The later ones may still wait for their place (`start_long` sees tokens of the first too): they are answered with none."""
        futures = [self.start_long(engine, engine.prompt(73 + n), f"{random.getrandbits(128):032x}") for n in range(3)]
        engine.ask("/abort_request", abort_all=True)
        for number, future in enumerate(futures):
            sampled = future.result(DEADLINE_S)
            assert sampled.reason == "abort"
            if sampled.ids or not number:
                assert sampled.gap(engine.folder) < engine.tolerance
        assert len(engine.generate(engine.prompt(73)).ids) == 16

    def test_the_abort_of_an_unknown_request_changes_nothing(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(77), f"{random.getrandbits(128):032x}")
        engine.ask("/abort_request", rid="nobody's")
        assert not future.done()
        engine.ask("/abort_request", abort_all=True)
        assert future.result(DEADLINE_S).reason == "abort"

    def test_load_and_pool_are_told(self, engine: EngineUnderTest) -> None:
        info = engine.get("/server_info")
        assert info["max_total_num_tokens"] >= 2048
        assert info["context_length"] in (None, 2048)
        (load,) = engine.get("/v1/loads")["loads"]
        assert load["max_total_num_tokens"] == info["max_total_num_tokens"]
        assert load["max_running_requests"] >= 64
        sampled = engine.generate(engine.prompt(78))
        assert 0 <= sampled.meta["queue_time"] < DEADLINE_S
        assert sampled.meta["num_retractions"] == 0


class ChecksIds:
    """For engines that look at ids before they use them. SGLang 0.5.23 does not: an id outside the vocabulary ends it, so the gateway
    refuses such prompts (`PromptMaker`)."""

    @pytest.mark.parametrize("ids", [[-5], [10, 1_000_000]], ids=str)
    def test_ids_outside_the_vocabulary_are_refused(self, engine: EngineUnderTest, ids: list[int]) -> None:
        answer = engine.post("/generate", input_ids=ids)
        assert answer.status_code == 400
        assert "vocabulary" in answer.text
        assert len(engine.generate(engine.prompt(79)).ids) == 16
