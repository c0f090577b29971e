"""Runs escape probes against a backend, each in a box of its own, and judges them.

In: a started backend and a scene that was there before it started. Out: outcomes. Waits for the probes' code, a few at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

from palestra.sandbox.attacks import files, kernel, network, processes, resources
from palestra.sandbox.attacks.judges import untried
from palestra.sandbox.attacks.prelude import program, told
from palestra.sandbox.attacks.scene import Scene, survivors
from palestra.sandbox.attacks.types import Attack, Outcome, Seen, weigh
from palestra.sandbox.types import Backend, Box, BoxSpec, ExecResult, SandboxError

ATTACKS: tuple[Attack, ...] = (
    *files.ATTACKS,
    *network.ATTACKS,
    *processes.ATTACKS,
    *resources.ATTACKS,
    *kernel.ATTACKS,
)


async def run_attacks(
    backend: Backend, scene: Scene, attacks: Sequence[Attack] = ATTACKS, *, at_once: int = 3
) -> list[Outcome]:
    """The outcomes, in the attacks' order.

    Raises:
        SandboxError: no box can be had.
    """
    places = asyncio.Semaphore(at_once)

    async def one(attack: Attack) -> Outcome:
        async with places:
            return await run_attack(backend, scene, attack)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(attack)) for attack in attacks]
    return [task.result() for task in tasks]


async def run_attack(backend: Backend, scene: Scene, attack: Attack) -> Outcome:
    """One probe in a box of its own, which is destroyed; what survived of it is ended too.

    Raises:
        SandboxError: no box can be had.
    """
    begun = time.monotonic()
    box = await backend.create(BoxSpec(limits=attack.limits))
    marker = scene.marker(attack.name)
    try:
        seen = await observe(box, scene, attack, marker)
        judged = weigh(attack, attack.judge(seen), backend.enforced())
        if seen.result.status == "infra_error" and judged.verdict == "contained":
            judged = untried(seen)
    finally:
        await box.close()
        for pid in survivors(marker):
            os.kill(pid, signal.SIGKILL)
    return Outcome(attack, judged, time.monotonic() - begun)


async def observe(box: Box, scene: Scene, attack: Attack, marker: str) -> Seen:
    """Runs a probe's code and what belongs to it, and looks around."""
    result = await box.run_python(program(attack.code, scene.facts(attack.name)), timeout=attack.timeout)
    alive = survivors(marker)
    fetched, answers = b"", dict[str, str]()
    if attack.act is not None and box.alive:
        try:
            fetched, answers = await attack.act(box, scene)
        except SandboxError as error:
            answers = {"interface": f"{type(error).__name__}: {error}"}
    usable = await _usable(box)
    return Seen(result, told(result), scene, attack.limits, usable, len(alive), fetched, answers)


async def _usable(box: Box) -> bool:
    """Whether the box still does as it is told."""
    if not box.alive:
        return False
    result: ExecResult = await box.run_python("print(6 * 7)", timeout=10)
    return result.status == "ok" and result.stdout == b"42\n"
