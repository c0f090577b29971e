"""Thousands of runs mixed with attacks, 32 at a time, leave nothing: no process, cgroup, mount, folder, descriptor or memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import secrets
from collections import Counter
from pathlib import Path

import pytest

from palestra.sandbox.attacks.scene import survivors
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import MIB, Box, BoxSpec, ExecResult, Limits
from tests.conformance.sandbox_leaks import descendants, grown, holdings

AT_ONCE = 32
RUNS_PER_BOX = 25
SPEC = BoxSpec(limits=Limits(memory_bytes=64 * MIB, pids=16, disk_bytes=8 * MIB, total_output_bytes=MIB))
MOST_GROWTH = 8 * MIB
LEFT = """
import os
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["{marker}", "60"])
        os._exit(0)
"""
BOMB = """
import os
for _ in range(8):
    try: os.fork()
    except OSError: pass
while True: pass
"""
ATTACKS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "daemons": (LEFT, 20, ("ok",)),
    "fork bomb": (BOMB, 0.2, ("timeout", "oom")),
    "memory": ("held = [b'x' * (4 << 20) for _ in range(100)]", 20, ("oom",)),
    "loop": ("while True: pass", 0.1, ("timeout",)),
    "flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", 20, ("output_limit",)),
    "disk": ("open('/tmp/fill', 'wb').write(b'x' * (12 << 20))", 20, ("nonzero",)),
    "abort": ("import os; os.abort()", 20, ("nonzero",)),
    "frames": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x' * 100)\n    except OSError: pass",
        20,
        ("ok",),
    ),
}
"""Code, seconds, and how it may end."""


class Soak:
    """A number of runs, taken by workers until all are done."""

    def __init__(self, pool: Pool, runs: int) -> None:
        self.pool, self.left = pool, runs
        self.marker = f"palestra-soak-{secrets.token_hex(8)}"
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def go(self) -> None:
        """Runs them all."""
        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(self._work(random.Random(number)))

    async def _work(self, dice: random.Random) -> None:
        while self.left > 0:
            taken = min(RUNS_PER_BOX, self.left)
            self.left -= taken
            async with self.pool.box() as box:
                for number in range(taken):
                    await self._one(box, dice, number)
                if dice.random() < 0.1:  # somebody who goes away in the middle
                    run = asyncio.create_task(box.exec("sleep 60"))
                    await asyncio.sleep(0)
                    run.cancel()

    async def _one(self, box: Box, dice: random.Random, number: int) -> None:
        kind = dice.random()
        if kind < 0.05:
            name = dice.choice(list(ATTACKS))
            code, timeout, good = ATTACKS[name]
            result = await box.run_python(code.replace("{marker}", self.marker), timeout=timeout)
            self._check(name, result, result.status in good)
        elif kind < 0.3:
            result = await box.exec(f"echo {number}")
            self._check("shell", result, result.stdout == b"%d\n" % number)
        else:
            result = await box.run_python(f"print({number})")
            self._check("python", result, result.stdout == b"%d\n" % number)

    def _check(self, name: str, result: ExecResult, good: bool) -> None:
        self.counts[name] += 1
        if not good:
            self.wrong.append(f"{name}: {result}"[:500])


def resident() -> dict[str, int]:
    """Memory of this process and of its keepers, bytes."""
    gc.collect()
    found = {"self": _rss("self")}
    for pid in descendants():
        if b"palestra.sandbox.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[str(pid)] = _rss(str(pid))
    return found


def _rss(pid: str) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def soak(runs: int) -> None:
    backend = Bubblewrap()
    try:
        await backend.start()
        pool = Pool(backend, SPEC, boxes=AT_ONCE + 4, warm=4, memory_bytes=(AT_ONCE + 8) * SPEC.limits.memory_bytes)
        await Soak(pool, AT_ONCE * 4).go()
        await pool.close()
        before = holdings()
        memory: list[dict[str, int]] = []
        parts = [Soak(pool, part) for part in (runs // 4, runs - runs // 4)]
        for part in parts:
            pool = Pool(backend, SPEC, boxes=AT_ONCE + 4, warm=4, memory_bytes=(AT_ONCE + 8) * SPEC.limits.memory_bytes)
            part.pool = pool
            await pool.start()
            await part.go()
            await pool.close()
            assert part.wrong == []
            assert survivors(part.marker) == []
            memory.append(resident())
        assert grown(before, holdings()) == []
        assert sum(itertools.chain.from_iterable(part.counts.values() for part in parts)) == runs
        assert {*ATTACKS} <= {*parts[1].counts}
        growth = {name: memory[1][name] - memory[0][name] for name in memory[0]}
        assert len(growth) == 2
        assert max(growth.values()) < MOST_GROWTH, growth
    finally:
        await backend.close()


@pytest.mark.ci
@pytest.mark.timeout(240)
async def test_a_bounded_soak() -> None:
    await soak(4000)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_the_whole_soak() -> None:
    await soak(20_000)
