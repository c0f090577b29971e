"""The service role: gateway, recorder, plan and buffer of one run. No user code runs here."""

from __future__ import annotations

import logging
import math
import os
import socket
from pathlib import Path

from palestra.cli.config import ConfigError, RunConfig, ServeConfig
from palestra.cli.launch.local import LISTENERS
from palestra.cli.roles.context import RoleContext
from palestra.envs.tasks import task_to_json
from palestra.envs.tasksources import read_any_tasks
from palestra.server.app import build_app, control_app, serve
from palestra.server.buffer.opening import open_buffer
from palestra.server.buffer.retention import Retention
from palestra.server.buffer.types import RunBuffer
from palestra.server.gateway.session import SessionLimits
from palestra.server.listen import bind, url_of
from palestra.server.plan.types import PlanSettings
from palestra.server.renderer.registry import load_renderer
from palestra.server.service import RolloutService, ServiceSettings
from palestra.server.workers.types import EnginePlace

NEVER = 1 << 40
"""Train steps that no run comes to: the bound of a service that drops nothing for its age."""


def main(context: RoleContext) -> int:
    """Serves until SIGTERM."""
    service = RolloutService(settings_of(context), load_renderer(context.model, context.run.model.family))
    listeners = given_listeners() or [bind("127.0.0.1", 0)]
    model, control = listeners[0], listeners[-1]
    service.base_url = base_url(context, model, control)
    apps = [(build_app(service, context.token, control_here=model is control), model)]
    if control is not model:
        apps.append((control_app(service, context.token), control))
    started = serve(apps, lambda: context.announce(url_of(control)))
    if not started:
        logging.getLogger(__name__).error("the service did not start")
    return 0 if started else 1


def given_listeners() -> list[socket.socket]:
    """The listening sockets that the supervisor holds for this role: of the model routes, and of the control routes where they have their
    own. None: the role makes one itself."""
    sockets = [socket.socket(fileno=int(number)) for number in os.environ.get(LISTENERS, "").split(",") if number]
    for sock in sockets:
        sock.set_inheritable(False)
    return sockets


def base_url(context: RoleContext, model: socket.socket, control: socket.socket) -> str:
    """What sessions are told; "": wherever their opener reached us, which with one listener is right behind any address."""
    if isinstance(context.run, ServeConfig) and context.run.serve.url is not None:
        return context.run.serve.url
    return "" if model is control else url_of(model)


def engine_place(context: RoleContext) -> EnginePlace:
    """Where the engine role says that its engines are.

    Raises:
        ConfigError: the agents' token cannot be read.
    """
    said = context.announced("engine")
    file = context.run.rollout.agent_token_file
    try:
        token = None if file is None else Path(file).expanduser().read_text().strip()
    except OSError as error:
        raise ConfigError(f"rollout.agent_token_file: {file} cannot be read: {error.strerror}") from None
    return EnginePlace(
        url=said["url"],
        workers=tuple(said.get("workers", ())),
        router=bool(said.get("router", False)),
        kind=said.get("kind", "embedded"),
        agents=dict(said.get("agents", {})),
        agent_token=token,
    )


def settings_of(context: RoleContext) -> ServiceSettings:
    """The service's settings from the run's configuration."""
    return _of_training(context, context.run) if isinstance(context.run, RunConfig) else _alone(context, context.run)


def _of_training(context: RoleContext, config: RunConfig) -> ServiceSettings:
    algo, rollout = config.algo, config.rollout
    window = min(algo.max_context or rollout.context_len, rollout.context_len)
    tasks = None if config.env.tasks is None else [task_to_json(task) for task in read_any_tasks(config.env.tasks)]
    return ServiceSettings(
        store=context.folder / "store",
        engine=engine_place(context),
        model_folder=context.model,
        routed_experts=context.run.rollout.routed_experts,
        model=config.model.path,
        limits=SessionLimits(algo.max_turns, algo.max_response, window, algo.temperature),
        plan=plan_settings(config),
        update_mode=config.schedule.update_mode,
        deadline_s=config.schedule.deadline_s,
        tasks=tasks,
        open_buffer=lambda folder: buffer_of(config, folder),
        places=rollout.running * max(1, rollout.engines, len(rollout.urls)),
    )


def plan_settings(config: RunConfig) -> PlanSettings:
    """What the plan follows, from the run's configuration."""
    algo, schedule, rollout = config.algo, config.schedule, config.rollout
    return PlanSettings(
        groups_per_step=algo.groups_per_step,
        group_size=algo.group_size,
        staleness=schedule.staleness(algo.updates_per_batch),
        ahead=schedule.ahead(algo.updates_per_batch),
        oversample=algo.oversample,
        max_in_flight=schedule.max_in_flight,
        last_step=config.run.steps,
        drop_zero_variance=algo.drops_equal_groups,
        min_group=algo.min_group,
        max_truncated=algo.max_truncated,
        mask_old=schedule.too_old == "mask",
        mask_earlier=schedule.partial == "resume" and schedule.partial_old_tokens == "mask",
        budget_s=schedule.generation_budget_s,
        budget_tokens=schedule.generation_budget_tokens,
        least=max(1, math.ceil(schedule.min_batch * algo.groups_per_step)),
        colocated=schedule.colocated,
        program="function" if rollout.function is not None else "plan" if rollout.plan is not None else "none",
        retries=rollout.retries,
        seed=algo.seed,
        shuffle=config.env.order == "shuffle",
        rollout_deadline_s=2 * algo.episode_deadline_s + 120.0,
    )


def buffer_of(config: RunConfig, folder: Path) -> RunBuffer:
    """The run's buffer, where its configuration says."""
    kept = config.buffer
    retention = Retention(keep_s=kept.keep_hours * 3600, keep_bytes=kept.keep_bytes)
    return open_buffer(folder, kept.url, config.run.name, retention=retention)


def _alone(context: RoleContext, config: ServeConfig) -> ServiceSettings:
    """Without a trainer there are no tasks, and so nothing for a plan to open: what it is told of training is never asked for."""
    serve = config.serve
    key = (context.folder / "roles" / "agent.key").read_text().strip() if serve.agent_key else None
    return ServiceSettings(
        store=context.folder / "store",
        engine=engine_place(context),
        model_folder=context.model,
        routed_experts=context.run.rollout.routed_experts,
        model=config.model.path,
        limits=SessionLimits(
            max_turns=serve.max_turns,
            max_response=serve.max_response,
            max_context=config.window,
            temperature=serve.temperature,
            max_tokens=serve.max_tokens,
            deadline_s=serve.session_deadline_s,
            sampling=serve.sampling,
        ),
        plan=PlanSettings(
            groups_per_step=1,
            group_size=1,
            staleness=NEVER if serve.staleness is None else serve.staleness,
            last_step=0,
            drop_zero_variance=serve.drop_zero_variance,
            retries=0,
            seed=0,
            shuffle=False,
            rollout_deadline_s=serve.session_deadline_s,
        ),
        update_mode=config.schedule.update_mode,
        deadline_s=config.schedule.deadline_s,
        agent_key=key,
    )
