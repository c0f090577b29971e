"""Advantages against vectors worked out by hand and a second, naive implementation: estimators, credit by turns, the user's own, GAE."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from palestra.server.types import TrainingSample
from palestra.trainer import config
from palestra.trainer.advantages import ESTIMATORS, batch_advantages, gae, group_advantages
from palestra.trainer.advantages.credit import own_runs, returns_to_go
from palestra.trainer.advantages.own import load_advantage
from palestra.trainer.config import AlgoConfig
from palestra.trainer.types import RowAdvantage, TrainerError
from tests.trainrows import row


def found(rows: Sequence[TrainingSample], **algo: object) -> list[RowAdvantage | None]:
    return batch_advantages(rows, AlgoConfig.model_validate(algo)).rows


def values(rows: Sequence[TrainingSample], **algo: object) -> list[float | None]:
    return [None if each is None else each.value for each in found(rows, **algo)]


def by_token(rows: Sequence[TrainingSample], **algo: object) -> list[list[float]]:
    out = []
    for each in found(rows, **algo):
        assert each is not None
        assert each.tokens is not None
        out.append(each.tokens.tolist())
    return out


ROOT = 1 / math.sqrt(2)


@pytest.mark.parametrize(
    ("estimator", "expected", "baselines"),
    [
        # rewards: group x = 1, 3; group y = 5; group z = 0, 0, 6
        ("grpo", [-ROOT, ROOT, 0, -1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)], [2, 2, 5, 2, 2, 2]),
        ("dr_grpo", [-1, 1, 0, -2, -2, 4], [2, 2, 5, 2, 2, 2]),
        ("rloo", [-2, 2, 0, -3, -3, 6], [3, 1, 5, 3, 3, 0]),
        ("reinforce", [1, 3, 5, 0, 0, 6], [0] * 6),
        # the batch: mean 2.5, squared differences 2.25 + 0.25 + 6.25 + 6.25 + 6.25 + 12.25 = 33.5, divided by 5: 6.7
        ("reinforce_pp", [each / math.sqrt(6.7) for each in (-1.5, 0.5, 2.5, -2.5, -2.5, 3.5)], [2.5] * 6),
        # differences to the group: squares 1 + 1 + 0 + 4 + 4 + 16 = 26, divided by 5: 5.2
        (
            "reinforce_pp_baseline",
            [each / math.sqrt(5.2) for each in (-1, 1, 0, -2, -2, 4)],
            [2, 2, 5, 2, 2, 2],
        ),
    ],
)
def test_golden_vectors(estimator: str, expected: list[float], baselines: list[float]) -> None:
    told = [("a", "x", 1.0), ("b", "x", 3.0), ("c", "y", 5.0), ("d", "z", 0.0), ("e", "z", 0.0), ("f", "z", 6.0)]
    order = [3, 0, 2, 5, 1, 4]  # groups are found by id, wherever their rows lie
    rows = [row(told[i][0], "ppSS", told[i][2], group=told[i][1]) for i in order]
    assert values(rows, estimator=estimator) == pytest.approx([expected[i] for i in order])
    assert [each.baseline for each in found(rows, estimator=estimator) if each] == pytest.approx(
        [baselines[i] for i in order]
    )


def naive(rewards: dict[str, tuple[str, float]], estimator: str) -> dict[str, float]:
    """The formulas again, a rollout at a time."""

    def divided(value: float, among: list[float]) -> float:
        return value / statistics.stdev(among) if len(among) > 1 and max(among) - min(among) > 1e-9 else 0.0

    out = {}
    everyone = [reward for _, reward in rewards.values()]
    means = {
        name: statistics.fmean(r for group, r in rewards.values() if group == mine)
        for name, (mine, _) in rewards.items()
    }
    residuals = [reward - means[name] for name, (_, reward) in rewards.items()]
    for name, (mine, reward) in rewards.items():
        group = [r for other, (g, r) in rewards.items() if g == mine]
        others = [r for other, (g, r) in rewards.items() if g == mine and other != name]
        out[name] = {
            "grpo": divided(reward - means[name], group),
            "dr_grpo": reward - means[name],
            "rloo": reward - statistics.fmean(others) if others else 0.0,
            "reinforce": reward,
            "reinforce_pp": divided(reward - statistics.fmean(everyone), everyone),
            "reinforce_pp_baseline": divided(reward - means[name], residuals),
        }[estimator]
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.none() | st.integers(-4, 4), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from(sorted(ESTIMATORS)),
)
def test_each_rollout_counts_once_as_in_the_naive_form(
    told: list[tuple[str, int | None, int, bool]], estimator: str
) -> None:
    rows, rewards = [], {}
    for i, (group, reward, count, masked) in enumerate(told):
        letters = "ppxx" if masked else "ppSS"
        scored = None if reward is None else reward / 4
        rows += [row(f"r{i}", letters, scored, group=group, branch=branch) for branch in range(count)]
        if scored is not None and not masked:
            rewards[f"r{i}"] = (group, scored)
    expected = naive(rewards, estimator)
    assert values(rows, estimator=estimator) == [
        pytest.approx(expected[each.rollout_id]) if each.rollout_id in expected else None for each in rows
    ]


def test_a_rollout_of_three_rows_counts_once() -> None:
    """The vector of the three rows: counted by row it would be -0.75 and 0.25."""
    rows = [row("A", "pSSSSS", 0.0), *(row("B", "p" + "S" * n, 1.0, branch=i) for i, n in enumerate((10, 20, 70)))]
    assert values(rows, estimator="dr_grpo") == [-0.5, 0.5, 0.5, 0.5]
    assert values(rows, std_normalise=False) == [-0.5, 0.5, 0.5, 0.5]
    assert values(rows, estimator="rloo") == [-1, 1, 1, 1]
    assert values(rows, estimator="reinforce_pp") == pytest.approx([-ROOT, ROOT, ROOT, ROOT])
    assert [a.value for a in group_advantages(rows, std_normalise=True) if a] == pytest.approx([-ROOT] + [ROOT] * 3)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS.keys() - {"reinforce"}))
def test_equal_rewards_are_worth_exactly_nothing(estimator: str) -> None:
    """Also where sums of turns differ by a rounding, which a division by its own size would make large."""
    assert values([row(name, "ppSS", 0.1) for name in "abc"], estimator=estimator) == [0.0, 0.0, 0.0]
    assert values([row("alone", "ppSS", 7.0)], estimator=estimator) == [0.0]
    assert 0.1 + 0.2 != 0.3
    rows = [row("a", "ppSSoSS", 0.1 + 0.2, turns=(0.0, 0.1)), row("b", "ppSSoSS", 0.3, turns=(0.0, 0.1))]
    assert values(rows, estimator=estimator) == [0.0, 0.0]


def test_a_batch_without_anyone_to_train_has_no_advantages() -> None:
    for estimator in ESTIMATORS:
        assert values([row("a", "ppuu", None), row("b", "ppxx", 1.0)], estimator=estimator) == [None, None]
        assert values([], estimator=estimator, turn_discount=0.5) == []


def test_the_configuration_knows_every_estimator() -> None:
    assert tuple(ESTIMATORS) == config.ESTIMATORS


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"estimator": "ppo"}, "not built: algo.estimator = 'ppo'; use 'grpo' or 'dr_grpo'"),
        ({"estimator": "rloo", "std_normalise": False}, "algo.std_normalise has no effect when algo.estimator is"),
        ({"advantage": "a:b", "estimator": "rloo"}, "algo.estimator has no effect when algo.advantage is given"),
        ({"advantage": "a:b", "turn_discount": 0.9}, "algo.turn_discount has no effect when algo.advantage is given"),
        ({"turn_discount": 0.0}, "greater than 0"),
        ({"turn_discount": 1.1}, "less than or equal to 1"),
        ({"reduction": "constant"}, "algo.reduction_tokens must be given"),
        ({"reduction_tokens": 5}, "algo.reduction_tokens needs algo.reduction = 'constant'"),
        ({"reduction": "sum"}, "'rollout_mean', 'token_mean', 'prompt_mean' or 'constant'"),
    ],
)
def test_what_makes_no_sense_is_refused(data: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgoConfig.model_validate(data)
    assert told in str(caught.value)


# Credit by turns.


def test_returns_to_go() -> None:
    assert returns_to_go([0.5, 0.0, 1.0], 0.5) == [0.75, 0.5, 1.0]
    assert returns_to_go([1.0, 2.0, 3.0], 1.0) == [6.0, 5.0, 3.0]


def test_each_turn_has_what_followed_it_less_the_same_turn_of_the_others() -> None:
    """A: turns gave 0.5, 0, 0 and the end 1, so 0.5, 0, 1; with discount 0.5 what followed is 0.75, 0.5, 1. B ended after one turn
    with -0.5, which is also what A's later turns are compared with."""
    rows = [row("A", "ppSSoSooSS", 1.5, turns=(0.5, 0.0, 0.0)), row("B", "pSS", -0.5, turns=(0.0,))]
    told = by_token(rows, estimator="dr_grpo", turn_discount=0.5)
    assert told == [[0, 0, 0.625, 0.625, 0, 0.5, 0, 0, 0.75, 0.75], [0, -0.625, -0.625]]
    assert values(rows, estimator="dr_grpo", turn_discount=0.5) == pytest.approx(
        [(4 * 0.625 - 0 + 0.5) / 5 + 0.05, -0.625]
    )
    told = by_token(rows, estimator="rloo", turn_discount=0.5)
    assert told == [[0, 0, 1.25, 1.25, 0, 1, 0, 0, 1.5, 1.5], [0, -1.25, -1.25]]
    told = by_token(rows, estimator="reinforce", turn_discount=0.5)
    assert told == [[0, 0, 0.75, 0.75, 0, 0.5, 0, 0, 1, 1], [0, -0.5, -0.5]]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_undiscounted_final_scores_are_the_outcome_s_advantage_at_every_turn(estimator: str) -> None:
    rows = [
        row("a", "pSoSSoS", 1.0, turns=(0.0, 0.0, 0.0)),
        row("b", "pSS", 0.0, turns=(0.0,)),
        row("c", "pSoS", 0.25, turns=(0.0, 0.0)),
        row("d", "pSoS", 0.5, group="h", turns=(0.0, 0.0)),
    ]
    outcome = values(rows, estimator=estimator)
    for each, expected, told in zip(rows, outcome, by_token(rows, estimator=estimator, turn_discount=1.0), strict=True):
        assert told == pytest.approx([expected if on else 0.0 for on in each.loss_mask])
    assert values(rows, estimator=estimator, turn_discount=1.0) == pytest.approx(outcome)


def test_turns_in_several_branches_cannot_be_told_apart_and_shared_ones_belong_to_their_row() -> None:
    forks = [
        row("A", "pSoSS", 4.0, branch=0, turns=(1.0, 0.0, 1.0, 0.0)),
        row("A", "psoooSoS", 4.0, branch=1, turns=(1.0, 0.0, 1.0, 0.0)),
    ]
    algo = AlgoConfig.model_validate({"estimator": "reinforce", "turn_discount": 0.5})
    told = batch_advantages(forks, algo)
    assert told.metrics == {"train/turn_credit/untold": 1.0}
    assert told.rows == [RowAdvantage("A", branch, 4.0, 0.0, 0.0) for branch in (0, 1)]


def test_masked_parts_do_not_split_a_turn_and_a_close_does_not_join_two() -> None:
    assert own_runs(row("a", "pxxSSocSlsS", 1.0)) == [(1, 5), (7, 9), (10, 11)]
    rows = [row("a", "pxxSSocS", 1.0, turns=(0.25, 0.0))]
    assert by_token(rows, estimator="reinforce", turn_discount=1.0) == [[0, 1, 1, 1, 1, 0, 0, 0.75]]
    assert values(rows, estimator="reinforce", turn_discount=1.0) == pytest.approx([(1 + 1 + 0.75) / 3])


@pytest.mark.parametrize("turns", [(), (0.5,), (0.5, 0.0, 0.0), (None, 0.5), (math.nan, 0.0)])
def test_turns_that_cannot_be_told_apart_have_their_outcome_and_are_counted(turns: tuple[float | None, ...]) -> None:
    rows = [
        row("a", "pSoSS", 2.0, turns=turns),
        row("b", "pSoS", 1.0, turns=(1.0, 0.0)),
        row("one turn", "pS", 0.0, turns=()),
    ]
    said = batch_advantages(rows, AlgoConfig.model_validate({"estimator": "reinforce", "turn_discount": 1.0}))
    assert said.metrics == {"train/turn_credit/untold": 1.0}
    assert said.rows[0] == RowAdvantage("a", 0, 2.0, 0.0, 0.0)
    assert said.rows[1] is not None
    assert said.rows[1].tokens is not None
    assert said.rows[1].tokens.tolist() == [0, 1, 0, 0]
    dr = batch_advantages(rows, AlgoConfig.model_validate({"estimator": "dr_grpo", "turn_discount": 1.0}))
    assert dr.rows[0] == RowAdvantage("a", 0, 1.0, 1.0, 1.0)


# Generalised advantage estimation.


def test_gae_by_hand() -> None:
    """Surprises 1 + 0.5 - 0.5, 0.25 - 1, 2 - 0.5; each adds a quarter of the next advantage."""
    rewards, critic = np.array([1.0, 0.0, 2.0]), np.array([0.5, 1.0, 0.5])
    advantages, returns = gae(rewards, critic, discount=0.5, trace=0.5)
    assert advantages.tolist() == [0.90625, -0.375, 1.5]
    assert returns.tolist() == [1.40625, 0.625, 2.0]
    cut, _ = gae(rewards, critic, discount=0.5, trace=0.5, last_value=2.0)
    assert cut.tolist() == [0.96875, -0.125, 2.5]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=7),
    st.floats(0.1, 1),
    st.floats(0, 1),
    st.integers(-2, 2),
)
def test_gae_is_the_weighted_mean_of_all_horizons(
    told: list[tuple[int, int]], discount: float, trace: float, last: int
) -> None:
    """The definition: the sum over horizons of (1 - trace) trace^(n-1) times the n-step advantage, the longest one having the rest."""
    rewards, critic = (np.array(each, dtype=np.float64) for each in zip(*told, strict=True))
    advantages, returns = gae(rewards, critic, discount=discount, trace=trace, last_value=last)
    ahead = [*critic[1:].tolist(), float(last)]
    for t in range(len(told)):
        left, expected = len(told) - t, 0.0
        for n in range(1, left + 1):
            sum_of = sum(discount**i * rewards[t + i] for i in range(n)) + discount**n * ahead[t + n - 1] - critic[t]
            expected += (trace ** (n - 1)) * ((1 - trace) if n < left else 1.0) * sum_of
        assert advantages[t] == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx(advantages + critic)


def test_gae_wants_a_value_per_reward() -> None:
    with pytest.raises(ValueError, match=r"rewards \(2,\) and values \(3,\)"):
        gae(np.zeros(2), np.zeros(3), discount=1.0, trace=1.0)


# The user's own.


def entry(folder: Path, code: str, name: str = "advantage") -> str:
    path = folder / "mine.py"
    path.write_text(f"import numpy as np\n{code}\n")
    return f"{path}:{name}"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("advantage = 3", "it is int, nothing that can be called"),
        ("def other(rows): return [0.0 for _ in rows]", "has no 'advantage'"),
        ("import nosuchpackage", "it imports 'nosuchpackage', which is not installed"),
        ("raise RuntimeError('boom')", "importing it failed: RuntimeError: boom"),
        ("def advantage(rows): return [1 / 0 for _ in rows]", "it raised ZeroDivisionError"),
        ("def advantage(): return []", "it raised TypeError"),
        ("def advantage(rows): return 1.0", "it raised TypeError"),
        ("def advantage(rows): return [0.0]", "1 answers for 5 rows"),
        ("def advantage(rows): return [np.zeros(2) for _ in rows]", r"row a/0 branch 0: shape \(2,\)"),
        ("def advantage(rows): return ['x' for _ in rows]", "row a/0 branch 0: str is no number"),
        ("def advantage(rows): return [float('nan') for _ in rows]", "row a/0 branch 0: it is not finite"),
        ("def advantage(rows): return [np.full(5, np.inf) for _ in rows]", "it is not finite"),
        ("class advantage:\n    def __init__(self, x): pass", "the class cannot be made without arguments"),
    ],
)
def test_a_wrong_advantage_of_the_user_s_is_named_when_it_is_loaded(tmp_path: Path, code: str, told: str) -> None:
    name = entry(tmp_path, code)
    with pytest.raises(TrainerError, match=told) as caught:
        load_advantage(name)
    assert str(caught.value).startswith(f"algo.advantage {name!r}")


def test_a_missing_advantage_is_named() -> None:
    with pytest.raises(TrainerError, match=r"algo\.advantage 'no\.such:thing': there is no module 'no'"):
        load_advantage("no.such:thing")


def test_an_advantage_of_the_user_s(tmp_path: Path) -> None:
    code = (
        "def advantage(rows):\n"
        "    return [None if r.reward < 0 else r.reward * r.loss_mask if r.rollout_id == 'b' else 2 * r.reward for r in rows]"
    )
    rows = [
        row("a", "ppSS", 1.0),
        row("b", "pSoSS", 3.0),
        row("unscored", "puu", None),
        row("masked", "pxx", 9.0),
        row("refused", "pS", -1.0),
    ]
    said = found(rows, advantage=entry(tmp_path, code))
    assert [each and each.value for each in said] == [2.0, 3.0, None, None, None]
    assert said[1] is not None
    assert said[1].tokens is not None
    assert said[1].tokens.tolist() == [0, 3, 0, 3, 3]


def test_an_advantage_that_fails_later_is_named_with_its_row(tmp_path: Path) -> None:
    """The trial has rewards of at most 1."""
    code = (
        "class Advantage:\n"
        "    def __call__(self, rows): return [float('nan') if r.reward > 1 else np.array(r.reward) for r in rows]"
    )
    with pytest.raises(TrainerError, match="row big/0 branch 0: it is not finite"):
        found([row("small", "pS", 0.5), row("big", "pS", 2.0)], advantage=entry(tmp_path, code, "Advantage"))


def test_what_lies_behind_the_mask_of_an_own_advantage_does_not_matter(tmp_path: Path) -> None:
    code = "def advantage(rows): return [np.where(r.loss_mask == 1, 1.0, np.nan) for r in rows]"
    (said,) = found([row("a", "ppSS", 1.0)], advantage=entry(tmp_path, code))
    assert said is not None
    assert said.tokens is not None
    assert said.tokens.tolist() == [0, 0, 1, 1]
