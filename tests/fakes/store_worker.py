"""A process that writes a store as fast as it can and says on stdout what was acknowledged; its parent kills it, or limits its files.

Usage: store_worker.py (turns|buffer|full-turns|full-buffer) FOLDER (NAME|TOKENS)
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from pathlib import Path

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionRecord
from palestra.server.types import StoreError, Turn
from tests.fakes.rollouts import group, turn

LIMIT = 300_000
"""Bytes that a file may have while the disk plays full."""


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def numbered_turn(index: int) -> Turn:
    """A turn whose ids follow from its index."""
    return turn(index, index - 1 if index else None, [index], range(index, index + 50))


async def write_turns(folder: Path, name: str) -> None:
    log = TurnLog(folder)

    async def play(rollout_id: str) -> None:
        await log.open_session(SessionRecord(rollout_id, 0, "g", "t", 0))
        for index in range(100_000):
            await log.append_turn(rollout_id, 0, numbered_turn(index))
            say("turn", rollout_id, index)

    await asyncio.gather(*(play(f"{name}-{i}") for i in range(8)))


def write_buffer(folder: Path, name: str) -> None:
    buffer = EmbeddedBuffer(folder, segment_bytes=20_000)
    buffer.restore(train_step=10**9, policy_version=10**9)  # what a killed owner had claimed

    def produce() -> None:
        for i in range(100_000):
            buffer.put([group(f"{name}-{i}", tokens=100)])
            say("put", f"{name}-{i}")

    threading.Thread(target=produce, daemon=True).start()
    for step in range(100_000):
        ids = [claimed.group_id for claimed in buffer.claim(2, name, 600)]
        for group_id in ids:
            say("claimed", group_id)
        if ids and buffer.commit(step, f"{name}-{step}", ids, name) == len(ids):
            for group_id in ids:
                say("committed", group_id)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def fill_turns(folder: Path) -> None:
    limit_files(LIMIT)
    log = TurnLog(folder)
    await log.open_session(SessionRecord("r", 0, "g", "t", 0))
    index = 0
    while True:
        batch = [log.append_turn("r", 0, numbered_turn(index + i)) for i in range(4)]
        results = await asyncio.gather(*batch, return_exceptions=True)
        if any(results):
            break
        index += 4
    say("full", index, len({type(r) for r in results}), type(results[0]).__name__, results[0])
    say("kept", len(log.reader.read_trajectory("r").turns))
    limit_files(resource.RLIM_INFINITY)
    await log.append_turn("r", 0, numbered_turn(index))
    say("usable", len(log.reader.read_trajectory("r").turns))
    await log.close()


def fill_buffer(folder: Path, tokens: int) -> None:
    limit_files(LIMIT)
    buffer = EmbeddedBuffer(folder)
    count = 0
    try:
        while True:
            buffer.put([group(f"g{count}", tokens=tokens)])
            count += 1
    except StoreError as error:
        say("full", count, 1, type(error).__name__, error)
    say("kept", buffer.ready_count())
    limit_files(resource.RLIM_INFINITY)
    buffer.put([group(f"g{count}", tokens=tokens)])
    say("usable", len(buffer.claim(10**6, "t", 60)))
    buffer.close()


if __name__ == "__main__":
    what, where, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if what == "turns":
        asyncio.run(write_turns(where, name))
    elif what == "buffer":
        write_buffer(where, name)
    elif what == "full-turns":
        asyncio.run(fill_turns(where))
    else:
        fill_buffer(where, int(name))
