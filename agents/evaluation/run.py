"""Plays what an evaluation owes: groups through the same `run_group` as training, a row on disk for every episode that ends.

A plan, a source of tasks and a player go in; rows come out. It waits for the episodes, each of which has a deadline. A first wish to stop
lets what is under way end and begins nothing new; a second one leaves at once. Whatever was recorded by then stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from palestra.agents.evaluation.calls import Meter
from palestra.agents.evaluation.plan import env_seed
from palestra.agents.evaluation.records import RowLog
from palestra.agents.evaluation.summary import fault_text
from palestra.agents.evaluation.types import EvalError, Header, Key, Row, Usage
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.types import AgentError, GroupAssignment, Limits, SessionHandle, SessionHost
from palestra.envs.tasks import TaskSource
from palestra.envs.types import Episode, Message, Task

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often the caller hears how it stands, and how soon a signal is heeded."""


class Draining(AgentError):
    """No session is opened any more: the evaluation is to stop. The episode stays owed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How an evaluation is played; changes no episode."""

    concurrency: int = 16
    """Episodes at a time."""
    max_errors: int = 20
    """So many episodes in a row without a reward end the evaluation: what fails like that fails for all."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How an evaluation stands."""

    planned: int
    finished: int
    """Planned episodes with a row, of this and earlier processes."""
    running: int
    errors: int
    """Of the finished ones: those without a reward."""
    mean: float | None
    """Of the rewards so far."""
    call_seconds: Sequence[float]
    """Of the newest model calls."""
    left_s: float | None
    """Estimate of the time that is left; None before there is one."""


@dataclass(slots=True)
class _Tally:
    """What is recorded. Guarded by the evaluation's condition."""

    rows: dict[Key, Row]
    skipped: set[Key] = field(default_factory=set)
    """Episodes that were not begun because the evaluation was to stop."""
    done: set[Key] = field(default_factory=set)
    """Played by this process."""
    streak: int = 0
    """Episodes without a reward since the last one with one."""
    calls: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    running: set[Key] = field(default_factory=set)


class Evaluation:
    """One process's part of an evaluation. Also the `SessionHost` of its episodes: it wraps the one that opens the real sessions."""

    def __init__(
        self,
        header: Header,
        source: TaskSource,
        host: SessionHost,
        log: RowLog,
        rows: Mapping[Key, Row],
        meter: Meter,
        pace: Pace,
    ) -> None:
        """`rows`: what the folder holds already."""
        self.header, self.pace, self.meter = header, pace, meter
        self._source, self._host, self._log = source, host, log
        self._index = {task.hash: task.index for task in header.tasks}
        self._tally = _Tally(dict(rows))
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._keys: dict[str, Key] = {}
        self.draining = threading.Event()
        """Set: nothing new is begun."""
        self.leaving = threading.Event()
        """Set: nothing is waited for any more, and what ends from here on stays owed."""
        self.fault: str | None = None
        """Why it cannot go on; None where it can."""

    @property
    def rows(self) -> dict[Key, Row]:
        """The row that counts of every finished episode."""
        with self._changed:
            return dict(self._tally.rows)

    def key_of(self, handle: SessionHandle) -> Key:
        """Which episode a session is of."""
        return self._keys[handle.rollout_id]

    # A SessionHost's side.

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`.

        Raises:
            Draining: nothing new is begun.
        """
        key = (assignment.group_id, index)
        if self.draining.is_set():
            with self._changed:
                self._tally.skipped.add(key)
            raise Draining("the evaluation stops; this episode was not begun")
        handle = self._host.open_session(assignment, index, task_id)
        with self._changed:
            self._keys[handle.rollout_id] = key
            self._tally.running.add(key)
        return handle

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """Records the episode, then closes the real session. That one is no part of the result: a fault of it is only logged."""
        self._record(self.key_of(handle), episode, self.meter.take(handle.rollout_id))
        try:
            self._host.close_session(handle, episode)
        except Exception:
            logger.exception("session %s could not be closed", handle.rollout_id)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `SessionHost`."""
        return self._host.conversation(handle)

    # Playing.

    def run(self, keys: Iterable[Key], players: Players, on_tick: Callable[[Standing], None]) -> None:
        """Plays these episodes. Returns when they have ended, or what was under way after a wish to stop; see `fault`."""
        waiting = deque(self._assignments(keys))
        threads = EpisodeThreads(self.pace.concurrency)
        # A group's siblings wait for its first reply: with only as many groups as fit, threads would idle meanwhile.
        at_once = 2 * -(-self.pace.concurrency // self.header.spec.k)
        active: set[threading.Thread] = set()
        while not self.leaving.is_set():
            active = {thread for thread in active if thread.is_alive()}
            while waiting and len(active) < at_once and not self.draining.is_set():
                assignment = waiting.popleft()
                work = threading.Thread(
                    target=self._play, args=(assignment, players, threads), daemon=True, name=assignment.group_id
                )
                active.add(work)
                work.start()
            if not active:
                break
            on_tick(self.standing())
            with self._changed:
                self._changed.wait(TICK_S)
        on_tick(self.standing())

    def _assignments(self, keys: Iterable[Key]) -> list[GroupAssignment]:
        wanted: dict[str, list[int]] = defaultdict(list)
        for task, k in keys:
            wanted[task].append(k)
        spec = self.header.spec
        return [
            GroupAssignment(
                group_id=task,
                group_size=spec.k,
                attempt=0,
                task=self._task(task),
                seed=env_seed(spec.seed, task),
                indices=tuple(indices),
            )
            for task, indices in wanted.items()
        ]

    def _task(self, digest: str) -> Task:
        return self._source[self._index[digest]]

    def _play(self, assignment: GroupAssignment, players: Players, threads: EpisodeThreads) -> None:
        """One group, in its own thread."""
        spec = self.header.spec
        try:
            episodes = run_group(
                assignment, players, self, Limits(max_turns=spec.max_turns, deadline_s=spec.deadline_s), threads
            )
            for k, episode in zip(assignment.rollouts, episodes, strict=True):
                self._record((assignment.group_id, k), episode, Usage())  # one whose session could not be opened
        except EvalError as error:
            logger.error("%s", error)
        except Exception as error:
            logger.exception("group %s", assignment.group_id)
            self._end(f"{type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._changed.notify_all()

    def _record(self, key: Key, episode: Episode, usage: Usage) -> None:
        """Writes the episode's row, unless it has one of this process, was never begun, or ended only because nobody waits for it."""
        with self._changed:
            if key in self._tally.done or key in self._tally.skipped or self.leaving.is_set():
                return
            self._tally.done.add(key)
            self._tally.running.discard(key)
        row = row_of(key, episode, self._task(key[0]), env_seed(self.header.spec.seed, key[0]), usage)
        try:
            self._log.append(row)
        except EvalError as error:
            self._end(str(error))
            raise
        with self._changed:
            tally = self._tally
            before = tally.rows.get(key)
            if before is None or row.scored or not before.scored:
                tally.rows[key] = row
            tally.calls.extend(usage.call_seconds)
            tally.streak = 0 if row.scored else tally.streak + 1
            hopeless = tally.streak >= self.pace.max_errors
            self._changed.notify_all()
        if hopeless:
            self._end(
                f"the last {tally.streak} episodes have no reward; the last one: {fault_text(row)}. "
                "When that is mended: --resume --retry-errors"
            )

    def _end(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.draining.set()

    def standing(self) -> Standing:
        """How it stands."""
        with self._changed:
            tally = self._tally
            planned = set(self.header.keys)
            rows = [row for key, row in tally.rows.items() if key in planned]
            values = [row.reward.value for row in rows if row.reward.value is not None]
            left = len(planned) - len(rows)
            each = (time.monotonic() - self._began) / len(tally.done) if tally.done else None
            return Standing(
                planned=len(planned),
                finished=len(rows),
                running=len(tally.running),
                errors=len(rows) - len(values),
                mean=sum(values) / len(values) if values else None,
                call_seconds=tuple(tally.calls),
                left_s=None if each is None else each * left,
            )


def row_of(key: Key, episode: Episode, task: Task, seed: int, usage: Usage) -> Row:
    """The row of an episode."""
    return Row(
        task=key[0],
        k=key[1],
        task_id=episode.task_id,
        seed=seed,
        messages=episode.messages,
        reward=episode.reward,
        step_rewards=episode.step_rewards,
        stop_reason=episode.stop_reason,
        terminated=episode.terminated,
        truncated=episode.truncated,
        turns=episode.turns,
        answer=task.answer,
        tools=episode.tools,
        tool_calls=episode.tool_calls,
        tool_errors=episode.tool_errors,
        usage=usage,
        seconds=round(episode.seconds, 4),
        ended=now(),
        error=episode.error,
    )


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
