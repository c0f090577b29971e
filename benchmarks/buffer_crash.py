"""What a kill -9 costs: seconds until the next claim, and whether anything that was acknowledged is lost or comes twice.

In: a stage. Out: figures and faults. A process that puts, claims and commits is killed at a line of its output that the seed chooses, so it
dies somewhere in its next calls; then the service over HTTP, with groups in its keeping. It waits for processes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.buffer_groups import LENGTHS, make_group, same
from benchmarks.buffer_roles import AT_A_TIME
from benchmarks.buffer_stage import HTTP, Stage, role
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.types import GroupState

LATER_S = 86_400.0
"""When all leases have run out."""


def recover(stage: Stage, kills: int, seed: int, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Figures and faults; `names`: of groups on the service's record that were not put yet."""
    rng = random.Random(seed)
    until_claim, opening, acknowledged, wrong = [], [], 0, []
    for number in range(kills):
        folder = stage.folder / f"crash-{number}"
        said = _run_and_kill(folder, rng.randint(6, 24))
        killed = time.perf_counter()
        done = subprocess.run(role("claim", str(folder)), capture_output=True, text=True, check=True)
        until_claim.append(time.perf_counter() - killed)
        claimed, seconds = (json.loads(line) for line in done.stdout.splitlines())
        opening.append(seconds["seconds"])
        if not claimed["claimed"]:
            wrong.append(f"kill {number}: nothing could be claimed")
        acknowledged += len(said["put"])
        wrong += [f"kill {number}: {fault}" for fault in _check(folder, said)]
    service_s, faults = _kill_service(stage, list(names))
    figures = {
        "kills": kills,
        "seed": seed,
        "acknowledged": acknowledged,
        "claim_after_kill_s": round(statistics.median(until_claim), 3),
        "open_and_claim_s": round(statistics.median(opening), 3),
        "service_claim_after_kill_s": round(service_s, 3),
    }
    return figures, wrong + faults


def _run_and_kill(folder: Path, lines: int) -> dict[str, set[str]]:
    """What was acknowledged, by kind."""
    said: dict[str, set[str]] = {"put": set(), "committed": set()}
    with subprocess.Popen(role("crash", str(folder)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for number, line in enumerate(process.stdout, start=1):
                if number == lines:
                    process.kill()
                if line.endswith("\n"):  # what it had said by then counts
                    for kind, names in json.loads(line).items():
                        said[kind].update(names)
        finally:
            process.kill()
    return said


def _check(folder: Path, said: dict[str, set[str]]) -> list[str]:
    """The faults of a store that a killed process left: groups that are neither committed nor to be had, or both."""
    buffer = EmbeddedBuffer(folder, clock=lambda: time.time() + LATER_S)
    left: list[str] = []
    wrong = []
    try:
        while groups := buffer.claim(AT_A_TIME, "checker", 10 * LATER_S):
            for group in groups:
                left.append(group.group_id)
                if not same(group, make_group(group.group_id, LENGTHS[0], int(group.group_id.rpartition("-")[2]))):
                    wrong.append(f"{group.group_id} came back as another")
    finally:
        buffer.close()
    reader = BufferReader(folder)
    try:
        committed = {entry.group_id for entry in reader.entries() if entry.state is GroupState.COMMITTED}
    finally:
        reader.close()
    if lost := said["put"] - committed - set(left):
        wrong.append(f"{len(lost)} acknowledged groups are lost")
    if undone := said["committed"] - committed:
        wrong.append(f"{len(undone)} acknowledged commits are undone")
    if len(set(left)) < len(left) or committed & set(left):
        wrong.append("a group could be had twice")
    return wrong


def _kill_service(stage: Stage, names: list[str]) -> tuple[float, list[str]]:
    groups = [make_group(name, LENGTHS[0], kind) for kind, name in enumerate(names)]
    stage.stores[HTTP].put(groups)
    began = time.perf_counter()
    service = stage.restart_service()
    stage.stores[HTTP] = service
    found = service.take(len(groups))
    seconds = time.perf_counter() - began
    fine = len(found) == len(groups) and all(same(*pair) for pair in zip(found, groups, strict=True))
    return seconds, [] if fine else [f"the service gave {len(found)} groups after its kill, or others"]
