"""Laws of a grader: what earns nothing, what earns everything, and that the same is scored the same.

Each takes the `Subject` and returns what was seen; it raises `Broken` or `Untestable`. They wait for the environment's own tools and its
grader.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import gymnasium as gym

from palestra.envs.checking.playing import Played, Subject, inside, play_script, same
from palestra.envs.checking.scripts import raw_call, say
from palestra.envs.checking.types import Broken, Untestable
from palestra.envs.core import MessageEnv
from palestra.envs.registry import find_spec
from palestra.envs.types import Reward, StepInfo, StopReason

FULL = 1.0


def null(subject: Subject) -> str:
    """A policy that says nothing earns nothing."""
    for task in subject.tasks:
        if (value := subject.silent(task).value) > 0:
            raise Broken(f"task {task.id!r}: empty answers earn {value:g}")
    return ""


def echo(subject: Subject) -> str:
    """The prompt played back earns nothing."""
    for task in subject.tasks:
        if (value := subject.echoed(task).value) > 0:
            raise Broken(f"task {task.id!r}: its own prompt earns {value:g}")
    return ""


def oracle(subject: Subject) -> str:
    """The oracle ends the episode and earns 1."""
    for task in subject.tasks:
        played = subject.solved(task)
        if not played.terminated:
            raise Broken(f"task {task.id!r}: the episode goes on after the oracle's {len(played.rewards)} messages")
        if not math.isclose(played.value, FULL, abs_tol=1e-6):
            raise Broken(f"task {task.id!r}: the oracle earns {played.value:g}: {_record(played.reward)}")
    return ""


def swapped(subject: Subject) -> str:
    """The oracle of another task earns less than 1."""
    tried = 0
    for task, other in pairwise([*subject.tasks, subject.tasks[0]]):
        script = subject.oracle(other)
        if task.answer == other.answer or script == subject.oracle(task):
            continue
        tried += 1
        value = play_script(subject.env, script, task).value
        if value >= FULL:
            raise Broken(f"task {task.id!r}: the oracle of task {other.id!r} earns {value:g}")
    if not tried:
        raise Untestable("no two of these tasks have different answers")
    return f"{tried} pairs"


def twice(subject: Subject) -> str:
    """The same episode is the same, and scored the same, when it is played again."""
    for task in subject.tasks[:2]:
        first = subject.solved(task)
        second = play_script(subject.env, subject.oracle(task), task)
        if (first.messages, first.prompt) != (second.messages, second.prompt):
            raise Broken(f"task {task.id!r}: the oracle's episode reads another way the second time")
        if first.infos != second.infos or not same(first.reward.value, second.reward.value):
            raise Broken(f"task {task.id!r}: scored {_record(first.reward)}, then {_record(second.reward)}")
    return ""


def sums(subject: Subject) -> str:
    """The rewards of the steps add up to the reward."""
    for task in subject.tasks:
        for kind, play in _episodes(subject):
            played: Played = play(task)
            total = math.fsum(played.rewards)
            if not math.isclose(total, played.value, abs_tol=1e-6):
                raise Broken(f"task {task.id!r}, {kind}: steps give {total:g}, the record says {played.value:g}")
    return ""


def truncated(subject: Subject) -> str:
    """An episode that a limit cut has a finite score, no better than the whole one's, and is over."""
    env = subject.env
    for task in subject.tasks:
        script = _first_step(subject)
        cut = play_script(env, script, task, turns=1)
        if cut.terminated:
            cut = play_script(env, [], task)
        if not math.isfinite(cut.value) or cut.value >= FULL:
            raise Broken(f"task {task.id!r}: cut after {len(script)} messages it earns {cut.value:g}")
    try:
        env.step(say("more"))
    except gym.error.ResetNeeded:
        return _time_limit(subject)
    raise Broken("a step after the end was not refused with gymnasium.error.ResetNeeded")


def replayed(subject: Subject) -> str:
    """A conversation that an agent had by itself is scored as if it had been played here."""
    tried = 0
    for task in subject.tasks[:2]:
        played = subject.solved(task)
        if any(info.step_reward for info in played.infos):
            continue
        tried += 1
        subject.env.reset(seed=0, options={"task": task})
        graded: StepInfo = inside(subject.env).grade(played.messages)
        value = graded.reward.value if graded.reward is not None else None
        if not same(value, played.reward.value):
            raise Broken(
                f"task {task.id!r}: played it earns {_record(played.reward)}, handed to grade() {_record(graded.reward)}; "
                "override `replay` to take in what `respond` keeps"
            )
    if not tried:
        raise Untestable("its steps give rewards of their own, which a conversation alone does not show")
    return ""


def mean_scores(subject: Subject) -> dict[str, float]:
    """Mean reward of each kind of script that can be played, over the tasks."""
    scores = {}
    for kind, play in (("null", subject.silent), ("echo", subject.echoed), ("oracle", subject.solved)):
        try:
            scores[kind] = math.fsum(play(task).value for task in subject.tasks) / len(subject.tasks)
        except Exception:  # noqa: BLE001 - the law of that kind has said why
            continue
    return scores


def _episodes(subject: Subject) -> list[tuple[str, Any]]:
    kinds = [("empty answers", subject.silent), ("the prompt played back", subject.echoed)]
    try:
        subject.oracle(subject.tasks[0])
    except Untestable:
        return kinds
    return [*kinds, ("the oracle", subject.solved)]


def _first_step(subject: Subject) -> list[Any]:
    """A message that ends no episode of an environment with tools: a call that is answered with an error."""
    specs = subject.inner.tool_specs()
    return [raw_call(specs[0]["function"]["name"], "{")] if specs else [say("?")]


def _time_limit(subject: Subject) -> str:
    """gymnasium's own TimeLimit, which tells the environment nothing."""
    env = gym.make(find_spec(subject.env_id), max_episode_steps=1, disable_env_checker=True, **subject.args)
    try:
        inner = env.unwrapped
        assert isinstance(inner, MessageEnv), "the shared environment is one"
        env.reset(seed=0, options={"task": subject.tasks[0]})
        _, reward, ended, cut, info = env.step(_first_step(subject)[0])
    finally:
        env.close()
    if ended == cut:
        raise Broken(f"max_episode_steps=1: terminated is {ended} and truncated is {cut}")
    step: StepInfo = info["step"]
    if step.reward is None or not same(step.reward.value, float(reward)):
        raise Broken(
            f"max_episode_steps=1: the step gives {reward}, its record {step.reward}: is it registered by palestra?"
        )
    wanted = StopReason.MAX_TURNS if cut else None
    if wanted is not None and step.stop_reason is not wanted:
        raise Broken(f"max_episode_steps=1: stopped for {step.stop_reason}")
    return ""


def _record(reward: Reward | None) -> str:
    if reward is None:
        return "nothing"
    parts = ", ".join(f"{name} {value:g}" for name, value in reward.components.items())
    return f"{reward.value} ({parts})" + (f" [{reward.note}]" if reward.note else "")
