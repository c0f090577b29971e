"""`palestra env show ID`: what an environment is made of.

In: an id. Out: its words to the policy, its tools, the arguments of its constructor and a task, on stdout. Exit status 0; 2 where it cannot
be made. Waits for nothing but its construction and a reset.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console

from palestra.cli.envs.arguments import add_env, look_here, read_set
from palestra.cli.envs.messages import print_message
from palestra.envs.checking.playing import inside
from palestra.envs.checking.types import Broken
from palestra.envs.registry import find_spec, load_env_class, make_env
from palestra.envs.types import EnvError, ToolSpec

GIVEN_BY_US = ("self", "render_mode", "tasks")
"""Parameters of a constructor that a configuration does not set under `args`."""


def main(argv: Sequence[str]) -> int:
    """Prints it."""
    parser = argparse.ArgumentParser(
        prog="palestra env show", description="What an environment is made of.", allow_abbrev=False
    )
    add_env(parser)
    parser.add_argument("--task", type=int, default=0, metavar="N", help="index of the task that is shown")
    parser.add_argument("--json", action="store_true", help="a JSON object instead of text")
    options = parser.parse_args(argv)
    look_here(options.id)
    try:
        shown = describe(options.id, read_set(options.set), options.task)
    except (EnvError, ValueError, Broken) as error:
        print(f"palestra env show: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(shown, ensure_ascii=False, default=str))
    else:
        _print(shown)
    return 0


def describe(env_id: str, args: Mapping[str, Any], task: int) -> dict[str, Any]:
    """Everything that is shown, as a JSON object.

    Raises:
        EnvError: it cannot be made. ValueError: no such task. Broken: it is no environment of messages.
    """
    made = load_env_class(env_id)
    with closing(make_env(env_id, args)) as env:
        inner = inside(env)
        prompt, info = env.reset(seed=0, options={"task": task})
        return {
            "id": find_spec(env_id).id,
            "class": f"{made.__module__}:{made.__qualname__}",
            "about": inspect.cleandoc(sys.modules[made.__module__].__doc__ or made.__doc__ or ""),
            "args": arguments(made) | find_spec(env_id).kwargs | dict(args),
            "tasks": len(inner.tasks),
            "tools": [spec["function"] for spec in inner.tool_specs()],
            "task": {"index": task, "id": info["step"].task_id, "prompt": list(prompt)},
        }


def arguments(made: type) -> dict[str, Any]:
    """Arguments of a class's constructor, with their defaults."""
    parameters = inspect.signature(made).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        item.name: "(to be given)" if item.default is item.empty else item.default
        for item in parameters
        if item.kind not in kinds and item.name not in GIVEN_BY_US
    }


def signature(spec: ToolSpec) -> str:
    """A tool in a line, as one would call it: count(word: string, letter: string = "a")."""
    function = spec.get("function", spec)
    schema = function["parameters"]
    required = schema.get("required", ())
    parts = [f"{name}{'' if name in required else '?'}: {_type(item)}" for name, item in schema["properties"].items()]
    return f"{function['name']}({', '.join(parts)})"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_type(item) for item in schema["anyOf"])
    return str(schema.get("type", "any"))


def _print(shown: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{shown['id']}[/]  {shown['class']}  {shown['tasks']} tasks")
    console.print(shown["about"] + "\n", markup=False)
    if shown["args"]:
        console.print("[bold]arguments[/]")
        for name, value in shown["args"].items():
            console.print(f"  {name} = {value!r}", markup=False)
    console.print("[bold]tools[/]")
    for function in shown["tools"]:
        console.print(f"  {signature(function)}", markup=False)
        console.print("    " + function["description"].replace("\n", "\n    "), markup=False)
        for name, item in function["parameters"]["properties"].items():
            if item.get("description"):
                console.print(f"    {name}: {item['description']}", markup=False)
    if not shown["tools"]:
        console.print("  none: it is answered in words")
    task = shown["task"]
    console.print(f"[bold]task {task['index']}[/] {task['id']}")
    for message in task["prompt"]:
        print_message(console, message)
