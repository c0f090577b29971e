"""What any engine behind SGLang's native HTTP surface must do: run against a served model, with transformers' full forward as the judge.

A test module derives a class from `EngineSuite` and gives it an `engine` fixture. Needs two weight folders of one
architecture, a context window of at least 2048 tokens, and that nobody else uses the engine.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from palestra.server.renderer.tokens import TokenCodec

DEADLINE_S = 60.0
LONG = 600
NEAR = 1e-3
"""Numbers so near to each other may change places between two implementations."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """A served engine."""

    url: str
    folder: Path
    other: Path
    """Other weights of the same architecture."""
    vocab_size: int
    page: int = 1
    """Prefixes are shared in multiples of so many tokens."""
    tolerance: float = 1e-4
    deadline_s: float = DEADLINE_S
    """Of one call. An engine that compiles a kernel at its first use needs longer."""

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=self.deadline_s)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A post that must be answered with 200; an answer without a body is {}."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()) if answer.content else {}

    def generate(
        self, prompt: list[int], *, rid: str = "", more: dict[str, Any] | None = None, **params: Any
    ) -> Sampled:
        """One completion; `params` are sampling parameters, `more` further fields of the body."""
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, **params}
        extra = {"rid": rid} if rid else {}
        body = self.ask(
            "/generate", input_ids=prompt, return_logprob=True, sampling_params=params, **extra, **(more or {})
        )
        return Sampled(prompt, body)

    def metric(self, name: str) -> float:
        """A value of /metrics, summed over its labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=DEADLINE_S).text
        return sum(float(value) for value in re.findall(rf"^sglang:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def load(self, folder: Path, version: str) -> None:
        self.ask("/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=True)

    def prompt(self, seed: int, length: int = 40) -> list[int]:
        """Ids that look like nothing else."""
        draw = random.Random(seed)
        return [draw.randrange(10, self.vocab_size) for _ in range(length)]


class Sampled:
    """An answer of /generate, held to the contract as it is read."""

    def __init__(self, prompt: list[int], body: dict[str, Any]) -> None:
        meta = body["meta_info"]
        self.prompt, self.body, self.meta = prompt, body, meta
        self.ids: list[int] = [entry[1] for entry in meta["output_token_logprobs"]]
        self.logprobs: list[float] = [entry[0] for entry in meta["output_token_logprobs"]]
        self.reason: str = meta["finish_reason"]["type"]
        self.spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        assert body["output_ids"] == self.ids
        assert meta["completion_tokens"] == len(self.ids)
        assert meta["prompt_tokens"] == len(prompt)
        assert [start for _, start, _ in self.spans] == [0, *(end for _, _, end in self.spans)][: len(self.spans)]
        assert (self.spans[-1][2] if self.spans else 0) == len(self.ids)

    def gap(self, folder: Path, temperature: float = 1.0, start: int = 0, end: int | None = None) -> float:
        """Largest distance of the logprobs start..end from a full forward through the weights in `folder`."""
        expected = full_forward(folder, self.prompt, self.ids, temperature)[start:end]
        assert expected
        return max(abs(a - b) for a, b in zip(expected, self.logprobs[start:end], strict=True))


@functools.cache
def reference(folder: Path) -> Any:
    """transformers' own model, with its own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


def full_logits(folder: Path, prompt: list[int], completion: list[int]) -> Any:
    """[completion, vocabulary] logits: a row for each id of the completion, from all before it."""
    import torch

    with torch.no_grad():
        return reference(folder)(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]


def full_forward(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """log p of each id of the completion."""
    import torch

    logprobs = (full_logits(folder, prompt, completion) / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()


@functools.cache
def text_codec(folder: Path) -> TokenCodec:
    """The folder's tokenizer."""
    return TokenCodec(folder)


@dataclass(frozen=True, slots=True)
class Penalty:
    """Penalties of one request, as the formula has them."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def bend(self, logits: Any, sampled: list[int]) -> Any:
        """A copy of [vocabulary] logits, with the penalties that the completion so far has earned."""
        bent = logits.clone()
        for token in set(sampled):
            bent[token] -= self.frequency_penalty * sampled.count(token) + self.presence_penalty
            bent[token] *= self.repetition_penalty if bent[token] < 0 else 1 / self.repetition_penalty
        return bent

    def check_greedy(self, folder: Path, prompt: list[int], ids: list[int]) -> int:
        """Every id of a greedy completion must be the best of the bent logits. Returns how many are not the best of the plain ones."""
        rows = full_logits(folder, prompt, ids)
        for at, (row, token) in enumerate(zip(rows, ids, strict=True)):
            bent = self.bend(row, ids[:at])
            assert bent[token] >= bent.max() - NEAR, f"token {at}"
        return sum(token != best for token, best in zip(ids, rows.argmax(-1).tolist(), strict=True))


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls; fails with `what` at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for: {what}"
        time.sleep(0.005)


class EngineSuite:
    """The tests. Each starts with the weights of `engine.folder` under a version of its own, `self.base`."""

    base: str
    _count = itertools.count()

    @pytest.fixture(autouse=True)
    def fresh(self, engine: EngineUnderTest) -> Iterator[None]:
        self.base = f"base-{next(self._count)}"
        engine.load(engine.folder, self.base)
        with ThreadPoolExecutor(64) as self.pool:
            yield
            engine.ask("/continue_generation")
            engine.ask("/abort_request", abort_all=True)

    def start_long(self, engine: EngineUnderTest, prompt: list[int], rid: str) -> Future[Sampled]:
        """A long completion in the background, with at least 8 of its tokens sampled."""
        before = engine.metric("generation_tokens_total")
        future = self.pool.submit(engine.generate, prompt, rid=rid, max_new_tokens=LONG)
        wait_until(lambda: engine.metric("generation_tokens_total") >= before + 8, "the first tokens")
        return future

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
        assert 8 <= len(sampled.ids) < LONG
        assert sampled.gap(engine.folder) < engine.tolerance

    def test_pause_abort_answers_and_new_requests_wait(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(8), f"{random.getrandbits(128):032x}")
        engine.ask("/pause_generation", mode="abort")
        sampled = future.result(DEADLINE_S)
        assert sampled.reason == "abort"
        assert len(sampled.ids) < LONG
        before = engine.metric("generation_tokens_total")
        waiting = self.pool.submit(engine.generate, engine.prompt(9))
        wait_until(lambda: engine.metric("num_queue_reqs") == 1, "the new request to queue")
        engine.load(engine.other, "other")
        assert engine.metric("generation_tokens_total") == before
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
        assert len(sampled.ids) == LONG
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
        rows = (full_logits(engine.folder, sampled.prompt, sampled.ids) / temperature).log_softmax(-1)
        tops = sampled.meta["output_top_logprobs"]
        assert [len(top) for top in tops] == [5] * 24
        for row, top, token, logprob in zip(rows, tops, sampled.ids, sampled.logprobs, strict=True):
            found = [entry[0] for entry in top]
            assert found == sorted(found, reverse=True)
            assert found == pytest.approx(row.topk(5).values.tolist(), abs=engine.tolerance)
            assert found == pytest.approx([float(row[entry[1]]) for entry in top], abs=engine.tolerance)
            assert [entry[2] for entry in top] == [None] * 5
            assert all(entry[0] == logprob for entry in top if entry[1] == token)

    @pytest.mark.parametrize("wish", [{"top_k": 3}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
    def test_filters_cut_the_draw_and_not_the_logprobs(self, engine: EngineUnderTest, wish: dict[str, float]) -> None:
        ask = functools.partial(engine.generate, max_new_tokens=48, **wish)
        cut_mass = 0.0
        for sampled in self.pool.map(ask, [engine.prompt(60 + i) for i in range(4)]):
            probs = full_logits(engine.folder, sampled.prompt, sampled.ids).softmax(-1)
            ranked = probs.sort(descending=True).values
            before = ranked.cumsum(-1) - ranked
            kept = (before <= wish.get("top_p", 1)) & (ranked >= ranked[:, :1] * wish.get("min_p", 0))
            kept[:, int(wish.get("top_k", kept.shape[1])) :] = False
            cut_mass += float((ranked * ~kept).sum())
            chosen = probs[range(48), sampled.ids]
            assert (chosen >= ranked.masked_fill(~kept, 2).amin(-1) * (1 - NEAR)).all()
            assert sampled.logprobs == pytest.approx(chosen.log().tolist(), abs=engine.tolerance)
        assert cut_mass > 15, "without the filter, so many draws were expected outside it"

    @pytest.mark.parametrize(
        "wish",
        [{"frequency_penalty": 0.7, "presence_penalty": 0.4}, {"presence_penalty": -1.5}, {"repetition_penalty": 1.6}],
        ids=str,
    )
    def test_penalties_bend_the_draw_as_the_formula_says(self, engine: EngineUnderTest, wish: dict[str, float]) -> None:
        sampled = engine.generate(engine.prompt(52), temperature=0, max_new_tokens=96, **wish)
        assert Penalty(**wish).check_greedy(engine.folder, sampled.prompt, sampled.ids) > 0

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
