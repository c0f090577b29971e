"""The trainer role: rank 0 of the trainer, which here is its only one. torch and megatron are loaded here and nowhere else."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from palestra.cli.config import dump_toml
from palestra.cli.roles.context import RoleContext, on_stop
from palestra.server.client import ServiceClient
from palestra.server.health import HealthListener
from palestra.server.types import RenderedRow
from palestra.trainer.settings import TrainerSettings, check_programs

if TYPE_CHECKING:
    from palestra.server.renderer.types import Renderer
    from palestra.trainer.loop import Trainer
    from palestra.trainer.types import RolloutService


class Doing:
    """What the trainer is at, for /health."""

    def __init__(self) -> None:
        self.text = "trainer loads the model"

    def status(self) -> dict[str, Any]:
        """The reply to /health."""
        return {"status": "ok", "doing": self.text}

    def say(self, text: str) -> None:
        """Changes it."""
        self.text = f"trainer {text}"


def main(context: RoleContext) -> int:
    """Trains to the last step, or to the end of the step in which SIGTERM came."""
    stopping, doing = threading.Event(), Doing()
    on_stop(stopping.set)
    with HealthListener(doing.status) as listener:
        check_programs(settings_of(context))
        context.announce(listener.url)
        if context.config.run.mode == "train_only":
            trainer_of_dump(context, stopping.is_set, doing.say).run()
            return 0
        client = ServiceClient(context.peer("service"), context.token)
        trainer_of_service(context, client, stopping.is_set, doing.say).run()
        client.close()
    return 0


def trainer_of_service(
    context: RoleContext, client: ServiceClient, stop: Callable[[], bool], say: Callable[[str], None]
) -> Trainer:
    """A trainer of what the service hands out, which keeps its batches where `run.dump` says; with `run.mode = "rollout_only"` it only
    keeps them.

    Raises:
        TrainerError: the model cannot be trained, or the folder of the batches is another run's.
    """
    from palestra.trainer.checkpoints import model_fingerprint
    from palestra.trainer.loop import Trainer
    from palestra.trainer.offline import DumpWriter, play_only
    from palestra.trainer.settings import make_backend
    from palestra.trainer.step import train_batch

    settings, run = settings_of(context), context.config.run
    trains = run.mode == "train"
    keep = None
    if run.dump is not None:
        fingerprint = model_fingerprint(settings.model)
        keep = DumpWriter(folder_of(run.dump), run.name, fingerprint, settings.config_hash, trains=trains)
    return Trainer(
        settings,
        make_backend(settings),
        client,
        context.folder,
        stop,
        say,
        train=train_batch if trains else play_only,
        keep=keep,
    )


def trainer_of_dump(context: RoleContext, stop: Callable[[], bool], say: Callable[[str], None]) -> Trainer:
    """A trainer of the batches in `run.dump`, which needs nobody.

    Raises:
        TrainerError: there are none, or the model cannot be trained.
    """
    from palestra.trainer.checkpoints import model_fingerprint
    from palestra.trainer.loop import Trainer
    from palestra.trainer.offline import DumpSource, NoEngines, check_age
    from palestra.trainer.settings import make_backend

    settings, run = settings_of(context), context.config.run
    assert run.dump is not None, "the configuration refuses this mode without it"
    check_age(folder_of(run.dump), run.steps, context.config.schedule.staleness(settings.algo.updates_per_batch))
    source = DumpSource(folder_of(run.dump), model_fingerprint(settings.model), Rendering(context))
    # Of a service only the publisher asks for more than a source has, and here there is none.
    service = cast("RolloutService", source)
    return Trainer(settings, make_backend(settings), service, context.folder, stop, say, publisher=NoEngines())


class Rendering:
    """Renders transcripts as the service does, where there is none. The renderer is loaded at the first call: most runs need none."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context

    @functools.cached_property
    def _renderer(self) -> Renderer:
        from palestra.server.renderer.registry import load_renderer

        return load_renderer(self._context.model, self._context.run.model.family)

    def __call__(self, transcripts: Sequence[Mapping[str, Any]]) -> list[RenderedRow]:
        """Transcripts of a warm start as supervised rows.

        Raises:
            ServerError: one cannot be rendered.
        """
        from palestra.server.gateway.dialects.reading import check_messages, check_tools

        rows = []
        for said in transcripts:
            check_messages(said["messages"])
            check_tools(said.get("tools") or ())
            rows.append(self._renderer.transcript(said["messages"], said.get("tools") or ()))
        return rows


def folder_of(dump: Path) -> Path:
    """The folder that `run.dump` means."""
    return dump.expanduser().resolve()


def settings_of(context: RoleContext) -> TrainerSettings:
    """The trainer's settings from the run's configuration."""
    config = context.config
    return TrainerSettings(
        model=context.model,
        steps=config.run.steps,
        algo=config.algo,
        optim=config.optim,
        train=config.train,
        weights=config.weights,
        sft=config.sft,
        megatron=config.megatron,
        publish_steps=config.schedule.publish_steps(config.algo.updates_per_batch),
        save_every=config.run.save_every,
        keep_checkpoints=config.run.keep_checkpoints,
        wait_s=config.schedule.deadline_s,
        off_policy=config.schedule.kind == "async" or config.schedule.staleness(config.algo.updates_per_batch) > 0,
        eval=None if config.run.mode == "train_only" else config.eval,
        colocated=config.schedule.colocated,
        config_hash=hashlib.sha256(dump_toml(config).encode()).hexdigest(),
    )
