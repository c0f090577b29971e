"""kill -9 and a full disk: nothing that was acknowledged is lost, nothing is trained twice, and the store goes on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.store.reader import StoreReader
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import GroupState
from tests.fakes import store_worker

ROOT = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
CYCLES = 5

pytestmark = pytest.mark.walk


def command(what: str, folder: Path, name: str) -> list[str]:
    return [sys.executable, store_worker.__file__, what, str(folder), name]


def run_and_kill(what: str, folder: Path, name: str, lines: int) -> list[list[str]]:
    """What the process acknowledged until it was killed, after at least `lines` of it."""
    process = subprocess.Popen(command(what, folder, name), stdout=subprocess.PIPE, env=ENV)
    assert process.stdout is not None
    try:
        said = [process.stdout.readline() for _ in range(lines)]
        assert said[-1], "the process ended by itself"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
    return [line.decode().split() for line in [*said, *rest]]


def test_no_acknowledged_turn_is_lost(tmp_path: Path) -> None:
    rng = random.Random(1)
    acknowledged: list[list[str]] = []
    for cycle in range(CYCLES):
        acknowledged += run_and_kill("turns", tmp_path, f"c{cycle}", rng.randint(10, 200))
        reader = StoreReader(tmp_path)  # on the files as they were left, before any writer mends them
        turns = {s.record.rollout_id: reader.read_trajectory(s.record.rollout_id).turns for s in reader.read_sessions()}
        reader.close()
        lost = [words for words in acknowledged if int(words[2]) >= len(turns.get(words[1], ()))]
        assert not lost
    assert len(acknowledged) > 10 * CYCLES
    for kept in turns.values():
        for index, found in enumerate(kept):
            wanted = store_worker.numbered_turn(index)
            assert found.index == index
            assert np.array_equal(found.completion_ids, wanted.completion_ids)
            assert np.array_equal(found.logprobs, wanted.logprobs)


def test_no_acknowledged_group_is_lost_or_trained_twice(tmp_path: Path) -> None:
    rng = random.Random(2)
    said: list[list[str]] = []
    for cycle in range(CYCLES):
        said += run_and_kill("buffer", tmp_path, f"c{cycle}", rng.randint(10, 200))
    committed: set[str] = set()
    for verb, group_id in said:
        assert verb != "claimed" or group_id not in committed, f"{group_id} was given out after it was trained"
        if verb == "committed":
            assert group_id not in committed
            committed.add(group_id)
    reader = BufferReader(tmp_path)
    state = {entry.group_id: entry.state for entry in reader.entries()}
    reader.close()
    puts = {group_id for verb, group_id in said if verb == "put"}
    assert len(puts) > CYCLES
    assert committed
    assert puts <= state.keys()
    assert {state[group_id] for group_id in committed} == {GroupState.COMMITTED}
    buffer = EmbeddedBuffer(tmp_path)
    buffer.restore(train_step=10**9, policy_version=10**9)
    waiting = {group_id for group_id, now in state.items() if now != GroupState.COMMITTED}
    assert {group.group_id for group in buffer.claim(10**6, "last", 60)} == waiting, (
        "all the others are there, undamaged"
    )
    buffer.close()


@pytest.mark.parametrize(
    ("what", "tokens", "file"),
    [("full-turns", 0, "turns.db"), ("full-buffer", 3000, "segments"), ("full-buffer", 3, "buffer.db")],
)
def test_full_disk_is_a_clear_error_and_passes(tmp_path: Path, what: str, tokens: int, file: str) -> None:
    done = subprocess.run(
        command(what, tmp_path, str(tokens)), capture_output=True, env=ENV, timeout=60, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"^(\w+) (.*)$", done.stdout, re.MULTILINE))
    count, kinds, error, message = said["full"].split(" ", 3)
    assert int(count) > 3
    assert (kinds, error) == ("1", "StoreError")
    assert file in message
    assert "nothing of" in message
    assert int(said["kept"]) == int(count)
    assert int(said["usable"]) == int(count) + 1


async def test_the_store_of_a_killed_process_opens_again(tmp_path: Path) -> None:
    run_and_kill("turns", tmp_path, "c", 20)
    log = TurnLog(tmp_path)
    assert await log.discard_session("c-0", 0, "restart")
    await log.close()
