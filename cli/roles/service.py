"""The service role: gateway, recorder, plan and buffer of one run. No user code runs here."""

from __future__ import annotations

import logging

from palestra.cli.roles.context import RoleContext
from palestra.envs.tasks import read_tasks, task_to_json
from palestra.server.app import bind, build_app, serve
from palestra.server.gateway.session import SessionLimits
from palestra.server.plan.plan import PlanSettings
from palestra.server.renderer.registry import load_renderer
from palestra.server.service import RolloutService, ServiceSettings


def main(context: RoleContext) -> int:
    """Serves until SIGTERM."""
    service = RolloutService(settings_of(context), load_renderer(context.model))
    app = build_app(service, context.token)
    started = serve(app, bind("127.0.0.1", 0), context.announce)
    if not started:
        logging.getLogger(__name__).error("the service did not start")
    return 0 if started else 1


def settings_of(context: RoleContext) -> ServiceSettings:
    """The service's settings from the run's configuration."""
    config = context.config
    algo, rollout = config.algo, config.rollout
    window = min(algo.max_context or rollout.context_len, rollout.context_len)
    tasks = None if config.env.tasks is None else [task_to_json(task) for task in read_tasks(config.env.tasks)]
    return ServiceSettings(
        store=context.folder / "store",
        engine_url=context.peer("engine"),
        model=config.model.path,
        limits=SessionLimits(algo.max_turns, algo.max_response, window, algo.temperature),
        plan=PlanSettings(
            groups_per_step=algo.groups_per_step,
            group_size=algo.group_size,
            staleness=config.schedule.staleness,
            last_step=config.run.steps,
            drop_zero_variance=algo.drop_zero_variance,
            retries=rollout.retries,
            seed=algo.seed,
            shuffle=config.env.order == "shuffle",
            rollout_deadline_s=2 * algo.episode_deadline_s + 120.0,
        ),
        update_mode=config.schedule.update_mode,
        deadline_s=config.schedule.deadline_s,
        tasks=tasks,
    )
