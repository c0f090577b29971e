"""The echo environment that our host serves to the benchmark: it does what the one behind OpenEnv's server does."""

from __future__ import annotations

from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import register
from palestra.envs.types import Message, Task

ECHO = "benchmarks.env_step_echo:bench/Echo-v0"


@register("bench/Echo-v0")
class Echo(MessageEnv):
    """Says what it hears."""

    tasks = (Task("ready", id="echo"),)

    def respond(self, action: Message) -> Response:
        """Never ends."""
        return Response([{"role": "user", "content": action["content"]}])
