"""A `PlanService` in memory: a schedule with so many places, groups that are judged, and sessions whose model a script plays.

In: calls of a program's runner. Out: assignments while there is room. A test looks at what was said: `verdicts`, `closed`, `masks`.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from dataclasses import replace as changed

from palestra.agents.plans.types import MaskRefusedError, Masks, SessionRow
from palestra.agents.types import GroupAssignment, ReviewRequest, SessionHandle, Verdict
from palestra.envs.types import Episode
from tests.fakes.sessions import FakeSessions

ROW = SessionRow(
    token_ids=(1, 2, 3, 4, 5),
    sources=("prompt", "prompt", "sampled", "sampled", "close"),
    logprobs=(None, None, -0.5, -0.25, None),
    spans=((3, 2, 4),),
)


@dataclass
class FakePlanService(FakeSessions):
    """Sessions of group g are g-INDEX; keys are as in `FakeSessions`, so groups of one test share them."""

    places: int = 4
    """Groups that may be open at a time."""
    size: int = 2
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    episodes: dict[tuple[str, int], Episode] = field(default_factory=dict)
    """By rollout id and attempt."""
    masks: dict[str, Masks | None] = field(default_factory=dict)
    given: list[GroupAssignment] = field(default_factory=list)
    extra: list[GroupAssignment | ReviewRequest] = field(default_factory=list)
    """Handed out before anything else."""
    refuse_open: bool = False
    _open: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def work(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment | ReviewRequest | None:
        until = time.monotonic() + wait_s
        with self.changed:
            while not self.extra and len(self._open) >= self.places:
                if (left := until - time.monotonic()) <= 0:
                    return None
                self.changed.wait(left)
            if self.extra:
                return self.extra.pop(0)
            number = next(self._numbers)
            assignment = GroupAssignment(f"g{number}", self.size, 0, number % 6, number)
            self._open.add(assignment.group_id)
            self.given.append(assignment)
            return assignment

    def skip(self, group_id: str, reason: str) -> None:
        self.verdict(group_id, Verdict(False, reason))

    def verdict(self, group_id: str, verdict: Verdict) -> None:
        with self.changed:
            self.verdicts.setdefault(group_id, verdict)
            if not verdict.keep:
                self._open.discard(group_id)
            self.changed.notify_all()

    def train(self) -> None:
        """The groups that were kept are trained, and make room."""
        with self.changed:
            self._open -= {group for group, verdict in self.verdicts.items() if verdict.keep}
            self.changed.notify_all()

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        if self.refuse_open:
            from palestra.agents.types import AgentError

            raise AgentError("no session today")
        return changed(self.handle(index, assignment.group_id), attempt=assignment.attempt)

    def close_session(self, handle: SessionHandle, episode: Episode, masks: Masks | None = None) -> None:
        if masks is not None:
            for mask in masks:
                if len(mask) != len(ROW) or any(
                    one and source != "sampled" for one, source in zip(mask, ROW.sources, strict=True)
                ):
                    raise MaskRefusedError("mask 1 on a token that the engine did not sample")
        with self.changed:
            self.episodes[handle.rollout_id, handle.attempt] = episode
            self.masks[handle.rollout_id] = masks

    def rows(self, handle: SessionHandle) -> tuple[SessionRow, ...]:
        return (ROW,)

    def waits(self) -> str:
        return "workers wait for the trainer"

    def committed_step(self) -> int:
        return 7
