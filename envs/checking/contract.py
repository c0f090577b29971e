"""Laws of gymnasium's contract: spaces, seeds, options, tasks, fresh objects, vectors, cost.

Each takes the `Subject` and returns what was seen, in a line; it raises `Broken` where it does not hold, and `Untestable` where it cannot
be tried. They wait for the environment's own tools, and the vector law for two forked processes (a deadline each).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

from palestra.envs.checking.playing import Env, Played, Subject, inside, opened, play_script
from palestra.envs.checking.types import Broken
from palestra.envs.core import MessageEnv
from palestra.envs.registry import find_spec, load_env_class
from palestra.envs.spaces import fresh, is_message
from palestra.envs.tasks import task_from_json, task_to_json
from palestra.envs.types import Message, Task

IDS = 2000
"""Tasks whose ids are compared."""
VECTOR_S = 60.0
"""Deadline of a vector environment's reset or step, seconds."""
CONSTRUCTIONS = 20
COST_S = 0.001
"""Processor time that another environment may take to be made, seconds."""


def gymnasium_checks(subject: Subject) -> str:
    """gymnasium's own checker finds nothing, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(find_spec(subject.env_id), **subject.args)
        try:
            check_env(env.unwrapped)
            env.reset(seed=3)
            env.step(env.action_space.sample())
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            env.close()
    return ""


def prompts(subject: Subject) -> str:
    """The first observation is a prompt: messages, the last of which somebody else than the policy said."""
    for task in subject.tasks:
        observation, info = subject.env.reset(seed=0, options={"task": task})
        if not observation or not all(is_message(message) for message in observation):
            raise Broken(f"task {task.id!r} begins with {str(observation)[:200]}")
        if observation[-1]["role"] == "assistant":
            raise Broken(f"task {task.id!r}: the prompt ends with an assistant message, and it is the policy's turn")
        if info["step"].task_id != task.id:
            raise Broken(f'task {task.id!r}: info["step"].task_id is {info["step"].task_id!r}')
    return ""


def seeds(subject: Subject) -> str:
    """The same seed gives the same task, observations and rewards; the stream of tasks goes on from it."""
    with opened(subject) as env, opened(subject) as other:
        drawn, again = (_draw(one, 5, 8) for one in (env, other))
        if drawn != again:
            raise Broken(f"reset(seed=5) and what follows drew {drawn[:3]}..., then {again[:3]}...")
        if len(inside(env).tasks) > 1 and len({task_id for task_id, _ in drawn}) == 1:
            raise Broken(f"eight resets after a seed drew task {drawn[0][0]!r} each time")
        for seed in range(3):
            first, second = (_wander(one, seed) for one in (env, other))
            if first != second:
                raise Broken(f"seed {seed}, random actions: {_difference(first, second)}")
    return ""


def options(subject: Subject) -> str:
    """Tasks can be asked for by index; unknown options and tasks that do not exist are refused."""
    env, size = subject.env, len(subject.inner.tasks)
    observation, info = env.reset(options={"task": size - 1})
    if info["step"].task_id != subject.inner.tasks[size - 1].id or not observation:
        raise Broken(f"reset(options={{'task': {size - 1}}}) began task {info['step'].task_id!r}")
    for wrong in ({"tasks": 1}, {"task": size}, {"task": -1}, {"task": "0"}):
        try:
            env.reset(options=wrong)
        except ValueError:
            continue
        raise Broken(f"reset(options={wrong}) was not refused with a ValueError")
    return ""


def tasks(subject: Subject) -> str:
    """Tasks are plain JSON, the same each time, and their ids are unique."""
    source = subject.inner.tasks
    size = min(len(source), IDS)
    ids: dict[str, int] = {}
    for index in range(size):
        if (first := ids.setdefault(source[index].id, index)) != index:
            raise Broken(f"tasks {first} and {index} are both called {source[index].id!r}")
    for task in subject.tasks:
        if not task.id:
            raise Broken("a task has no id")
        try:
            travelled = task_from_json(json.loads(json.dumps(task_to_json(task), allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise Broken(f"task {task.id!r} is no JSON: {error}") from error
        if _plain(travelled) != _plain(task):
            raise Broken(
                f"task {task.id!r} is another one after it travelled as JSON (tuples, or keys that are no text?)"
            )
    for index in {0, size // 2, size - 1}:
        if source[index] != source[index]:
            raise Broken(f"task {index} is another one each time")
    return f"{size} ids"


def objects(subject: Subject) -> str:
    """What is returned and what was given are nobody else's: changing them changes nothing."""
    task = subject.tasks[0]
    script: Iterable[Message] = islice(_script(subject, task), 3)
    calm = [fresh(message) for message in script]
    expected = play_script(subject.env, calm, task)
    env = subject.env
    observation, info = env.reset(seed=0, options={"task": task})
    rewards = list[float]()
    _spoil(observation)
    for message in calm:
        action = fresh(message)
        observation, reward, terminated, _, info = env.step(action)
        _spoil([*observation, action])
        rewards.append(float(reward))
        if terminated:
            break
    if not terminated:
        score, info = inside(env).finish(expected.infos[-1].stop_reason)  # type: ignore[arg-type]  # its last step ended
        rewards[-1] += score
    if (str(rewards), info["step"]) != (str(list(expected.rewards)), expected.infos[-1]):
        raise Broken("an episode whose messages were changed after they were handed over was scored another way")
    if env.reset(seed=0, options={"task": task})[0] != expected.prompt:
        raise Broken("the prompt is another one after its messages were changed")
    return ""


def vectors(subject: Subject) -> str:
    """It works in gymnasium's vectors, in this process and in forked ones."""
    seen = []
    for mode in ("sync", "async"):
        keywords: dict[str, Any] = {"autoreset_mode": "Disabled"}
        if mode == "async":
            keywords["shared_memory"] = False
        vector: Any = gym.make_vec(
            find_spec(subject.env_id), 2, vectorization_mode=mode, vector_kwargs=keywords, **subject.args
        )
        try:
            seen.append(_vector_episode(vector, mode == "async"))
        except Exception as error:
            raise Broken(f"{mode}: {type(error).__name__}: {error}") from error
        finally:
            vector.close(**({"timeout": 0, "terminate": True} if mode == "async" else {}))
    if seen[0] != seen[1]:
        raise Broken(f"in this process {str(seen[0])[:300]}, in forked ones {str(seen[1])[:300]}")
    return ""


def cost(subject: Subject) -> str:
    """Another environment is made in under a millisecond of processor time, after the first."""
    made, keywords = load_env_class(subject.env_id), find_spec(subject.env_id).kwargs | dict(subject.args)
    best = float("inf")
    for _ in range(CONSTRUCTIONS):
        started = time.thread_time()
        env: MessageEnv = made(**keywords)
        best = min(best, time.thread_time() - started)
        env.close()
    if best >= COST_S:
        raise Broken(f"it takes {best * 1e3:.2f} ms: build tasks and whatever is large once per process")
    return f"{best * 1e6:.0f} us"


def _draw(env: Env, seed: int, count: int) -> list[tuple[str, Any]]:
    seeded = [env.reset(seed=seed), *(env.reset() for _ in range(count - 1))]
    return [(info["step"].task_id, observation) for observation, info in seeded]


def _wander(env: Env, seed: int) -> Played:
    """An episode of random actions, calls of its tools among them."""
    prompt, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    messages, rewards, infos, terminated = list[Message](), list[float](), [info["step"]], False
    while not terminated and len(rewards) < 6:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        messages += observation
        rewards.append(round(float(reward), 9))
        infos.append(info["step"])
        terminated = terminated or truncated
    return Played(prompt, tuple(messages), tuple(rewards), tuple(infos), terminated)


def _difference(first: Played, second: Played) -> str:
    for left, right in zip(first.messages, second.messages, strict=False):
        if left != right:
            return f"{str(left)[:200]}, then {str(right)[:200]}"
    return f"rewards {first.rewards}, then {second.rewards}; infos {first.infos[-1]}, then {second.infos[-1]}"


def _script(subject: Subject, task: Task) -> Iterable[Message]:
    """The oracle's messages, or random ones."""
    try:
        yield from subject.oracle(task)
    except Exception:  # noqa: BLE001 - whatever ails the oracle is another law's business
        subject.env.action_space.seed(1)
        for _ in range(3):
            yield subject.env.action_space.sample()


def _spoil(messages: Iterable[Message]) -> None:
    for message in messages:
        for item in message.get("tool_calls") or ():
            item.clear()
        message.clear()
        message["role"] = "spoilt"


def _plain(task: Task) -> tuple[Any, ...]:
    prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    return prompt, task.answer, task.id, dict(task.meta)


def _vector_episode(vector: Any, forked: bool) -> list[Any]:
    """Two environments, a reset and three steps of the same actions."""
    limit = {"timeout": VECTOR_S} if forked else {}
    if forked:
        vector.reset_async(seed=7)
        observations, infos = vector.reset_wait(**limit)
    else:
        observations, infos = vector.reset(seed=7)
    seen: list[Any] = [list(observations), [step.task_id for step in infos["step"]]]
    for words in ("", "1", "none of it"):
        actions = [{"role": "assistant", "content": words}] * 2
        if forked:
            vector.step_async(actions)
            result = vector.step_wait(**limit)
        else:
            result = vector.step(actions)
        seen.append((list(result[0]), str(result[1].tolist())))
        if any(result[2]) or any(result[3]):
            break
    return seen
