"""`palestra env try ID`: a person plays an episode in the terminal, in the model's place.

In: lines of standard input, typed or piped. Out: the conversation, and what it earned. Exit status 0; 2 where the environment cannot be
made; 1 where it has a fault. Waits for the person, and for the environment's tools.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console

from palestra.cli.envs.arguments import add_env, look_here, read_set
from palestra.cli.envs.messages import print_message, print_reward
from palestra.cli.envs.show import signature
from palestra.envs.checking.playing import Env, inside
from palestra.envs.checking.scripts import raw_call, say
from palestra.envs.checking.types import Broken
from palestra.envs.registry import make_env
from palestra.envs.types import EnvError, Message, StopReason, ToolSpec

HELP = """What you type is said to the environment, in the model's place:
  TOOL {"argument": 1}      calls a tool, with a JSON object
  TOOL argument=1 other=x   calls a tool; a value is JSON, or a text
  anything else             is an answer
A line of three double quotes begins a longer answer, another one ends it.
  :tools    the tools    :oracle   what the oracle would say    :help   this
  :quit     stop here; what there is is scored"""
FENCE = '"""'


class Left(Exception):
    """The person stops here."""


def main(argv: Sequence[str]) -> int:
    """Plays one episode."""
    parser = argparse.ArgumentParser(
        prog="palestra env try", description="Play an episode in the model's place.", allow_abbrev=False
    )
    add_env(parser)
    parser.add_argument("--task", type=int, metavar="N", help="index of the task; a seeded draw unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the episode (0)")
    options = parser.parse_args(argv)
    look_here(options.id)
    try:
        env = make_env(options.id, read_set(options.set))
    except (EnvError, ValueError) as error:
        print(f"palestra env try: {error}", file=sys.stderr)
        return 2
    with closing(env):
        try:
            return Seat(env, Console(highlight=False, soft_wrap=True)).play(options.seed, options.task)
        except ValueError as error:  # no such task
            print(f"palestra env try: {error}", file=sys.stderr)
            return 2
        except (EnvError, Broken) as error:
            print(f"palestra env try: the environment has a fault, and the episode no reward: {error}", file=sys.stderr)
            return 1


class Seat:
    """Where the person sits."""

    def __init__(self, env: Env, console: Console) -> None:
        self.env, self.inner, self.console = env, inside(env), console
        self._typed = sys.stdin.isatty()

    def play(self, seed: int, task: int | None) -> int:
        """From reset to the end; the exit status."""
        observation, _ = self.env.reset(seed=seed, options={} if task is None else {"task": task})
        self._show(observation)
        if self._typed:
            self.console.print(":help says what can be typed", style="dim")
        try:
            for message in self._replies():
                self._show([message])
                observation, _, terminated, truncated, info = self.env.step(message)
                self._show(observation)
                if terminated or truncated:
                    break
            else:
                raise Left
        except Left:
            _, info = self.inner.finish(StopReason.CANCELLED)
        step = info["step"]
        self.console.print(f"{step.stop_reason} after {step.turn} turns, {step.tool_calls} calls", style="dim")
        print_reward(self.console, step.reward)
        return 0

    def _show(self, messages: Sequence[Message]) -> None:
        for message in messages:
            print_message(self.console, message)

    def _replies(self) -> Iterator[Message]:
        """Assistant messages, as they are typed; until the input ends.

        Raises:
            Left: the person quits.
        """
        while (line := self._line("> ")) is not None:
            word = line.strip()
            if word in (":quit", ":q"):
                raise Left
            if word.startswith(":"):
                self._command(word)
            elif word == FENCE:
                yield say("\n".join(self._longer()))
            elif word:
                message = read_reply(line, self.inner.tool_specs())
                if isinstance(message, str):
                    self.console.print(message, style="red", markup=False)
                else:
                    yield message

    def _longer(self) -> Iterator[str]:
        while (line := self._line(". ")) is not None and line.strip() != FENCE:
            yield line

    def _line(self, sign: str) -> str | None:
        try:
            return input(sign if self._typed else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Left from None

    def _command(self, word: str) -> None:
        if word == ":tools":
            for spec in self.inner.tool_specs():
                self.console.print(f"  {signature(spec)}", markup=False)
        elif word == ":oracle":
            self._oracle()
        else:
            self.console.print(HELP if word == ":help" else f"no command {word}\n{HELP}", markup=False)

    def _oracle(self) -> None:
        assert self.inner.task is not None, "an episode is going on"
        try:
            self._show(self.inner.oracle(self.inner.task))
        except NotImplementedError as error:
            self.console.print(str(error), style="red", markup=False)


def read_reply(line: str, tools: Sequence[ToolSpec]) -> Message | str:
    """What a line says: a call where it begins with a tool's name, else an answer. A text says what is wrong with a call."""
    name, _, rest = line.strip().partition(" ")
    known = {spec["function"]["name"]: spec["function"]["parameters"] for spec in tools}
    if name not in known:
        return say(line)
    rest = rest.strip()
    if not rest or rest.startswith("{"):
        return raw_call(name, rest or "{}")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        return f"{name}: {error}; write {name} {{...}} or {name} argument=value"
    if wrong := [word for word in words if "=" not in word]:
        return f"{name}: {wrong[0]!r} is no argument=value; quote a value that has spaces"
    arguments = {key: _value(text, known[name], key) for key, _, text in (word.partition("=") for word in words)}
    return raw_call(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """JSON, or the text itself where that is wanted or it is none."""
    if schema.get("properties", {}).get(key, {}).get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
