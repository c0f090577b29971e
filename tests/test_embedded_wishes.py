"""Stop texts, top logprobs and bent draws on a tiny model, through retracts and new weights: the engine's core in this process."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from palestra.server.embedded.core import Core, Finished
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.types import EngineOptions, GenerateCall, GenerateResult, RequestRefused, Shaping
from palestra.server.embedded.weights import read_folder
from tests.conformance.engine_kit import Penalty, Rows, full_logits, text_codec
from tests.tiny import make_tiny_moe

pytestmark = pytest.mark.walk
PROMPT = tuple(range(20, 60))
PLAIN = GenerateCall("r", PROMPT, 1.0, 32, frozenset(), seed=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), initializer_range=0.1)


@pytest.fixture(scope="module")
def core(folder: Path) -> Core:
    return Core(EngineOptions(str(folder), page_size=4))


def run(core: Core, calls: list[GenerateCall], retract_at: tuple[int, ...] = ()) -> list[GenerateResult]:
    """All of them to their end, in their order; everything is retracted before the given steps."""
    for order, call in enumerate(calls):
        core.scheduler.add(core.job(replace(call, rid=f"r{order}"), order))
    finished: list[Finished] = []
    for step in range(10_000):
        if len(finished) == len(calls):
            return [result for _, result in sorted(finished, key=lambda one: one[0].order)]
        if step in retract_at:
            core.retract_all()
        finished += core.step()
    raise AssertionError(f"only {len(finished)} of {len(calls)} requests ended")


def rows_of(folder: Path, ids: tuple[int, ...]) -> Rows:
    """transformers' logits for each id after the prompt."""
    rows: Rows = full_logits(folder, list(PROMPT), list(ids)).double().numpy()
    return rows


def in_bytes(folder: Path, text: str) -> tuple[int, ...]:
    codec = text_codec(folder)
    return tuple(token for char in text for token in codec.encode_text(char))


@pytest.mark.parametrize("retract_at", [(), (4,), (3, 6, 7)])
def test_a_stop_text_is_found_across_tokens_bytes_and_retracts(
    folder: Path, core: Core, retract_at: tuple[int, ...]
) -> None:
    ids = in_bytes(folder, "say 👩é now")
    call = replace(PLAIN, forced_ids=ids, stop=("never", "y 👩é"))
    (result,) = run(core, [call], retract_at)
    assert result.token_ids == ids[: 4 + 4 + 2]
    assert result.finish_reason == {"type": "stop", "matched": "y 👩é"}
    assert len(result.logprobs) == 10


def test_a_stop_text_beats_the_end_token_and_the_length(folder: Path, core: Core) -> None:
    end = text_codec(folder).special_id("<|im_end|>")
    call = replace(PLAIN, forced_ids=(300, end), stop_ids=frozenset({end}), max_new_tokens=2)
    both, token, length = run(core, [replace(call, stop=("<|im_end|>",)), call, replace(call, stop_ids=frozenset())])
    assert both.finish_reason == {"type": "stop", "matched": "<|im_end|>"}
    assert token.finish_reason == {"type": "stop", "matched": end}
    assert length.finish_reason == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    "penalty", [Penalty(0.5, 0.3, 1.0), Penalty(repetition_penalty=1.5), Penalty(0.2, -0.4, 1.3)], ids=str
)
def test_penalties_count_what_was_sampled_before_a_retract(folder: Path, core: Core, penalty: Penalty) -> None:
    shaping = Shaping(
        frequency_penalty=penalty.frequency_penalty,
        presence_penalty=penalty.presence_penalty,
        repetition_penalty=penalty.repetition_penalty,
    )
    call = replace(PLAIN, temperature=0.0, max_new_tokens=96, shaping=shaping)
    (kept,) = run(core, [call])
    (retracted,) = run(core, [call], retract_at=(11, 40, 41))
    assert retracted.token_ids == kept.token_ids
    assert penalty.check_greedy(rows_of(folder, retracted.token_ids), list(retracted.token_ids)) > 0


def test_seeds_repeat_in_any_company_and_through_retracts(core: Core) -> None:
    shaping = Shaping(0.9, 40, 0.01, 0.3, 0.2, 1.2, ((7, 1.0),), 4, (2,))
    call = replace(PLAIN, shaping=shaping, top_logprobs=3, stop=("never",))
    crowd = [call, replace(call, seed=6), replace(PLAIN, seed=6), *(replace(call, seed=5) for _ in range(5))]
    (alone,) = run(core, [call])
    together = run(core, crowd, retract_at=(3, 9))
    assert [result.token_ids == alone.token_ids for result in together] == [True, False, False, *[True] * 5]


def test_a_request_taken_up_by_its_client_draws_on_under_filters(core: Core) -> None:
    call = replace(PLAIN, shaping=Shaping(top_p=0.8, min_p=0.02))
    (whole,) = run(core, [call])
    (rest,) = run(core, [replace(call, prompt=(*PROMPT, *whole.token_ids[:9]), max_new_tokens=23)])
    assert rest.token_ids == whole.token_ids[9:]


def test_tops_stay_beside_their_tokens(folder: Path, core: Core) -> None:
    call = replace(PLAIN, top_logprobs=4, temperature=0.7, shaping=Shaping(top_p=0.7, presence_penalty=1.0))
    with_tops, without = run(core, [call, replace(call, top_logprobs=0)], retract_at=(5, 6, 20))
    assert without.top_logprobs == ()
    assert without.token_ids == with_tops.token_ids
    rows = (full_logits(folder, list(PROMPT), list(with_tops.token_ids)) / 0.7).log_softmax(-1)
    assert len(with_tops.top_logprobs) == 32
    for row, top, token, logprob in zip(
        rows, with_tops.top_logprobs, with_tops.token_ids, with_tops.logprobs, strict=True
    ):
        assert [value for value, _ in top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
        assert [float(row[other]) for _, other in top] == pytest.approx([value for value, _ in top], abs=1e-4)
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize("shaping", [None, Shaping(top_k=8), Shaping(top_p=0.7), Shaping(min_p=0.1)], ids=str)
def test_draws_of_the_model_follow_its_distribution(folder: Path, core: Core, shaping: Shaping | None) -> None:
    """1000 first tokens by fixed seeds: Pearson's statistic within five standard deviations of its mean."""
    n = 1000
    calls = [replace(PLAIN, seed=seed, max_new_tokens=1, shaping=shaping) for seed in range(n)]
    counts = Counter(result.token_ids[0] for result in run(core, calls))
    probs = full_logits(folder, list(PROMPT), [0])[0].softmax(-1)
    ranked, order = probs.sort(descending=True)
    wish = shaping or Shaping()
    kept = (ranked.cumsum(-1) - ranked <= wish.top_p) & (ranked >= ranked[0] * wish.min_p)
    kept[wish.top_k if wish.top_k > 0 else len(kept) :] = False
    share = (ranked * kept / (ranked * kept).sum()).tolist()
    cells = [(counts[token], n * p) for token, p in zip(order.tolist(), share, strict=True)]
    assert all(count == 0 for count, mean in cells if mean == 0)
    large = [cell for cell in cells if cell[1] >= 5]
    rest = n - sum(mean for _, mean in large)
    if rest >= 5:
        large.append((n - sum(count for count, _ in large), rest))
    free = len(large) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in large)
    assert free >= 4
    assert abs(statistic - free) < 5 * math.sqrt(2 * free)


def test_new_weights_in_the_middle_keep_all_of_it(folder: Path, core: Core, tmp_path: Path) -> None:
    other = make_tiny_moe(tmp_path / "other", seed=9, initializer_range=0.1)
    shaping = Shaping(frequency_penalty=0.5)
    call = replace(PLAIN, temperature=0.0, shaping=shaping, top_logprobs=1, want_experts=True, stop=("never",))
    job = core.job(call, 0)
    core.scheduler.add(job)
    while job.sampled < 12:
        core.step()
    core.retract_all()
    core.load(read_folder(str(other)), "other")
    finished: list[Finished] = []
    while not finished:
        finished = core.step()
    core.load(read_folder(str(folder)), "default")
    result = finished[0][1]
    swap = result.versions[1][1]
    assert (len(result.token_ids), len(result.top_logprobs), swap) == (32, 32, 12)
    assert result.experts is not None
    assert result.experts.shape[0] == len(PROMPT) + 32 - 1
    penalty, ids = Penalty(frequency_penalty=0.5), list(result.token_ids)
    penalty.check_greedy(rows_of(folder, result.token_ids)[:swap], ids)
    penalty.check_greedy(rows_of(other, result.token_ids), ids, start=swap)


def test_nothing_that_a_request_may_wish_ends_the_engine(core: Core) -> None:
    extremes = [
        replace(PLAIN, temperature=1e-6, shaping=Shaping(top_p=1e-9, logit_bias=((3, 1e6), (4, -1e6)))),
        replace(PLAIN, shaping=Shaping(min_p=1.0, top_k=1, top_p=1e-12, repetition_penalty=1e-9)),
        replace(PLAIN, shaping=Shaping(min_new_tokens=32, held_ids=tuple(range(core.model.vocab_size - 1)))),
        replace(PLAIN, top_logprobs=20, temperature=100.0, shaping=Shaping(frequency_penalty=-2.0)),
        replace(PLAIN, shaping=Shaping(top_k=10**9)),
        replace(PLAIN, stop=("x" * 10_000,)),
    ]
    for result in run(core, extremes):
        assert len(result.token_ids) == 32
        assert all(math.isfinite(logprob) for logprob in result.logprobs)
    assert run(core, [extremes[2]])[0].token_ids == (core.model.vocab_size - 1,) * 32


async def test_a_model_without_a_tokenizer_refuses_stop_texts_only(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(folder / name)
    engine = Engine(Core(EngineOptions(str(bare))), num_threads=1)
    loop = asyncio.create_task(engine.run())
    with pytest.raises(RequestRefused, match=r"stop: .*tokenizer\.json is missing"):
        await engine.generate(replace(PLAIN, stop=("x",)))
    result = await asyncio.wait_for(engine.generate(replace(PLAIN, shaping=Shaping(top_k=2))), 60)
    assert len(result.token_ids) == 32
    loop.cancel()
    await asyncio.wait({loop})


def test_the_models_end_token_is_held_back(folder: Path, core: Core) -> None:
    """An end token that a bias makes all but certain comes first when it may."""
    end = int(json.loads((folder / "config.json").read_text())["eos_token_id"])
    shaping = Shaping(logit_bias=((end, 50.0),), min_new_tokens=6, held_ids=(end,))
    (result,) = run(core, [replace(PLAIN, stop_ids=frozenset({end}), shaping=shaping)], retract_at=(4,))
    assert (len(result.token_ids), result.token_ids[-1]) == (7, end)
