"""The service's first look at its engines: who is there, whether each is fit, and which weights they have.

In: the table, and what is known of the model. Out: workers that may have requests, and the version in force. It waits for the engines, each
call with a deadline.
"""

from __future__ import annotations

import asyncio

from palestra.server.engine_wire import version_of
from palestra.server.types import EngineError
from palestra.server.workers.probe import ModelFacts, answers_alone, probe_samples, probe_worker
from palestra.server.workers.table import WorkerTable
from palestra.server.workers.types import Weights

FIRST_LOOK_S = 30.0


async def take_up(table: WorkerTable, facts: ModelFacts) -> None:
    """Lets every engine go on, probes it, and notes the newest version among them as the one in force. Those that do not answer, or have
    other weights, are quarantined as long as one is there.

    Raises:
        EngineError: no engine answers, or one that does is unfit.
    """
    seen = await table.look(table.members(), "/model_info", timeout_s=FIRST_LOOK_S)
    if not seen.ok:
        raise EngineError("no engine answers: " + "; ".join(str(error) for error in seen.failed.values()))
    for url, error in seen.failed.items():
        await table.quarantine(table.member(url), f"did not answer at the start ({error})", heals=True)
    there = [table.member(url) for url in seen.ok]
    # A former service may have died in the middle of a weight update, which will never end: requests would wait for it.
    resumed = await table.ask(there, "/continue_generation", {}, timeout_s=FIRST_LOOK_S)
    for error in resumed.failed.values():
        raise error
    await asyncio.gather(*(table.learn_ranks(worker, FIRST_LOOK_S) for worker in there))
    infos = await asyncio.gather(*(probe_worker(worker.url, table.calls, facts) for worker in there))
    if not all(answers_alone(info) for info in infos):
        await probe_samples(table.place.url.rstrip("/"), table.calls, facts, facts.vocab_size or 0)
    versions = [version_of(info.get("weight_version", "default")) for info in infos]
    newest = max(versions)
    # A fresh engine names the folder that it was started with; of later weights it is not known how they travelled.
    folders = [info.get("model_path") for info in infos if info.get("weight_version") == "default"]
    table.in_force(Weights(newest, folders[0] if folders and newest == 0 else None))
    for worker, version in zip(there, versions, strict=True):
        worker.version = version
        if version != newest:
            await table.quarantine(worker, f"has version {version}, not {newest}")
