"""A state machine over any `RunBuffer`: producers, consumers, leases that run out, deaths at any point, restores, retention.

Whatever is done to the store is done to a `MemoryBuffer`, and both are compared after every step. A death happens inside an operation, at a
drawn write, flush or commit: the store that is opened afterwards must be as it was before the operation or as it is after it, and the
caller, whose reply was lost, asks again. What must hold whatever the model says is checked beside it, from what a reader sees.

A store under test is a `Store`; a subclass of `BufferMachine` names its `make_store`; `run_state_machine_as_test` runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from palestra.server.buffer.retention import Retention, shelves_of, unwanted
from palestra.server.buffer.types import GroupEntry, RunBuffer, RunBufferReader
from palestra.server.rows import group_of
from palestra.server.types import GroupState, ServerError, TokenSource, TrajectoryGroup
from palestra.server.wire.codec import encode_group
from tests.conformance.buffer_suite import Clock
from tests.fakes.memory_buffer import MemoryBuffer
from tests.fakes.rollouts import trajectory, turn

OWNERS, PRODUCERS = ("c0", "c1"), ("p0", "p1")
KEPT_CHECKPOINTS, BOUND = 2, 1
LAWFUL = {
    GroupState.READY: {GroupState.READY, GroupState.CLAIMED, GroupState.DROPPED},
    GroupState.CLAIMED: {GroupState.READY, GroupState.CLAIMED, GroupState.COMMITTED, GroupState.DROPPED},
    GroupState.COMMITTED: {GroupState.COMMITTED},
    GroupState.DROPPED: {GroupState.DROPPED},
}
"""What may become of a group, restores apart."""

deaths = st.one_of(st.none(), st.none(), st.integers(0, 14))
"""After how many of its writes, flushes and commits an operation's process dies; None: it does not."""


class Died(BaseException):
    """The process ended here. No handler of errors sees it, as none sees kill -9."""


class Store(Protocol):
    """A store that a machine works on."""

    def open(self, clock: Clock, retention: Retention) -> RunBuffer:
        """The store as the next process finds it."""

    def arm(self, after: int) -> None:
        """After so many writes, flushes and commits from here the process dies: `Died` is raised at that point."""

    def disarm(self) -> None:
        """Nobody dies any more."""

    def crash(self) -> None:
        """The process is gone, and what it had not written with it. `open` comes next."""

    def reader(self) -> RunBufferReader:
        """A reader of what is stored now."""

    def end(self) -> None:
        """Removes everything."""


def make_group(name: str, versions: tuple[int, ...], mark: int = 0) -> TrajectoryGroup:
    """One rollout of two tokens for each version; `mark` makes another content of it."""
    rollouts = [
        trajectory([turn(0, None, [1, mark], [7 + mark, i], version=version)], f"{name}-{i}", name, reward=float(i))
        for i, version in enumerate(versions)
    ]
    return group_of(name, "task", len(versions), rollouts)


def masked(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with its first row masked as stale."""
    row = group.samples[0]
    sampled = row.sources == TokenSource.SAMPLED
    sources = np.where(sampled, TokenSource.STALE, row.sources).astype(np.uint8)
    hidden = dataclasses.replace(row, sources=sources, loss_mask=np.zeros_like(row.loss_mask))
    return dataclasses.replace(group, samples=(hidden, *group.samples[1:]))


def outcome(operation: Callable[[Any], Any], buffer: Any) -> Any:
    """What came of it, in a form that can be compared."""
    try:
        value = operation(buffer)
    except ServerError as error:
        return type(error).__name__
    if isinstance(value, list) and value and isinstance(value[0], TrajectoryGroup):
        return [encode_group(group) for group in value]
    return value


def seen(reader: RunBufferReader) -> tuple[object, ...]:
    """All that a reader sees, but where arrays lie."""
    entries = [dataclasses.replace(entry, shelf=None, stored_bytes=0) for entry in reader.entries()]
    return (entries, reader.publishes())


class BufferMachine(RuleBasedStateMachine):
    """Subclasses give `make_store`."""

    make_store: ClassVar[Callable[[], Store]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.step, self.version, self.serial = 0, 0, 0
        self.checkpoints = [(0, 0)]
        self.names: list[str] = []
        self.published = {0: 0}
        self.last_claim = dict.fromkeys(OWNERS, "")
        self.before: dict[str, GroupEntry] = {}
        self.store = type(self).make_store()

    @initialize(keep_s=st.sampled_from([0.0, 0.0, 8.0]), keep_bytes=st.sampled_from([None, 0, 1000]))
    def begin(self, keep_s: float, keep_bytes: int | None) -> None:
        self.retention = Retention(keep_s, keep_bytes)
        self.model = MemoryBuffer(self.clock, self.retention)
        self.buffer = self.store.open(self.clock, self.retention)
        self.do(lambda buffer: buffer.record_publish(0, 0), None)

    def teardown(self) -> None:
        try:
            if hasattr(self, "buffer"):
                self.check_arrays()
        finally:
            self.store.end()

    @rule(producer=st.sampled_from(PRODUCERS), n=st.integers(1, 3), death=deaths, data=st.data())
    def put(self, producer: str, n: int, death: int | None, data: st.DataObject) -> None:
        groups = [self.new_group(producer, data) for _ in range(n)]
        self.do(lambda buffer: buffer.put(groups), death)
        self.names += [group.group_id for group in groups]

    @precondition(lambda self: self.names)
    @rule(death=deaths, data=st.data())
    def put_again_with_another_content(self, death: int | None, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.do(lambda buffer: buffer.put([make_group(name, (0,), mark=1)]), death)

    @rule(producer=st.sampled_from(PRODUCERS), death=deaths, data=st.data())
    def put_dropped(self, producer: str, death: int | None, data: st.DataObject) -> None:
        group = self.new_group(producer, data)
        self.do(lambda buffer: buffer.put_dropped(group, "zero_variance"), death)
        self.names.append(group.group_id)

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(0, 4), newest=st.booleans(), death=deaths)
    def claim(self, owner: str, n: int, newest: bool, death: int | None) -> None:
        self.do(lambda buffer: buffer.drop_older_than(self.step, BOUND, newest=newest), None)
        held = {name for name, entry in self.before.items() if entry.owner == owner}
        free = [entry.group_id for entry in self.before.values() if self.could_be_claimed(entry)]
        self.serial += 1
        claim_id = self.last_claim[owner] = f"{owner}-{self.serial}"
        groups = self.do(lambda buffer: buffer.claim(n, owner, 10, claim_id=claim_id), death)
        mine = [entry for name, entry in self.before.items() if entry.owner == owner and name not in held]
        assert {entry.group_id for entry in mine} <= set(free[:n]), "the oldest go first"
        assert len(groups) == min(n, len(free))
        for entry in mine:
            steps = [self.published[version] for version in entry.versions]
            assert self.step - (max(steps) if newest else min(steps)) <= BOUND, "too old to be trained"

    @rule(owner=st.sampled_from(OWNERS), death=deaths)
    def claim_again(self, owner: str, death: int | None) -> None:
        self.do(lambda buffer: buffer.claim(2, owner, 10, claim_id=self.last_claim[owner]), death)

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(1, 2))
    def claim_without_an_id(self, owner: str, n: int) -> None:
        self.do(lambda buffer: buffer.claim(n, owner, 10), None)

    @precondition(lambda self: self.held_by(*OWNERS))
    @rule(whose=st.integers(0, 9), death=deaths, data=st.data())
    def commit(self, whose: int, death: int | None, data: st.DataObject) -> None:
        """Sometimes also of what another owner holds, which is refused whole."""
        owner = data.draw(st.sampled_from([owner for owner in OWNERS if self.held_by(owner)]))
        ids, step = self.held_by(*(OWNERS if whose == 0 else (owner,))), self.step + 1
        refused = ids != self.held_by(owner)
        found = self.do(lambda buffer: buffer.commit(step, f"s{self.checkpoints[-1][0]}", ids, owner), death)
        assert (found == "LeaseLost") == refused
        if not refused:
            assert found == len(ids)
            assert {self.before[name].step for name in ids} == {step}
            self.step, self.version = step, max(self.version, *self.published) + 1

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(1, 2), death=deaths, data=st.data())
    def train_a_step(self, owner: str, n: int, death: int | None, data: st.DataObject) -> None:
        """As the trainer does: claim, commit, publish, and delete what no checkpoint needs."""
        self.put(PRODUCERS[0], n, None, data)
        self.claim(owner, n, False, death)
        if self.held_by(owner):
            self.commit(9, death, data)
            if data.draw(st.booleans()):
                self.checkpoint()
            self.publish(death)
            self.collect(death)

    @rule(owner=st.sampled_from(OWNERS), verb=st.sampled_from(["renew", "release"]), death=deaths, data=st.data())
    def renew_or_release(self, owner: str, verb: str, death: int | None, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.names), max_size=3)) if self.names else []
        more = (10,) if verb == "renew" else ()
        self.do(lambda buffer: getattr(buffer, verb)(ids, owner, *more), death)

    @precondition(lambda self: self.names)
    @rule(death=deaths, data=st.data())
    def drop(self, death: int | None, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.do(lambda buffer: buffer.drop([name], "by_hand"), death)

    @rule(owner=st.sampled_from(OWNERS), hide=st.booleans(), death=deaths)
    def recount(self, owner: str, hide: bool, death: int | None) -> None:
        whole = [self.model.held[name].group for name in self.held_by(owner)]
        groups = [masked(group) if hide else group for group in whole]
        self.do(lambda buffer: buffer.recount(groups), death)

    @rule(death=deaths)
    def publish(self, death: int | None) -> None:
        if self.version in self.published:
            self.version = max(self.published) + 1
        version = self.version
        self.published[version] = self.step
        self.do(lambda buffer: buffer.record_publish(version, self.step), death)
        assert self.do(lambda buffer: buffer.record_publish(version - 1, self.step), None) == "VersionRefused"

    @rule()
    def checkpoint(self) -> None:
        """Of weights that were published, or will be, or never."""
        earlier = [kept for kept in self.checkpoints if kept[0] < self.step]
        self.checkpoints = [*earlier, (self.step, self.version)][-KEPT_CHECKPOINTS:]

    @precondition(lambda self: self.checkpoints[0][0] < self.step)
    @rule(death=deaths, data=st.data())
    def restore(self, death: int | None, data: st.DataObject) -> None:
        step, version = data.draw(st.sampled_from(self.checkpoints))
        found = self.do(lambda buffer: buffer.restore(step, version), death, restores=True)
        assert found != "StoreError", "what a kept checkpoint needs is stored"
        self.checkpoints = [kept for kept in self.checkpoints if kept[0] <= step]
        self.step, self.version = step, max(self.published) + 1
        later = [entry.group_id for entry in self.before.values() if (entry.step or 0) > step]
        assert not later, "nothing of the lost steps counts as trained"

    @rule(death=deaths)
    def collect(self, death: int | None) -> None:
        oldest = self.checkpoints[0][0]
        allowed = unwanted(shelves_of(self.before.values(), oldest, self.clock()), self.retention, self.clock())
        gone = {entry.group_id for entry in self.before.values() if entry.shelf in allowed}
        was = {entry.group_id for entry in self.before.values() if entry.shelf is not None}
        self.do(lambda buffer: type(buffer.collect(oldest)), death)
        now = {entry.group_id for entry in self.before.values() if entry.shelf is not None}
        assert was - now <= gone, "what should have stayed is gone"

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def process_is_killed_between_two_calls(self) -> None:
        self.restart()
        assert self.look() == seen(self.model)
        self.check_arrays()

    # How it is done and checked.

    def do(self, operation: Callable[[Any], Any], death: int | None, restores: bool = False) -> Any:
        """Does it to the store and to the model; what came of it, the second time where the process died the first time."""
        after = self.model.twin()
        wanted = outcome(operation, after)
        try:
            if death is not None:
                self.store.arm(death)
            found = outcome(operation, self.buffer)
        except Died:
            self.restart()
            now = self.look()
            assert now in (seen(self.model), seen(after)), "half of it was done"
            self.model = after if now == seen(after) != seen(self.model) else self.model
            wanted, found = outcome(operation, self.model), outcome(operation, self.buffer)
        else:
            self.model = after
        finally:
            self.store.disarm()
        assert found == wanted
        self.check(restores)
        return found

    def restart(self) -> None:
        self.store.crash()
        self.buffer = self.store.open(self.clock, self.retention)

    def look(self) -> tuple[object, ...]:
        reader = self.store.reader()
        try:
            return seen(reader)
        finally:
            reader.close()

    def check(self, restores: bool) -> None:
        """The store against the model, and each group against what it was before."""
        reader = self.store.reader()
        try:
            assert seen(reader) == seen(self.model)
            entries = {entry.group_id: entry for entry in reader.entries()}
        finally:
            reader.close()
        assert self.buffer.counts() == self.model.counts()
        for state, depth in self.model.depths().items():
            assert dataclasses.astuple(self.buffer.depths()[state]) == pytest.approx(
                dataclasses.astuple(depth), abs=1e-6
            )
        assert self.buffer.ready_count() == self.model.ready_count()
        assert set(self.names) <= entries.keys(), "what was acknowledged is lost"
        for name, entry in entries.items():
            self.model.held[name].stored = entry.shelf is not None
            was = self.before.get(name)
            if was is None:
                continue
            assert restores or entry.state in LAWFUL[was.state], f"{name}: {was.state} became {entry.state}"
            if entry.state == was.state:
                same = (entry.step, entry.reason) == (was.step, was.reason)
                assert same or was.state not in (GroupState.COMMITTED, GroupState.DROPPED), f"{name} ended twice"
        self.before = entries

    def check_arrays(self) -> None:
        """Whatever counts as stored can be read, and is what was put first."""
        reader = self.store.reader()
        try:
            for entry in reader.entries():
                if entry.shelf is not None:
                    first = self.model.held[entry.group_id].group
                    assert encode_group(reader.read_group(entry.group_id)) == encode_group(first)
        finally:
            reader.close()

    def new_group(self, producer: str, data: st.DataObject) -> TrajectoryGroup:
        self.serial += 1
        some = st.lists(st.sampled_from(sorted(self.published)[-6:]), min_size=1, max_size=2)
        return make_group(f"{producer}-{self.serial}", tuple(data.draw(some)))

    def held_by(self, *owners: str) -> list[str]:
        claimed = [entry for entry in self.before.values() if entry.state == GroupState.CLAIMED]
        return [entry.group_id for entry in claimed if entry.owner in owners]

    def could_be_claimed(self, entry: GroupEntry) -> bool:
        held = self.model.held[entry.group_id]
        ran_out = entry.state == GroupState.CLAIMED and held.until <= self.clock()
        return entry.state == GroupState.READY or ran_out
