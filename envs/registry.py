"""Names of environments: registering them with gymnasium, and making them from a run's configuration.

An id comes in, an environment comes out. `package.module:id` imports the module first, as gymnasium does.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from palestra.envs import plugins
from palestra.envs.spaces import Observation
from palestra.envs.tasks import TaskSource
from palestra.envs.tasksources import read_any_tasks
from palestra.envs.types import EnvError, Message, Task

C = TypeVar("C", bound=type)

SCORED = (WrapperSpec("ScoreTruncated", "palestra.envs.wrappers:ScoreTruncated", {}),)


def register(env_id: str, *, max_episode_steps: int | None = None, **kwargs: Any) -> Callable[[C], C]:
    """Registers a class under a gymnasium id, with the wrapper that scores truncated episodes.

    `kwargs` become the constructor's defaults.
    """

    def decorate(cls: C) -> C:
        _register(env_id, cls, max_episode_steps, kwargs)
        return cls

    return decorate


def register_builtin(env_id: str, entry_point: str) -> None:
    """Registers `module:Class` without importing it. Doing it again changes nothing."""
    if env_id not in gym.registry:
        _register(env_id, entry_point, None, {})


def _register(env_id: str, entry_point: Any, max_episode_steps: int | None, kwargs: dict[str, Any]) -> None:
    gym.register(
        env_id,
        entry_point=entry_point,
        max_episode_steps=max_episode_steps,
        additional_wrappers=SCORED,
        kwargs=kwargs,
    )


def find_spec(env_id: str) -> EnvSpec:
    """The registered entry of an id. Plugins are loaded where nothing else has registered it.

    Raises:
        EnvError: the module cannot be imported, or nothing is registered under the id; the nearest name is given.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise EnvError(f"environment {env_id!r}: module {module!r} cannot be imported: {error}") from error
    if name not in gym.registry:
        plugins.load()
    spec = gym.registry.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, gym.registry, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        how = "" if module else " (an id of your own: write 'package.module:Name-v0')"
        raise EnvError(f"no environment {name!r} is registered{hint}{how}{plugins.faults()}")
    return spec


def load_env_class(env_id: str) -> type:
    """The class behind an id.

    Raises:
        EnvError: as `find_spec`, or the entry point is no class.
    """
    spec = find_spec(env_id)
    target = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if not isinstance(target, type):
        raise EnvError(f"environment {env_id!r} is made by {target!r}, which is no class")
    return target


def make_env(
    env_id: str, args: Mapping[str, Any] | None = None, tasks: TaskSource | Sequence[Task] | None = None
) -> gym.Env[Observation, Message]:
    """Makes an environment with its wrappers. `tasks` replaces its own.

    Raises:
        EnvError: as `find_spec`, or the constructor refuses `args`.
    """
    spec = find_spec(env_id)
    given = dict(args or {})
    if tasks is not None:
        given["tasks"] = tasks
    try:
        return gym.make(spec, disable_env_checker=True, **given)
    except Exception as error:
        raise EnvError(f"environment {env_id!r} with args {args or {}}: {type(error).__name__}: {error}") from error


def open_tasks(env_id: str, args: Mapping[str, Any] | None = None, path: str | None = None) -> TaskSource:
    """The tasks of a run: those of the file, or the environment's own.

    Raises:
        TaskError: the file is broken. EnvError: the environment cannot be made, or has no tasks.
    """
    if path is not None:
        return read_any_tasks(path)
    env = make_env(env_id, args)
    try:
        tasks = env.unwrapped.tasks  # type: ignore[attr-defined]  # a MessageEnv, or the error below
    except AttributeError:
        raise EnvError(f"environment {env_id!r} has no tasks of its own; give a file of them") from None
    finally:
        env.close()
    if not isinstance(tasks, TaskSource) or not len(tasks):
        raise EnvError(f"environment {env_id!r} has no tasks of its own; give a file of them")
    return tasks
