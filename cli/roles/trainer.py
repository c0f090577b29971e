"""The trainer role: rank 0 of the trainer, which here is its only one. torch and megatron are loaded here and nowhere else."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from palestra.cli.config import dump_toml
from palestra.cli.roles.context import RoleContext, on_stop
from palestra.server.client import ServiceClient
from palestra.server.health import HealthListener
from palestra.trainer.settings import TrainerSettings


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
    settings = settings_of(context)
    client = ServiceClient(context.peer("service"), context.token)
    with HealthListener(doing.status) as listener:
        context.announce(listener.url)
        from palestra.trainer.loop import Trainer
        from palestra.trainer.settings import make_backend

        trainer = Trainer(settings, make_backend(settings), client, context.folder, stopping.is_set, doing.say)
        trainer.run()
    client.close()
    return 0


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
        eval=config.eval,
        colocated=config.schedule.colocated,
        config_hash=hashlib.sha256(dump_toml(config).encode()).hexdigest(),
    )
