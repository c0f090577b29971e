"""Load calls of the transports that need no process group: memory on one host, folders, folders that an agent fetched.

In: an open publish and what the trainer said. Out: engines that have the weights, or are left out. Waits for engines and agents, each call
with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from palestra.server.publishing.round import Round
from palestra.server.types import EngineError, SessionError
from palestra.server.workers.types import Worker


async def load_shared(current: Round, payloads: Mapping[str, Sequence[str]], load_format: str, *, last: bool) -> None:
    """A bucket that each engine reads by its own payloads, one per rank.

    Raises:
        SessionError: 400 where an engine that takes part has no payloads, or another number of them than ranks.
        EngineError: nobody is left.
    """
    for worker in current.workers:
        if len(payloads.get(worker.url, ())) != worker.ranks:
            raise SessionError(f"payloads: {worker.url} takes part and needs {worker.ranks} of them, one for each rank")
    await current.hold()
    current.calls += 1
    beside = {"load_format": load_format, **current.versioned(last)}
    await current.each(
        "/update_weights_from_tensor",
        lambda worker: {"serialized_named_tensors": list(payloads[worker.url]), **beside},
        timeout_s=current.deadline_s,
    )
    current.dirty = current.kind == "sglang"


async def load_value(current: Round, payload: str) -> None:
    """A bucket by value, base64 of safetensors bytes, to embedded engines.

    Raises:
        EngineError: nobody is left.
    """
    await current.hold()
    current.calls += 1
    said = {"serialized_named_tensors": [payload], "load_format": "safetensors"}
    await current.all("/update_weights_from_tensor", said, timeout_s=current.deadline_s)


async def seal(current: Round) -> None:
    """Tells engines that all buckets came.

    Raises:
        EngineError: nobody is left.
    """
    await current.hold()
    said = {"weight_version": str(current.version), "flush_cache": current.flush} if current.kind == "embedded" else {}
    await current.all("/end_weight_update", said, timeout_s=current.deadline_s)
    current.begun = False


async def load_folder(current: Round, path: str) -> None:
    """A folder, the same for all or what each engine's agent made of the shared one.

    Raises:
        EngineError: nobody is left.
    """
    paths = await _paths(current, path)
    await current.hold()
    current.calls += 1
    await current.each(
        "/update_weights_from_disk",
        lambda worker: {
            "model_path": paths[worker.url],
            "weight_version": str(current.version),
            "flush_cache": current.flush,
        },
        timeout_s=current.deadline_s,
    )


async def _paths(current: Round, path: str) -> dict[str, str]:
    """Worker -> the folder to load. Agents fetch theirs while the engines still sample."""
    if current.transport != "delta":
        return {worker.url: path for worker in current.workers}
    fleet, wanted = current.engines.fleet, {"version": current.version, "shared": path}
    agents = {worker.url: Worker(worker.agent) for worker in current.workers if worker.agent is not None}
    pulls = (fleet.ask([agent], "/pull", wanted, timeout_s=current.deadline_s) for agent in agents.values())
    paths: dict[str, str] = {}
    failed: dict[str, EngineError | str] = {
        worker.url: f"{worker.url} has no agent: deltas need `palestra engine agent` on every engine's host"
        for worker in current.workers
        if worker.url not in agents
    }
    for (url, agent), answer in zip(agents.items(), await asyncio.gather(*pulls), strict=True):
        if agent.url in answer.ok:
            paths[url] = str(answer.ok[agent.url]["path"])
        else:
            failed[url] = answer.failed[agent.url]
    await current.leave_out(failed)
    return paths
