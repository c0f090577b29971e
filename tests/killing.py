"""kill -9 at random points of a real run, and what must hold after it went on: laws 3 and 6, and that no task is lost or repeated.

In: a job, whom to kill, and a generator that chooses when. A point is a progress of the run (turns on record, a step's records, groups in
the buffer), and a short random time after it. Out: a line per kill, for tables.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from palestra.server.buffer.opening import has_buffer, open_buffer_reader
from palestra.server.buffer.types import GroupEntry
from palestra.server.plan.names import draw_of
from palestra.server.store.reader import StoreReader
from palestra.server.types import GroupState, StoreError
from palestra.trainer.records import read_step
from tests import postgres
from tests.jobs import Job, check_laws
from tests.live import wait_for

ROLES = ("engine", "service", "worker", "trainer")
DATABASE = "database"
POINTS = ("turns", "turns", "records", "groups")
STEPS = 3
"""Steps that a life has before it, at least: room for its point."""
AFTER_S = 0.4
"""At most so long after its progress a point lies, seconds."""
DEADLINE_S = 200.0
Turns = dict[tuple[str, int, int], bytes]


def seed_of(default: int) -> int:
    """PALESTRA_SEED, or the test's own: what chooses the points."""
    return int(os.environ.get("PALESTRA_SEED", default))


@dataclass(slots=True)
class Kill:
    """One kill and what came of it."""

    victim: str
    point: str
    at: int
    """Turns on record by then."""
    step: int
    """Steps that were done by then."""
    outcome: str = ""
    seconds: float = 0.0
    """From the kill until the run's end, or until the job ended by itself."""

    def line(self) -> str:
        """A row of a table."""
        return f"| {self.victim} | {self.point} | {self.at} | {self.step} | {self.outcome} | {self.seconds:.1f} |"


@dataclass(slots=True)
class Campaign:
    """One run that is killed again and again, and resumed each time."""

    job: Job
    draw: random.Random
    database: postgres.Server | None = None
    kills: list[Kill] = field(default_factory=list)
    turns: Turns = field(default_factory=dict)
    """All that was on record at a kill."""
    publishes: dict[int, int] = field(default_factory=dict)
    """Version -> train step, of all publishes that were seen at a kill."""

    def strike(self, victim: str) -> None:
        """Starts or resumes the job, lets it come to a point, kills the victim, and waits for the end of the job."""
        while (process := self._at_a_point(victim)) is None:
            continue  # it came to its end first, and is made longer
        kill, started = self.kills[-1], time.monotonic()
        try:
            self._kill(victim)
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            _end(process)
        kill.seconds, kill.outcome = time.monotonic() - started, _outcome(process.returncode, out, err, victim)
        print(kill.line(), flush=True)
        assert self.job.leftovers() == []
        self._check_kept()

    def finish(self, more: int = 1) -> None:
        """Goes on to an end, and checks all that must hold."""
        steps = max((line["train_step"] for line in self.job.steps()), default=0) + more
        steps = max(steps, 2)
        status, out, err = self.job.train("--resume", f"--run.steps={steps}", timeout_s=DEADLINE_S)
        assert status == 0, out + err
        self._check_kept()
        check_laws(self.job, steps)
        check_steps(self.job, self.entries())
        check_tasks(self.job, self.entries())
        self._check_versions()
        check_sessions(self.job)

    @property
    def replays(self) -> int:
        """Turns that were given again, over all resumptions."""
        reader = StoreReader(self.job.folder / "store")
        try:
            return sum(event.data["turns"] for event in reader.read_events() if event.kind == "replay")
        finally:
            reader.close()

    def entries(self) -> tuple[GroupEntry, ...]:
        """All groups that are in the buffer."""
        if not has_buffer(self.job.folder / "store"):
            return ()
        reader = open_buffer_reader(self.job.folder / "store")
        try:
            return reader.entries()
        finally:
            reader.close()

    # Points.

    def _at_a_point(self, victim: str) -> subprocess.Popen[str] | None:
        """The job, running, where it is to be killed; what is on record by then is remembered. None where it ended before it came there."""
        point, rest = self.draw.choice(POINTS), self.draw.uniform(0, AFTER_S)
        more = self.draw.randrange(1, 1 + {"turns": 24, "groups": 4, "records": 2}[point])
        before, done = self._progress(point), len({line["train_step"] for line in self.job.steps()})
        process = self.job.start(*(["--resume"] if self.job.folder.exists() else []), f"--run.steps={done + STEPS}")
        try:
            wait_for(
                lambda: self._progress(point) >= before + more or process.poll() is not None,
                f"{more} {point}",
                DEADLINE_S,
            )
            time.sleep(rest)  # no synchronisation: it chooses the point
            at = self._progress("turns")
            self._remember()
            if (status := process.poll()) is not None:
                out, err = process.communicate()
                assert status == 0, out + err
                return None
        except BaseException:
            _end(process)
            raise
        self.kills.append(Kill(victim, f"{more} {point} + {rest * 1e3:.0f} ms", at, done))
        return process

    def _progress(self, kind: str) -> int:
        if kind == "records":
            return len(list((self.job.folder / "steps").glob("*.json")))
        try:
            if kind == "groups":
                return len(self.entries())
            reader = StoreReader(self.job.folder / "store")
        except StoreError:
            return 0  # the run has no store yet
        try:
            return sum(session.turns for session in reader.read_sessions())
        finally:
            reader.close()

    def _kill(self, victim: str) -> None:
        if victim != DATABASE:
            self.job.kill(victim)
            return
        assert self.database is not None
        self.database.kill9()
        self.database.start()

    # What was acknowledged.

    def _remember(self) -> None:
        self.turns |= turns_of(self.job)
        self.publishes |= self._publishes()

    def _publishes(self) -> dict[int, int]:
        if not has_buffer(self.job.folder / "store"):
            return {}
        reader = open_buffer_reader(self.job.folder / "store")
        try:
            return {version: step for version, step, _ in reader.publishes()}
        finally:
            reader.close()

    def _check_kept(self) -> None:
        ledger = self.job.ledger(over=False)
        assert ledger.balanced, ledger.lines()
        assert self.turns.items() <= turns_of(self.job).items(), "an acknowledged turn is gone, or is another one"

    def _check_versions(self) -> None:
        now = self._publishes()
        assert self.publishes.items() <= now.items(), "a version was published twice, as other weights"
        reader = StoreReader(self.job.folder / "store")
        try:
            sessions = reader.read_sessions()
            used = {
                span.version
                for session in sessions
                for turn in reader.read_trajectory(session.record.rollout_id, session.record.attempt).turns
                for span in turn.spans
            }
        finally:
            reader.close()
        assert used <= now.keys() | {0}, "tokens of weights that were never published"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def _outcome(status: int, out: str, err: str, victim: str) -> str:
    """How a job ended whose victim was killed, in a word."""
    if status == 0:
        assert victim == DATABASE, out + err
        return "went on"
    assert status == 1, out + err
    assert victim == DATABASE or f"{victim} was ended by signal 9" in err, err
    assert "--resume" in err
    return "resumed"


def turns_of(job: Job) -> Turns:
    """Completion by (rollout, attempt, turn), as it is on record."""
    reader = StoreReader(job.folder / "store")
    try:
        found: Turns = {}
        for session in reader.read_sessions():
            key = session.record.rollout_id, session.record.attempt
            for turn in reader.read_trajectory(*key).turns:
                found[*key, turn.index] = (
                    turn.prompt_delta.tobytes() + turn.completion_ids.tobytes() + turn.logprobs.tobytes()
                )
        return found
    finally:
        reader.close()


def check_steps(job: Job, entries: tuple[GroupEntry, ...]) -> None:
    """The trainer's own records of each step name the groups that the buffer says were trained in it, and no rollout twice."""
    committed: dict[int, set[str]] = {}
    for entry in entries:
        if entry.state is GroupState.COMMITTED:
            committed.setdefault(int(entry.step or 0), set()).add(entry.group_id)
    for step, groups in committed.items():
        rows = read_step(job.folder, step)
        assert {row.group_id for row in rows} == groups, f"step {step}: the buffer and the trainer disagree"
        keys = Counter((row.rollout_id, row.branch) for row in rows)
        assert set(keys.values()) == {1}


def check_tasks(job: Job, entries: tuple[GroupEntry, ...]) -> None:
    """Every task up to the last one that was trained was trained or dropped, once. What a restore abandoned lives on as another group."""
    ended: Counter[int] = Counter()
    committed = set[int]()
    for entry in entries:
        found = draw_of(entry.group_id)
        assert found is not None, entry.group_id
        if entry.state is GroupState.COMMITTED:
            committed.add(found[0])
        if entry.reason != "abandoned":
            ended[found[0]] += 1
    assert set(ended.values()) <= {1}, f"a task was repeated: {[draw for draw, n in ended.items() if n > 1]}"
    reader = StoreReader(job.folder / "store")
    try:
        open_ = {draw_of(group.group_id) for group in reader.read_groups(GroupState.OPEN)}
    finally:
        reader.close()
    under_way = {found[0] for found in open_ if found is not None}
    missing = set(range(max(committed, default=-1) + 1)) - ended.keys() - under_way
    assert not missing, f"tasks were lost: {sorted(missing)}"


def check_sessions(job: Job) -> None:
    """In a deterministic environment no sampled token is thrown away by a restart, and no episode became another one."""
    reader = StoreReader(job.folder / "store")
    try:
        reasons = Counter(s.discard_reason for s in reader.read_sessions() if s.sampled_tokens > s.undelivered_tokens)
    finally:
        reader.close()
    assert not reasons["replay_diverged"], reasons
    assert not reasons["restart"], reasons
    assert not reasons["worker_lost"], reasons


def describe(campaigns: list[Campaign]) -> dict[str, Any]:
    """Figures of several campaigns."""
    kills = [kill for campaign in campaigns for kill in campaign.kills]
    return {
        "kills": len(kills),
        "by_victim": dict(Counter(kill.victim for kill in kills)),
        "outcomes": dict(Counter(kill.outcome for kill in kills)),
        "turns_given_again": sum(campaign.replays for campaign in campaigns),
    }
