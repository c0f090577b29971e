"""The token ledger of a run (law 3): sampled = trained + masked(reason) + discarded(reason) + pending.

In: a store folder, live or left behind. Out: a `Ledger`. Its left side is counted from the turns of the log, its
right side from the masks of the rows in the buffer and, for rollouts that never came that far, from their sessions:
it balances only where no token was lost or used twice on the way. Waits only for the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.server.buffer.opening import has_buffer, open_buffer_reader
from palestra.server.buffer.types import GroupEntry
from palestra.server.store.reader import StoreReader
from palestra.server.store.types import SessionRecord, SessionState, StoredSession
from palestra.server.types import GroupState

UNDELIVERED = "undelivered"
RUN_END = "run_end"
INFRA = "infra"
UNSCORED = "unscored"
LEFT_OUT = "left_out"
EVALUATION = "evaluation"
"""Reason of all that evaluation sampled; also `purpose` in the meta of its sessions, as their opener gave it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every sampled token went. All numbers are tokens."""

    sampled: int
    trained: int
    masked: Mapping[str, int]
    """By reason: the source that the token has in its row."""
    discarded: Mapping[str, int]
    """By reason: undelivered, evaluation, a group's or a session's reason, infra and unscored (closed without a reward), left_out
    (scored, but without rows in its group), run_end."""
    pending: int
    """Of open sessions, incomplete groups, and groups that wait in the buffer."""

    @property
    def difference(self) -> int:
        """Tokens that were sampled and are nowhere (above 0), or are counted twice (below 0)."""
        return self.sampled - self.trained - sum(self.masked.values()) - sum(self.discarded.values()) - self.pending

    @property
    def balanced(self) -> bool:
        """Law 3."""
        return self.difference == 0

    def lines(self) -> list[str]:
        """For the terminal, one line per number that is not 0."""
        parts = [("trained", self.trained)]
        parts += [(f"masked({reason})", n) for reason, n in sorted(self.masked.items())]
        parts += [(f"discarded({reason})", n) for reason, n in sorted(self.discarded.items())]
        parts += [("pending", self.pending)]
        width = max(len(name) for name, _ in parts)
        lines = [f"{'sampled':<{width}} {self.sampled:>12,} tokens"]
        for name, n in parts:
            if n or name == "trained":
                share = f"{100 * n / self.sampled:5.1f}%" if self.sampled else ""
                lines.append(f"{name:<{width}} {n:>12,} {share}".rstrip())
        verdict = (
            "the ledger balances" if self.balanced else f"the ledger does NOT balance: {self.difference:+,} tokens"
        )
        return [*lines, verdict]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "masked": dict(self.masked),
            "discarded": dict(self.discarded),
            "pending": self.pending,
            "balanced": self.balanced,
        }


def read_ledger(store_folder: Path, *, run_over: bool = False) -> Ledger:
    """The ledger of a run as it stands. `run_over`: what is pending will never be trained and is discarded(run_end).

    Raises:
        StoreError: the folder holds no turn log, or something in it cannot be read.
    """
    entries = _entries(store_folder)  # before the log: a rollout that is in the buffer is in the log by then
    reader = StoreReader(store_folder)
    try:
        sessions = reader.read_sessions()
    finally:
        reader.close()
    book = _Book()
    for entry in entries:
        book.add_group(entry)
    groups = {entry.group_id: entry for entry in entries}
    with_rows = {(c.rollout_id, c.attempt) for entry in entries for c in entry.rollouts}
    for session in sessions:
        book.discarded[UNDELIVERED] += session.undelivered_tokens
        if (session.record.rollout_id, session.record.attempt) not in with_rows:
            book.add_session(session, groups.get(session.record.group_id))
    if run_over:
        book.discarded[RUN_END] += book.pending
        book.pending = 0
    return Ledger(
        sampled=sum(session.sampled_tokens for session in sessions),
        trained=book.trained,
        masked=_nonzero(book.masked),
        discarded=_nonzero(book.discarded),
        pending=book.pending,
    )


class _Book:
    """The right side of the ledger while it is added up."""

    def __init__(self) -> None:
        self.trained = self.pending = 0
        self.masked: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()

    def add_group(self, entry: GroupEntry) -> None:
        for counts in entry.rollouts:
            whole = counts.trained + sum(counts.masked.values())
            if entry.state == GroupState.COMMITTED:
                self.trained += counts.trained
                self.masked.update(counts.masked)
            elif entry.state == GroupState.DROPPED:
                self.discarded[entry.reason or "dropped"] += whole
            else:
                self.pending += whole

    def add_session(self, session: StoredSession, group: GroupEntry | None) -> None:
        """A session none of whose tokens is in a row."""
        tokens = session.sampled_tokens - session.undelivered_tokens
        if is_evaluation(session.record):
            self.discarded[EVALUATION] += tokens  # at once: nothing of it can ever be trained
        elif session.state == SessionState.DISCARDED:
            self.discarded[session.discard_reason or "discarded"] += tokens
        elif session.state == SessionState.OPEN or session.outcome is None:
            self.pending += tokens
        elif session.outcome.reward is None:
            self.discarded[INFRA if session.outcome.stop_reason == INFRA else UNSCORED] += tokens
        elif group is not None:
            dropped = group.reason if group.state == GroupState.DROPPED else None
            self.discarded[dropped or LEFT_OUT] += tokens
        else:
            self.pending += tokens


def is_evaluation(record: SessionRecord) -> bool:
    """Whether a session was opened for an evaluation, and says so."""
    meta = record.meta.get("meta")
    return isinstance(meta, Mapping) and meta.get("purpose") == EVALUATION


def _entries(store_folder: Path) -> tuple[GroupEntry, ...]:
    if not has_buffer(store_folder):
        return ()
    reader = open_buffer_reader(store_folder)
    try:
        return reader.entries()
    finally:
        reader.close()


def _nonzero(counts: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in sorted(counts.items()) if n}
