"""An agent that is a Python function or class of the user's: a LangGraph graph, a loop over the `openai` client, anything.

A name of it goes in ("package.module:name", or "folder/file.py:name" from the current folder), and an `Agent` comes out. A function gets
what it declares, by name; see `WORDS`. It waits for the function. A coroutine function runs on the process's one loop thread, so that
clients which it keeps between episodes stay usable; it must not block there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.agents.session import current
from palestra.agents.types import AgentContext, AgentError, Outcome, PolicyStop
from palestra.envs import background
from palestra.envs.spaces import fresh
from palestra.envs.types import StopReason, Task

WORDS: Mapping[str, Callable[[AgentContext], Any]] = {
    "task": lambda context: context.task,
    "session_url": lambda context: context.session.session_url or context.session.base_url,
    "workspace": lambda context: context.workspace,
    "api_key": lambda context: context.session.api_key,
    "base_url": lambda context: context.session.base_url,
    "messages": lambda context: fresh(context.messages),
    "tools": lambda context: fresh(context.tools),
    "deadline_s": lambda context: max(0.0, context.deadline - time.monotonic()),
}
"""What a function may declare. `deadline_s`: seconds that are left; the others as in `AgentContext`."""

FORM = "write 'package.module:name', or 'folder/file.py:name' for a file (from the current folder)"
KEYS = ("reward", "components", "answer", "info")


class PythonAgent:
    """Plays with a function, or with the `run` of a class that is made once without arguments (or of an object)."""

    def __init__(self, entry: str) -> None:
        """Imports it.

        Raises:
            AgentError: there is no such module, file or name; it cannot be called like this; or it fails while it is imported.
        """
        self.entry = entry
        self._function = _callable(entry, load_entry(entry))
        self._words = _words(entry, self._function)
        self._is_async = inspect.iscoroutinefunction(self._function)

    def run(self, task: Task, session_url: str, workspace: Path) -> Outcome:
        """See `Agent.run`. Task, URL and workspace are those of the current context.

        Raises:
            TypeError: it returned something that is no outcome.
        """
        context = current()
        given = {word: WORDS[word](context) for word in self._words}
        if not self._is_async:
            return outcome_of(self._function(**given), self.entry)
        left = max(0.0, context.deadline - time.monotonic())
        try:
            return outcome_of(background.call(self._function(**given), left), self.entry)
        except background.DeadlineError:
            raise PolicyStop(StopReason.DEADLINE, f"{self.entry} was cut at its deadline") from None


def outcome_of(value: Any, entry: str) -> Outcome:
    """What a function returned, as an outcome: an Outcome, a number (the reward), a text (the answer), a dict of an Outcome's fields, None.

    Raises:
        TypeError: anything else.
    """
    match value:
        case Outcome():
            return value
        case None:
            return Outcome()
        case bool() | int() | float():
            return Outcome(reward=float(value))
        case str():
            return Outcome(answer=value)
        case dict():
            if unknown := sorted(map(str, value.keys() - set(KEYS))):
                raise TypeError(f"{entry} returned a dict with {unknown[0]!r}; an outcome has {', '.join(KEYS)}")
            return Outcome(**value)
    raise TypeError(
        f"{entry} returned {type(value).__name__}; an agent returns an Outcome, a number (its reward), a text (its answer), a dict or None"
    )


def load_entry(entry: str, what: str = "agent entry") -> Any:
    """What `entry` names: "package.module:name", or "folder/file.py:name" from the current folder. `what` names it in messages.

    Raises:
        AgentError: there is no such thing, or importing it failed.
    """
    where, colon, name = entry.rpartition(":")
    if not colon or not where or not name:
        raise AgentError(f"{what} {entry!r}: {FORM}")
    is_file = where.endswith(".py") or "/" in where
    try:
        module = _load_file(Path(where), entry, what) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{where}.".startswith(f"{error.name}."):
            raise AgentError(f"{what} {entry!r}: there is no module {error.name!r}; {FORM}") from error
        raise AgentError(f"{what} {entry!r}: it imports {error.name!r}, which is not installed") from error
    except AgentError:
        raise
    except Exception as error:
        raise AgentError(f"{what} {entry!r}: importing it failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:20])
        raise AgentError(f"{what} {entry!r}: {where} has no {name!r}; it has {public or 'nothing'}") from None


def _load_file(path: Path, entry: str, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise AgentError(f"{what} {entry!r}: {path} is no file; {FORM}")
    name = f"palestra_entry_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AgentError(f"{what} {entry!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a script finds the modules beside it, and so does this file
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _callable(entry: str, target: Any) -> Callable[..., Any]:
    if isinstance(target, type):
        try:
            target = target()
        except Exception as error:
            raise AgentError(
                f"agent entry {entry!r}: the class could not be made without arguments: {type(error).__name__}: {error}"
            ) from error
    elif inspect.isroutine(target):
        return target
    run = getattr(target, "run", None)
    if not callable(run):
        raise AgentError(
            f"agent entry {entry!r} is {type(target).__name__}: neither a function nor something with run(task, session_url, workspace)"
        )
    return run  # type: ignore[no-any-return]  # callable(), which mypy narrows to Any here


def _words(entry: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The words that the function declares.

    Raises:
        AgentError: it declares something that it cannot get.
    """
    words: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return tuple(WORDS)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is not parameter.POSITIONAL_ONLY and name in WORDS:
            words.append(name)
        elif parameter.default is parameter.empty:
            raise AgentError(
                f"agent entry {entry!r}: unknown parameter {name!r}; a function gets by name what it declares of {', '.join(WORDS)}"
            )
    return tuple(words)
