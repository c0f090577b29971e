"""The command line of `palestra eval`, and the spec that it stands for.

Words go in, a namespace and an `EvalSpec` come out. Nothing is waited for; what is wrong is a `ConfigError` that names the option.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from palestra.agents.config import AgentConfig
from palestra.agents.evaluation.types import EvalSpec
from palestra.cli.config import ConfigError
from palestra.envs.config import Section
from palestra.envs.overrides import read_settings, read_value
from palestra.envs.sandboxes import SandboxConfig

S = TypeVar("S", bound=Section)

DEFAULT_N = 50
SETTABLE = ("args", "agent", "sandbox")
_ENTRY = re.compile(r"[\w./~-]+:[A-Za-z_]\w*")


def parser() -> argparse.ArgumentParser:
    """Of a run; the readers have their own."""
    made = argparse.ArgumentParser(
        prog="palestra eval",
        description="Plays an environment with a model and says how well it does. Also: palestra eval show|diff|rescore DIR ...",
        allow_abbrev=False,
    )
    made.add_argument("env", help="an environment's id, such as palestra/Calculator-v0")
    model = made.add_argument_group("the model")
    model.add_argument("--model", required=True, help="its name, as the server knows it")
    model.add_argument("--base-url", help="an OpenAI-compatible URL, ending in /v1")
    model.add_argument("--service", metavar="DIR", help="instead of a URL: the folder of a running `palestra serve`")
    model.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="the variable that holds the key"
    )
    model.add_argument("--temperature", type=_from_zero, default=1.0)
    model.add_argument("--max-tokens", type=_from_one, default=1024, help="of one reply")
    model.add_argument(
        "--param", action="append", default=[], metavar="NAME=JSON", help="a further field of every request"
    )
    model.add_argument("--no-model-seed", action="store_true", help="send no seed, for servers that refuse the field")
    model.add_argument("--request-timeout", type=_above_zero, default=300.0, metavar="S", help="of one model call")
    what = made.add_argument_group("what is played")
    what.add_argument("-n", type=int, help=f"tasks: {DEFAULT_N} unless given (all where there are fewer); 0: all")
    what.add_argument("-k", type=_from_one, default=1, help="episodes of each task")
    what.add_argument("--tasks", metavar="FILE", help="a JSONL file of tasks, instead of the environment's own")
    what.add_argument(
        "--order", choices=("shuffle", "sequential"), default="shuffle", help="how the n tasks are chosen"
    )
    what.add_argument("--seed", type=int, default=0, help="of the shuffle, the environments and the model's sampling")
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="args.NAME=VALUE",
        help="an argument of the environment; also agent.NAME and sandbox.NAME",
    )
    what.add_argument("--max-turns", type=_from_one, default=8, help="model calls of one episode")
    what.add_argument("--deadline", type=_above_zero, default=600.0, metavar="S", help="of one episode")
    what.add_argument(
        "--agent", help="who plays: 'module:function', 'file.py:name' or a command; else the message loop"
    )
    what.add_argument("--pass-reward", type=float, default=1.0, help="an episode counts as right from here on")
    how = made.add_argument_group("how")
    how.add_argument("-c", "--concurrency", type=_from_one, default=16, help="episodes at a time")
    how.add_argument("--out", type=Path, metavar="DIR", help="the folder; below runs/ unless given")
    how.add_argument("--resume", action="store_true", help="go on in the folder where an evaluation was begun there")
    how.add_argument("--retry-errors", action="store_true", help="with --resume: play episodes without a reward again")
    how.add_argument("--allow-changed", action="store_true", help="with --resume: although something differs")
    how.add_argument("--max-errors", type=_from_one, default=20, help="end after so many errors in a row")
    how.add_argument("--price-in", type=_from_zero, metavar="P", help="per million prompt tokens")
    how.add_argument("--price-out", type=_from_zero, metavar="P", help="per million sampled tokens")
    how.add_argument("--json", action="store_true", help="the figures as one JSON object")
    how.add_argument("--html", type=Path, metavar="FILE", help="write a report, too")
    how.add_argument("--parquet", action="store_true", help="write episodes.parquet, too")
    return made


def spec_of(options: argparse.Namespace, tasks: int) -> EvalSpec:
    """The spec of a run whose source has so many tasks.

    Raises:
        ConfigError: what does not go together, or cannot be read.
    """
    if (options.base_url is None) == (options.service is None):
        raise ConfigError("give either --base-url URL or --service DIR")
    for word in ("retry_errors", "allow_changed"):
        if getattr(options, word) and not options.resume:
            raise ConfigError(f"--{word.replace('_', '-')} goes with --resume")
    tables = settings(options.set)
    agent = agent_of(options.agent, tables["agent"])
    return EvalSpec(
        env=options.env,
        model=options.model,
        base_url=(options.base_url or "").rstrip("/"),
        service=str(Path(options.service).resolve()) if options.service else "",
        args=tables["args"],
        tasks=options.tasks,
        n=min(DEFAULT_N, tasks) if options.n is None else (options.n or tasks),
        k=options.k,
        order=options.order,
        seed=options.seed,
        model_seed=not options.no_model_seed,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        params=dict(_pair(word, "--param") for word in options.param),
        max_turns=options.max_turns,
        deadline_s=options.deadline,
        request_timeout_s=options.request_timeout,
        agent=agent.model_dump(mode="json", exclude_defaults=True) | {"kind": agent.kind},
        sandbox=_section(SandboxConfig, tables["sandbox"], "--set sandbox").model_dump(mode="json", exclude_unset=True),
        pass_reward=options.pass_reward,
        price_in=options.price_in,
        price_out=options.price_out,
    )


def settings(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What `--set TABLE.KEY=VALUE` says, by table.

    Raises:
        ConfigError: a word that is none, or another table.
    """
    try:
        return read_settings(words, SETTABLE)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def agent_of(text: str | None, table: dict[str, Any]) -> AgentConfig:
    """The `[agent]` section that `--agent` and `--set agent.X` stand for.

    Raises:
        ConfigError: it is none.
    """
    given: dict[str, Any] = dict(table)
    if text is not None:
        given |= {"kind": "python", "entry": text} if _ENTRY.fullmatch(text) else {"kind": "command", "command": text}
    return _section(AgentConfig, given, "--agent")


def _section(kind: type[S], given: dict[str, Any], option: str) -> S:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, fault['loc'])) or kind.table}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{option}: {'; '.join(lines)}") from None


def folder_of(options: argparse.Namespace) -> Path:
    """Where the evaluation lies."""
    if options.out is not None:
        return Path(options.out)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", options.env.rpartition("/")[2]).strip("-") or "env"
    return Path("runs") / f"eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _pair(word: str, option: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that is neither TOML nor JSON is a text."""
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"{option} {word}: write NAME=VALUE")
    return name, read_value(text)


def _from_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _from_zero(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def reader(verb: str, about: str) -> argparse.ArgumentParser:
    """The parser of a verb that reads folders."""
    return argparse.ArgumentParser(prog=f"palestra eval {verb}", description=about, allow_abbrev=False)
