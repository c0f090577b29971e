"""The engine role: the embedded engine on the run's model, SGLang engines and their router as processes, or engines that others run.

It announces where requests go and where each engine is, once all are ready. Waits for SIGTERM; SGLang's processes end with it.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path

from palestra.cli.config import RunConfig
from palestra.cli.engines.assemble import assemble
from palestra.cli.engines.external import probe
from palestra.cli.engines.fleet import EngineFleet
from palestra.cli.roles.context import RoleContext, on_stop

LOG = logging.getLogger(__name__)
SHARE = 0.9
"""Of the supervisor's deadline for a role: whoever gives up first should be the one who knows which engine is late, and why."""


def main(context: RoleContext) -> int:
    """Serves until SIGTERM."""
    return embedded(context) if context.run.rollout.engine == "embedded" else sglang(context)


def engine_model(context: RoleContext) -> Path:
    """The folder that engines start with: the trained model, or its quantised form."""
    other = context.run.weights.engine_model if isinstance(context.run, RunConfig) else None
    return other or context.model


def embedded(context: RoleContext) -> int:
    """The engine of ours, in this very process."""
    # Here, because they load torch, which SGLang's supervisor has no use for.
    from palestra.server.embedded.run import run
    from palestra.server.embedded.types import EngineOptions

    rollout = context.run.rollout
    options = EngineOptions(
        model_path=str(context.model),
        num_threads=rollout.threads,
        context_length=rollout.context_len,
        max_running=rollout.running,
        page_size=rollout.page_size or 16,
        max_total_tokens=rollout.max_total_tokens or 32_768,
        allow_forced_ids=rollout.forced_ids,
    )
    run(options, context.announce)
    return 0


def sglang(context: RoleContext) -> int:
    """Engines and router as processes of their own, kept up; engines of others are looked at and left alone.

    Raises:
        EngineSetupError: they cannot be started as they are described.
        FleetError: they do not start, or not stay up; or engines of others do not answer.
    """
    rollout, stop = context.run.rollout, threading.Event()
    on_stop(stop.set)
    # The supervisor's choice for torch in processes of ours; SGLang makes its own.
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    assembly = assemble(rollout, engine_model(context), context.run.sglang, context.run.router)
    pools = probe(assembly.external, rollout.router_url) if assembly.external else {}
    fleet = EngineFleet(
        assembly.engines,
        assembly.router,
        context.folder / "log",
        start_deadline_s=context.run.run.start_deadline_s * SHARE,
        say=LOG.info,
        external=assembly.external,
        device=assembly.device,
    )
    with fleet:
        if not fleet.start(stop):
            return 0
        for url, sizes in {**pools, **fleet.pools}.items():
            LOG.info("%s: %s", url, sizes)
        context.announce(
            rollout.router_url or fleet.url,
            workers=fleet.workers,
            router=rollout.router_url is not None or fleet.router is not None,
            kind="sglang",
            agents=rollout.agents,
            pools={url: asdict(sizes) for url, sizes in {**pools, **fleet.pools}.items()},
        )
        fleet.watch(stop)
    return 0
