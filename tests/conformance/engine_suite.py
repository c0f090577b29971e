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

DEADLINE_S = 60.0
LONG = 600


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

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=DEADLINE_S)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A post that must be answered with 200."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

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


def full_forward(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """log p of each id of the completion."""
    import torch

    with torch.no_grad():
        logits = reference(folder)(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()


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
