"""What a run that is resumed makes of the evaluations that it finds. Called before its processes start, so nobody else writes.

The desk and the newest checkpoint's step go in. Evaluations of later steps are void: their weights are no part of the run any more. One
that was cut goes on where its weights are still kept; on the training's own engines they are not, so it is void too, and played
anew if its step is published again. Nothing is waited for but the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.types import Done, Due, EvalState


def settle(desk: EvalDesk, newest_step: int, clock: Callable[[], float] = time.time) -> list[Done]:
    """Returns what was found void, in the order of steps. `newest_step`: of the checkpoint that the run goes on from; -1: from none.

    Raises:
        EvaluatingError: the disk refused.
    """
    voided = []
    for due in desk.asked():
        if (reason := _void(desk, due, newest_step)) is not None:
            done = Done(due.step, due.version, due.on, EvalState.VOID, clock(), reason)
            desk.void(due, done)
            voided.append(done)
    return voided


def _void(desk: EvalDesk, due: Due, newest_step: int) -> str | None:
    """Why it cannot stand; None where it can."""
    if due.step > newest_step:
        return f"the run goes on from step {newest_step}" if newest_step >= 0 else "the run begins again"
    if desk.done(due.step) is not None or desk.weights(due.step).is_dir() or due.refused:
        return None
    return "the run ended in the middle, and its engines do not have these weights any more"
