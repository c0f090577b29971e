"""Words between a trainer, whose weights are evaluated, and the evaluator, which plays.

Flows: the trainer asks with a `Due` for each publish that is to be evaluated; the evaluator answers with a `Done`. Both are files of
`evals/step_N`, and a `Done` is also a line of `evals.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from palestra.server.types import ServerError

Ways: TypeAlias = Literal["job", "engines", "hold"]
"""On which engines: see `[eval] on`."""


class EvaluatingError(ServerError):
    """An evaluation that cannot be played, or whose files cannot be written; says which and why. It never ends the training."""


class EvalState(StrEnum):
    """What became of an evaluation."""

    DONE = "done"
    """All of its episodes have ended; some may be without a reward."""
    LATE = "late"
    """Its time was over before all of them had."""
    FAILED = "failed"
    """It could not be played, or not to its end."""
    REFUSED = "refused"
    """It was never begun: too many were waiting, or the weights could not be kept."""
    VOID = "void"
    """It was cut by an end of the run and could not go on with the same weights, or the run went back behind its step."""


@dataclass(frozen=True, slots=True)
class Due:
    """One policy version that is to be evaluated."""

    step: int
    """The train step after which it was published."""
    version: int
    on: Ways
    asked_at: float
    """Unix seconds: when its publish had come through."""
    refused: str = ""
    """Why it is not to be played after all; "": it is."""


@dataclass(frozen=True, slots=True)
class Done:
    """How an evaluation ended."""

    step: int
    version: int
    on: Ways
    state: EvalState
    at: float
    """Unix seconds."""
    reason: str = ""
    """Of every state but done."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """eval/NAME/... and time/eval_s; empty where nothing was played."""
