"""Whether the store holds what the agents were told: every turn once, with the engine's very ids.

In: the folders of the services that were measured, and what the load generator did there. Out: a line per fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gateway_stage import Stage
from benchmarks.gateway_texts import FIRST, GROWTH, REPLY, Texts
from palestra.server.store.reader import StoreReader
from palestra.server.store.types import StoredSession

DEEP = 64
"""Of so many sessions one is looked at id for id."""


def check_store(stage: Stage) -> list[str]:
    """The faults, for all jobs that the stage has done on Palestra."""
    found: list[str] = []
    for store, wanted in stage.wanted.items():
        reader = StoreReader(store)
        try:
            found += _check(reader, store, wanted, stage.texts)
        finally:
            reader.close()
    return found


def _check(reader: StoreReader, store: Path, wanted: dict[str, tuple[int, int]], texts: Texts) -> Iterator[str]:
    """`wanted`: by tag, how many sessions there are and how many turns each must have."""
    seen = dict.fromkeys(wanted, 0)
    for at, session in enumerate(reader.read_sessions()):
        tag = session.record.rollout_id.rpartition("-")[0]
        if tag not in wanted:
            continue
        seen[tag] += 1
        where = f"{store}: session {session.record.rollout_id}"
        turns = wanted[tag][1]
        if (session.turns, session.sampled_tokens, session.undelivered_tokens) != (turns, turns * REPLY, 0):
            yield f"{where} has {session.turns} turns with {session.sampled_tokens} tokens instead of {turns}"
        elif at % DEEP == 0:
            yield from _deep(reader, session, where, texts)
    for tag, (sessions, _) in wanted.items():
        if seen[tag] != sessions:
            yield f"{store}: {seen[tag]} of {sessions} sessions {tag} are there"


def _deep(reader: StoreReader, session: StoredSession, where: str, texts: Texts) -> Iterator[str]:
    known = set(texts.ids)
    for turn in reader.read_trajectory(session.record.rollout_id, session.record.attempt).turns:
        if tuple(turn.completion_ids.tolist()) not in known:
            yield f"{where} turn {turn.index}: its ids are not the engine's"
        size = GROWTH - REPLY if turn.index else FIRST
        if len(turn.prompt_delta) != size or turn.parent != (turn.index - 1 if turn.index else None):
            yield f"{where} turn {turn.index}: {len(turn.prompt_delta)} new prompt ids behind turn {turn.parent}"
