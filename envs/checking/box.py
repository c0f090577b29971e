"""The law of the box: where a model's code runs, nothing of the answer is to be read.

A task whose hidden parts hold a mark that occurs nowhere else is played; code in the box then looks for the mark, and for texts of the
answer itself, in files, environments, command lines and open descriptors. Takes the `Subject` and returns what was seen; waits for the box.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from palestra.envs.checking.playing import Env, Subject, inside, opened
from palestra.envs.checking.scripts import call, raw_call
from palestra.envs.checking.types import Broken, Untestable
from palestra.envs.core import MessageEnv
from palestra.envs.rubrics.types import text_of
from palestra.envs.types import EnvError, Task

if TYPE_CHECKING:
    from palestra.envs.episodebox import EpisodeBox

PYTHON_TOOLS, SHELL_TOOLS = ("python", "run_python", "ipython"), ("bash", "shell", "sh")
"""Names of tools with one text argument that run what they are given."""
TELLING = 12
"""Characters from which a text of the answer is looked for: shorter ones are found by chance."""

_SEARCH = """
import base64, os
needles = [base64.b64decode(text) for text in NEEDLES]
seen = [0]
def look(path, most=4194304):
    try:
        with open(path, "rb") as file:
            data = file.read(most)
    except OSError:
        return
    seen[0] += 1
    if any(needle in data for needle in needles):
        print("FOUND", path)
for top in {os.getcwd(), "/workspace", "/tmp", "/dev/shm", "/home", "/root", "/run", "/var", "/etc", "/opt", "/srv", "/mnt"}:
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if seen[0] < 20000 and os.path.isfile(path):
                look(path)
for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("environ", "cmdline"):
            look("/proc/%s/%s" % (pid, name))
for name in os.listdir("/proc/self/fd"):
    path = "/proc/self/fd/" + name
    if os.path.isfile(path):
        look(path)
for name, value in os.environb.items():
    if any(needle in name + value for needle in needles):
        print("FOUND variable", name)
print("SEARCHED", seen[0])
"""


def secrets(subject: Subject) -> str:
    """Code in the box finds nothing of the answer: in files, environments, command lines, open files."""
    mark = f"canary-{uuid.uuid4().hex}"
    task = subject.tasks[0]
    with opened(subject) as env:
        env.reset(seed=0, options={"task": task})
        _runner(env)
        planted = _begin(env, plant(inside(env), task, mark), replace(task, meta={**task.meta, "canary": mark}))
        told = _runner(env)(_code([mark, *_texts(planted.answer, str(planted.prompt))]))
    found = [line for line in told.splitlines() if line.startswith("FOUND")]
    if found:
        raise Broken(f"task {task.id!r}: the answer can be read in the box:\n" + "\n".join(found[:10]))
    if "SEARCHED" not in told:
        raise Broken(f"task {task.id!r}: the box could not be searched: {told[-500:]}")
    return " ".join(line.lower() for line in told.splitlines() if line.startswith("SEARCHED")) + " files"


def plant(inner: MessageEnv, task: Task, mark: str) -> Task:
    """The task with `mark` in what is hidden. An environment whose answers are not text or containers has a method `plant(task, mark)`."""
    own: Callable[[Task, str], Task] | None = getattr(inner, "plant", None)
    if own is not None:
        return own(task, mark)
    answer: Any = task.answer
    if isinstance(answer, str):
        answer = f"{answer} {mark}"
    elif isinstance(answer, Mapping):
        answer = {**answer, "canary": mark}
    elif isinstance(answer, Sequence):
        answer = [*answer, mark]
    return replace(task, answer=answer, meta={**task.meta, "canary": mark})


def _begin(env: Env, planted: Task, fallback: Task) -> Task:
    """Starts the task with the mark in its answer (in its remarks alone, where the environment cannot play that), and has every tool tried
    once, so that what they leave lies there.
    """
    started = planted
    try:
        env.reset(seed=0, options={"task": planted})
    except EnvError:
        started = fallback
        env.reset(seed=0, options={"task": fallback})
    for spec in inside(env).tool_specs():
        _, _, ended, cut, _ = env.step(raw_call(spec["function"]["name"], "{}"))
        if ended or cut:
            env.reset(seed=0, options={"task": started})
    return started


def _runner(env: Env) -> Callable[[str], str]:
    """Runs Python where the model's code runs; what it printed.

    Raises:
        Untestable: no code runs there.
    """
    from palestra.envs.episodebox import EpisodeBox  # loads the sandbox, which few environments need

    inner = inside(env)
    for names, wrap in ((PYTHON_TOOLS, str), (SHELL_TOOLS, _in_shell)):
        if (found := _tool(inner, names)) is not None:
            return partial(_by_tool, env, *found, wrap)
    for value in vars(inner).values():
        if isinstance(value, EpisodeBox):
            return partial(_by_box, value)
    raise Untestable("it offers no tool that runs code, and has no box open")


def _by_tool(env: Env, name: str, parameter: str, wrap: Callable[[str], str], code: str) -> str:
    observation = env.step(call(name, **{parameter: wrap(code)}))[0]
    return text_of(observation[-1].get("content")) if observation else ""


def _by_box(box: EpisodeBox, code: str) -> str:
    return box.run_python(code).text


def _tool(inner: MessageEnv, names: Sequence[str]) -> tuple[str, str] | None:
    """The first tool of one of these names that needs one argument, and the argument's name."""
    for spec in inner.tool_specs():
        function = spec["function"]
        required = function["parameters"].get("required", [])
        if function["name"] in names and len(required) == 1:
            return function["name"], required[0]
    return None


def _in_shell(code: str) -> str:
    return f"echo {base64.b64encode(code.encode()).decode()} | base64 -d | python3 -"


def _code(needles: Sequence[str]) -> str:
    """The search; what it looks for is encoded, so that it does not find itself."""
    encoded = json.dumps([base64.b64encode(needle.encode()).decode() for needle in needles])
    return f"NEEDLES = {encoded}{_SEARCH}"


def _texts(value: Any, shown: str) -> Iterator[str]:
    """Texts of an answer that are long enough to be told apart and do not stand in the prompt."""
    if isinstance(value, str):
        if len(value) >= TELLING and value not in shown:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item, shown)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item, shown)
