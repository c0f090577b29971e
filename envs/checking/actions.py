"""Laws of what comes from a model: tools that are described rightly, and an answer to whatever it may write.

Each takes the `Subject` and returns what was seen; it raises `Broken` or `Untestable`. They wait for the environment's own tools.
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from palestra.envs.checking.fuzz import FUZZED, LONG, wrong_calls
from palestra.envs.checking.playing import Subject, play_script
from palestra.envs.checking.types import Broken, Untestable
from palestra.envs.types import Message, ToolSpec

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
WANDERED = 4
"""Steps of an episode of random actions."""
LONG_S = 2.0
"""Processor time that the answer to a message of absurd length may take, seconds."""


def schemas(subject: Subject) -> str:
    """Tools have a name, a description and arguments in JSON Schema, draft 2020-12."""
    silent = []
    names = set[str]()
    for task in subject.tasks:
        subject.env.reset(seed=0, options={"task": task})
        specs = subject.inner.tool_specs()
        called = [_check_spec(spec) for spec in specs]
        if len(set(called)) < len(called):
            raise Broken(f"task {task.id!r}: two of its tools have one name: {called}")
        fresh_ones = [spec for spec in specs if spec["function"]["name"] not in names]
        names.update(called)
        silent += [_without_words(spec["function"]) for spec in fresh_ones]
    if not names:
        return "it offers no tools"
    told = ", ".join(name for part in silent for name in part)
    return f"{len(names)} tools" + (f"; without a description: {told}" if told else "")


def messages(subject: Subject) -> str:
    """Whatever a model may write is answered: odd messages, random calls."""
    env = subject.env
    for message in FUZZED:
        _answered(subject, message)
    env.action_space.seed(0)
    for seed in range(subject.wanderings):
        env.reset(seed=seed)
        for _ in range(WANDERED):
            action = env.action_space.sample()
            observation, reward, ended, cut, _ = env.step(action)
            if observation not in env.observation_space or not math.isfinite(float(reward)):
                raise Broken(f"seed {seed}: {str(action)[:200]} gave {str(observation)[:200]} and {reward}")
            if ended or cut:
                break
    return ""


def arguments(subject: Subject) -> str:
    """Every call is answered by one tool message, whatever its arguments."""
    specs = subject.inner.tool_specs()
    if not specs:
        raise Untestable("it offers no tools")
    tried = 0
    for spec in specs:
        for message in wrong_calls(spec):
            _answered(subject, message)
            tried += 1
    return f"{tried} calls"


def lengths(subject: Subject) -> str:
    """An answer of absurd length is scored, and soon: no pattern runs away, no length goes unbounded."""
    task = subject.tasks[0]
    for message in LONG:
        started = time.thread_time()
        value = play_script(subject.env, [message], task).value
        spent = time.thread_time() - started
        about = f"an answer of {len(message['content']):,} characters ({message['content'][:12]!r}...)"
        if spent > LONG_S:
            raise Broken(f"{about} took {spent:.1f} s of processor time: look at its length before any pattern does")
        if value > 0:
            raise Broken(f"{about} earns {value:g}")
    return ""


def _answered(subject: Subject, message: Message) -> None:
    env = subject.env
    env.reset(seed=0, options={"task": subject.tasks[0]})
    try:
        observation, reward, ended, cut, info = env.step(message)
    except Exception as error:
        raise Broken(f"{str(message)[:200]} raised {type(error).__name__}: {str(error)[:300]}") from error
    if not math.isfinite(float(reward)):
        raise Broken(f"{str(message)[:200]} gave the reward {reward}: {info['step'].reward}")
    asked = message.get("tool_calls") or ()
    if subject.inner.tool_specs() and asked and not (ended or cut):
        answers = [answer for answer in observation if answer["role"] == "tool"]
        given = [call.get("id") for call in asked]
        if len(answers) != len(asked):
            raise Broken(f"{str(message)[:200]} has {len(asked)} calls and {len(answers)} answers")
        for wanted, answer in zip(given, answers, strict=True):
            if not answer.get("tool_call_id") or (wanted and answer["tool_call_id"] != wanted):
                raise Broken(f"the call {wanted!r} was answered as {answer.get('tool_call_id')!r}")
    if info["step"].turn != 1:
        raise Broken(f"after one message the turn is {info['step'].turn}")


def _check_spec(spec: ToolSpec) -> str:
    """Checks one tool; its name."""
    function = spec.get("function")
    if spec.get("type") != "function" or not isinstance(function, Mapping):
        raise Broken(f"a tool is {{'type': 'function', 'function': ...}}, not {str(spec)[:200]}")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Broken(f"a tool's name is 1 to 64 letters, digits, _ and -, not {name!r}")
    if not function.get("description"):
        raise Broken(f"tool {name}: no description: write a docstring")
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise Broken(f"tool {name}: its parameters are no JSON Schema of an object: {str(schema)[:200]}")
    _check_schema(name, schema)
    if lost := set(schema.get("required", ())) - set(schema.get("properties", {})):
        raise Broken(f"tool {name}: {sorted(lost)} are required and not described")
    return name


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    try:
        jsonschema = importlib.import_module("jsonschema")
    except ImportError:
        raise Untestable("checking a JSON Schema needs the package jsonschema: pip install jsonschema") from None
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise Broken(f"tool {name}: its parameters are no JSON Schema: {error.message}") from error


def _without_words(function: Mapping[str, Any]) -> list[str]:
    """Arguments that a model is told nothing of."""
    properties = function["parameters"].get("properties", {})
    return [f"{function['name']}.{name}" for name, schema in properties.items() if not schema.get("description")]
