"""Draws of the embedded engine: distributions bent by penalties, bias and filters, against an account of them in plain numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from palestra.server.embedded.sampling import Wish, draw, uniform
from palestra.server.embedded.shaping import HEAD, bend, cut, weights
from palestra.server.embedded.types import Shaping


def expected(logits: Sequence[float], temperature: float, shaping: Shaping, sampled: Sequence[int]) -> list[float]:
    """The distribution in the words of SGLang's sampler, one number after another."""
    bent = list(logits)
    for token in set(sampled):
        bent[token] -= shaping.frequency_penalty * sampled.count(token) + shaping.presence_penalty
        factor = shaping.repetition_penalty
        bent[token] = bent[token] * factor if bent[token] < 0 else bent[token] / factor
    if len(sampled) < shaping.min_new_tokens:
        for token in shaping.held_ids:
            bent[token] = -math.inf
    for token, bias in shaping.logit_bias:
        bent[token] += bias
    top = max(bent)
    mass = [math.exp((value - top) / temperature) for value in bent]
    probs = [value / sum(mass) for value in mass]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, before = [0.0] * len(probs), 0.0
    for rank, token in enumerate(order):
        in_count = shaping.top_k == -1 or rank < shaping.top_k
        if in_count and before <= shaping.top_p and probs[token] >= shaping.min_p * probs[order[0]]:
            kept[token] = probs[token]
        before += probs[token]
    return [value / sum(kept) for value in kept]


def some_logits(seed: int, size: int = 60) -> list[float]:
    draws = random.Random(seed)
    # As the tensor holds them, so that both accounts begin with the same numbers.
    return torch.tensor([draws.gauss(0.0, 2.0) for _ in range(size)]).tolist()


SHAPINGS = [
    Shaping(top_k=1),
    Shaping(top_k=7),
    Shaping(top_k=1000),
    Shaping(top_p=0.6),
    Shaping(top_p=1e-9),
    Shaping(min_p=0.2),
    Shaping(min_p=1.0),
    Shaping(top_k=20, top_p=0.8, min_p=0.05),
    Shaping(frequency_penalty=1.1),
    Shaping(presence_penalty=-1.5),
    Shaping(repetition_penalty=1.7),
    Shaping(repetition_penalty=0.5),
    Shaping(logit_bias=((3, 4.0), (11, -100.0))),
    Shaping(min_new_tokens=9, held_ids=(0, 1, 2, 3, 4, 5)),
    Shaping(min_new_tokens=8, held_ids=(0, 1, 2, 3, 4, 5)),
    Shaping(0.9, 30, 0.01, 0.4, 0.3, 1.2, ((2, 3.0), (9, 1.0)), 20, (2, 8)),
]


@pytest.mark.parametrize("shaping", SHAPINGS, ids=range(len(SHAPINGS)))
def test_weights_are_those_of_the_formula(shaping: Shaping) -> None:
    sampled = [3, 9, 9, 9, 11, 40, 40, 3]
    for seed in range(5):
        logits = some_logits(seed)
        for temperature in (0.6, 1.0, 1.8):
            found = weights(torch.tensor(logits), temperature, shaping, sampled)
            wanted = expected(logits, temperature, shaping, sampled)
            assert (found / found.sum()).tolist() == pytest.approx(wanted, abs=1e-6)


def test_each_wish_bends_the_distribution() -> None:
    """The comparison above cannot pass by both accounts leaving a wish out."""
    plain = expected(some_logits(0), 1.0, Shaping(), [3, 9, 9])
    for shaping in SHAPINGS:
        same = expected(some_logits(0), 1.0, shaping, [3, 9, 9]) == pytest.approx(plain, abs=1e-4)
        assert same == (shaping == Shaping(top_k=1000))


def test_greedy_takes_the_best_of_the_bent_logits() -> None:
    shaping = Shaping(presence_penalty=2.0, logit_bias=((1, -1.5),), top_p=0.1)
    assert weights(torch.tensor([4.0, 4.5, 2.8, 1.0]), 0.0, shaping, [0]).tolist() == [0, 1, 0, 0]
    assert weights(torch.tensor([4.0, 4.0, 2.8, 1.0]), 0.0, shaping, [0]).tolist() == [0, 0, 1, 0]
    for number in (0.0, 0.99):
        assert draw(torch.tensor([[4.0, 4.0, 2.8, 1.0]]), [Wish(0.0, number, shaping=shaping, sampled=[0])]).ids == [2]


def test_a_wide_nucleus_is_ranked_to_its_end() -> None:
    """A flat distribution over four times the ids that are ranked first."""
    probs = torch.linspace(1.0, 1.1, 4 * HEAD).softmax(-1)
    for top_p in (0.1, 0.3, 0.9):
        kept = cut(probs, Shaping(top_p=top_p))
        ranked = probs.sort(descending=True).values.double()
        assert int((kept > 0).sum()) == int((ranked.cumsum(-1) - ranked <= top_p).sum())
        assert torch.equal(kept[kept > 0], probs[-int((kept > 0).sum()) :])


def test_what_is_bent_is_a_copy() -> None:
    logits = torch.tensor(some_logits(1))
    before = logits.clone()
    bend(logits, SHAPINGS[-1], [1, 2, 3])
    weights(logits, 0.0, SHAPINGS[-1], [1, 2, 3])
    assert torch.equal(logits, before)


def chi_square(ids: list[int], probs: list[float]) -> float:
    """Pearson's statistic, less its mean and over its standard deviation; cells expected under 5 times are one cell."""
    cells = [(ids.count(token), len(ids) * p) for token, p in enumerate(probs)]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + [(sum(c for c, _ in rare), sum(e for _, e in rare))]
    cells = [cell for cell in cells if cell[1] > 0]
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    return (statistic - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1))


@pytest.mark.parametrize("shaping", [None, *SHAPINGS[-4:]])
def test_draws_follow_the_distribution(shaping: Shaping | None) -> None:
    """1500 draws by fixed seeds, against the formula's distribution and, to see that it could fail, against one of another temperature."""
    n, logits, sampled = 1500, some_logits(3), [3, 9, 9]
    wishes = [Wish(0.8, uniform(seed, 0), shaping=shaping, sampled=sampled) for seed in range(n)]
    drawn = draw(torch.tensor(logits).repeat(n, 1), wishes)
    probs = expected(logits, 0.8, shaping or Shaping(), sampled)
    assert all(probs[token] > 0 for token in drawn.ids)
    assert abs(chi_square(drawn.ids, probs)) < 5
    assert chi_square(drawn.ids, expected(logits, 1.1, shaping or Shaping(), sampled)) > 10


def test_logprobs_and_tops_are_the_models_own_whatever_bends_the_draw() -> None:
    logits, temperature = some_logits(4), 0.7
    own = (torch.tensor(logits) / temperature).log_softmax(-1)
    wishes = [
        Wish(temperature, uniform(seed, 1), top=seed % 4, shaping=shaping, sampled=[3, 9, 9])
        for seed, shaping in enumerate([None, *SHAPINGS])
    ]
    drawn = draw(torch.tensor(logits).repeat(len(wishes), 1), wishes)
    assert drawn.logprobs == pytest.approx(own[drawn.ids].tolist(), abs=1e-6)
    best = own.sort(descending=True)
    for wish, top in zip(wishes, drawn.tops, strict=True):
        assert [token for _, token in top] == best.indices[: wish.top].tolist()
        assert [logprob for logprob, _ in top] == pytest.approx(best.values[: wish.top].tolist(), abs=1e-6)


def test_tops_of_a_tiny_vocabulary_and_of_the_impossible() -> None:
    (top,) = draw(torch.tensor([[1.0, float("-inf"), 0.0]]), [Wish(1.0, 0.1, top=20)]).tops
    assert [token for _, token in top] == [0, 2, 1]
    assert all(math.isfinite(logprob) for logprob, _ in top)


def test_company_changes_no_draw() -> None:
    rows = torch.tensor([some_logits(seed) for seed in range(12)])
    shapings = [None, *SHAPINGS[:11]]
    wishes = [Wish(seed % 3 / 2, uniform(seed, 5), top=2, shaping=shapings[seed], sampled=[1]) for seed in range(12)]
    together = draw(rows, wishes)
    for row, wish in enumerate(wishes):
        alone = draw(rows[row : row + 1], [wish])
        assert alone.ids[0] == together.ids[row]
        assert alone.tops[0] == together.tops[row]


def test_a_model_that_gives_no_numbers_is_a_fault() -> None:
    with pytest.raises(ValueError, match="finite"):
        draw(torch.full((1, 4), float("nan")), [Wish(1.0, 0.5)])
