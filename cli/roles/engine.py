"""The engine role: the embedded engine on the run's model."""

from __future__ import annotations

from palestra.cli.roles.context import RoleContext
from palestra.server.embedded.run import run
from palestra.server.embedded.types import EngineOptions


def main(context: RoleContext) -> int:
    """Serves until SIGTERM."""
    rollout = context.run.rollout
    options = EngineOptions(
        model_path=str(context.model),
        num_threads=rollout.threads,
        context_length=rollout.context_len,
        max_running=rollout.max_running,
        page_size=rollout.page_size,
        max_total_tokens=rollout.max_total_tokens,
        allow_forced_ids=rollout.forced_ids,
    )
    run(options, context.announce)
    return 0
