"""`palestra/ReasoningGym-v0`: the procedural datasets of reasoning-gym, each a seeded list of puzzles that scores its own answers.

| component  | weight | value                                                                                               |
| ---------- | ------ | --------------------------------------------------------------------------------------------------- |
| `score`    | 1.0    | the dataset's own score, 0 to 1, of what the last `<answer>...</answer>` of the final message holds |
| `answered` | 0      | 1 where there is an answer at all: a metric                                                         |

No answer, an empty one, one that is not closed, or a message over the cap of characters: 0, whatever the dataset gives for an attempt.
Some datasets give part of the score for an answer that is nearly right, or for any attempt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from palestra.envs.core import MessageEnv
from palestra.envs.rubrics import Rubric, Score, Scoring, procedural
from palestra.envs.rubrics.processes import MAX_CHARACTERS, START_S, killable
from palestra.envs.rubrics.worker import FRAME_LIMIT
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.types import EnvError, Message, Task

T = TypeVar("T")

SYSTEM = "Think, then give the final answer, and nothing else, in <answer>...</answer>."
ENTRY_S = 120.0
"""Seconds that one entry, or the loading of a dataset, may take: the slowest one takes half a minute on a busy machine."""


def extract(text: str) -> str | None:
    """What the last `<answer>...</answer>` of a text holds; None where there is none, it is empty, or the last one is not closed."""
    start = text.rfind("<answer>")
    if start < 0 or len(text) > MAX_CHARACTERS:
        return None
    start += len("<answer>")
    end = text.find("</answer>", start)
    return (text[start:end].strip() or None) if end >= 0 else None


@functools.cache
def puzzles(dataset: str, seed: int, size: int, config: str) -> TaskSource:
    """The tasks of a dataset. `config`: its other settings, as JSON. Waits for a grader process, which loads the package.

    Raises:
        ValueError: there is no such dataset, or its settings are wrong. EnvError: a grader process could not be had.
    """
    if not 0 <= seed < procedural.MAX_SEED or not 1 <= size <= procedural.SEED_STEP:
        raise ValueError(
            f"a seed lies in 0..{procedural.MAX_SEED - 1}, a size in 1..{procedural.SEED_STEP}, got {seed}, {size}"
        )
    described = (dataset, seed, size, config)
    if problem := _asked(_in_worker(procedural.check, ENTRY_S)(described)):
        raise ValueError(problem)
    ask = _in_worker(procedural.question, ENTRY_S)

    @functools.lru_cache(maxsize=8192)
    def make(index: int) -> Task:
        question, answer = _asked(ask(described, index))
        meta = {"dataset": dataset, "seed": seed, "size": size, "config": config, "index": index}
        return Task(question, answer, f"{dataset}/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


def _in_worker(function: Callable[..., T], timeout_s: float) -> Callable[..., T | Score]:
    # What a model wrote was capped before; a question may be long.
    return killable(function, timeout_s=timeout_s, max_characters=FRAME_LIMIT, warm=procedural.warm)


def _asked(said: T | Score) -> T:
    if isinstance(said, Score):
        raise EnvError(f"reasoning-gym: {said.error or said.reason}")
    return said


@functools.cache
def rubric(timeout_s: float) -> Rubric:
    """The reward, as the module's table says. `timeout_s`: of one scoring."""
    judge = _in_worker(procedural.score, timeout_s)

    def score(scoring: Scoring) -> Score:
        answer = extract(scoring.answer)
        if answer is None:
            return Score(0.0, "no closed <answer> at the end")
        meta = scoring.task.meta
        described = (meta["dataset"], meta["seed"], meta["size"], meta["config"])
        said = judge(described, meta["index"], scoring.task.prompt, answer)
        return said if isinstance(said, Score) else Score(said, f"extracted {answer[:200]}")

    def answered(scoring: Scoring) -> bool:
        return extract(scoring.answer) is not None

    return Rubric({"score": score, "answered": (answered, 0.0)}, bounds=(0.0, 1.0), timeout_s=2 * START_S + timeout_s)


class ReasoningGym(MessageEnv):
    """One puzzle, one message, one answer."""

    deterministic = True
    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        dataset: str = "leg_counting",
        seed: int = 0,
        size: int = 500,
        config: Mapping[str, Any] | None = None,
        timeout_s: float = 20.0,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`config`: the dataset's own settings; of `composite` its `datasets`, a list of {"name", "weight", "config"}. `timeout_s`: of
        one scoring.

        Raises:
            ValueError: there is no such dataset, or its settings are wrong. EnvError: the package is not installed.
        """
        procedural.require()
        self.rubric = rubric(timeout_s)
        settings = json.dumps(dict(config or {}), sort_keys=True)
        super().__init__(render_mode, puzzles(dataset, seed, size, settings) if tasks is None else tasks)

    def oracle(self, task: Task) -> list[Message]:
        if task.answer is None:
            raise NotImplementedError(f"reasoning-gym has no answer of its own to {task.id}")
        return [{"role": "assistant", "content": f"<answer>{task.answer}</answer>"}]
