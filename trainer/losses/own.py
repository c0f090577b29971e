"""Finds a loss of the user's by its name, and tries it before anything is trained with it.

In: "package.module:name", or "folder/file.py:name" from the current folder. Out: a `Loss`. It waits for the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from palestra.agents.python import load_entry
from palestra.agents.types import AgentError
from palestra.trainer.types import Loss, TrainerError

WHAT = "algo.loss"
FORM = "write def loss(logprobs, batch) -> (loss, sums), see palestra.trainer.types.Loss"


@cache
def load_loss(entry: str, beside: frozenset[str] = frozenset()) -> Loss:
    """The function that `entry` names, or an object of the class, made without arguments. Found and tried once per process.

    `beside`: which of `ref_logprobs` and `entropy` its batches will have.

    Raises:
        TrainerError: there is no such name, or it does not do what a `Loss` does; says what is wrong.
    """
    try:
        made = load_entry(entry, WHAT)
    except AgentError as error:
        raise TrainerError(str(error)) from error.__cause__
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise _wrong(entry, f"the class cannot be made without arguments: {_text(error)}") from error
    if not callable(made):
        raise _wrong(entry, f"it is {type(made).__name__}, nothing that can be called: {FORM}")
    _try(entry, made, beside)
    return made  # type: ignore[no-any-return]  # callable(), which mypy narrows to Any here


def _try(entry: str, loss: Any, beside: frozenset[str]) -> None:
    """One call on two short rows, the second with a masked token: the gradient must be finite, and none where the weight is 0."""
    logprobs, batch = _trial(beside)
    try:
        answer = loss(logprobs, batch)
    except Exception as error:
        raise _wrong(entry, f"a trial on two rows raised {_text(error)}") from error
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _wrong(entry, f"it returned {type(answer).__name__}, no pair: {FORM}")
    value, sums = answer
    if not isinstance(value, torch.Tensor) or value.shape != () or not torch.isfinite(value):
        raise _wrong(entry, f"its loss is {value!r}, no finite tensor without dimensions")
    if not value.requires_grad:
        raise _wrong(entry, "its loss has no gradient: it must be made of logprobs")
    if not isinstance(sums, Mapping):
        raise _wrong(entry, f"its sums are {type(sums).__name__}, no mapping of tensors")
    for name, each in sums.items():
        if not isinstance(name, str) or not isinstance(each, torch.Tensor) or each.shape != () or each.requires_grad:
            raise _wrong(entry, f"its sum {name!r} must be a tensor without dimensions and without gradient")
    (gradient,) = torch.autograd.grad(value, logprobs, allow_unused=True)
    if gradient is None:
        raise _wrong(entry, "its loss has no gradient: it must be made of logprobs")
    if not torch.isfinite(gradient).all():
        raise _wrong(entry, "its gradient is not finite")
    if gradient[batch["weights"] == 0].any():
        raise _wrong(entry, "its gradient reaches tokens of weight 0, which are not trained")


def _trial(beside: frozenset[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = torch.tensor([[0.0, -0.5, -1.5, -0.1], [0.0, -2.0, -0.7, 0.0]], requires_grad=True)
    weights = torch.tensor([[0.0, 0.2, 0.2, 0.1], [0.0, 0.3, 0.2, 0.0]])
    moved = torch.tensor([[0.0, 0.1, -0.2, 0.0], [0.0, 0.3, 0.0, 0.0]])
    old = (logprobs.detach() + moved) * (weights != 0)
    batch = {
        "token_ids": torch.tensor([[1, 2, 3, 4], [1, 2, 3, 0]]),
        "lengths": torch.tensor([4, 3]),
        "weights": weights,
        "rollout_logprobs": old + 0.05 * (weights != 0),
        "old_logprobs": old,
        "advantages": torch.tensor([[1.0] * 4, [-1.0] * 4]),
        "temperature": torch.ones(2),
    }
    if "ref_logprobs" in beside:
        batch["ref_logprobs"] = old - 0.1 * (weights != 0)
    if "entropy" in beside:
        batch["entropy"] = -logprobs * (weights != 0)
    return logprobs, batch


def _wrong(entry: str, why: str) -> TrainerError:
    return TrainerError(f"{WHAT} {entry!r}: {why}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
