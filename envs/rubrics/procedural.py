"""reasoning-gym's datasets (extra `reasoning`), made and scored in a grader process: its functions are called through `killable`.

A description of a dataset and an index go in; a question and its answer, or the score of a text, come out. Three things of the package
make a process of its own necessary:
- Some datasets draw from the global generators, or follow the order of a set: a worker has one order of sets, and the generators are
  seeded before each entry.
- Some take seconds or minutes for one entry, and a scorer may not come back from a model's text.
- Some scorers evaluate a model's text as Python, where it could do anything, or name the variable that holds the answer. They get
  literals alone (see `warm`), or arithmetic alone (see `is_arithmetic`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import random
import re
import sys
from typing import Any

import numpy as np

from palestra.envs.types import EnvError

Described = tuple[str, int, int, str]
"""A dataset: its name, seed and size, and its other settings as JSON."""
SEED_STEP = 1_000_000
"""The package makes entry i of seed s from s + i, so that neighbouring seeds share nearly all entries. Ours lie this far apart."""
MAX_SEED = 4000
"""The package's own limit is 32 bits."""
_EVALUATED = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Datasets whose scorers hand the text to sympy's parser, which evaluates it."""
_WORDS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs abs pi E Rational".split()  # noqa: SIM905
)
_ARITHMETIC = re.compile(r"[0-9A-Za-z+\-*/^()., \n]*")


def require() -> None:
    """Checks that reasoning-gym is there, without loading it.

    Raises:
        EnvError: it is not; says how to have it.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise EnvError("reasoning-gym is not installed: pip install 'palestra[reasoning]'")


def warm() -> None:
    """Loads the package, and takes `eval` of a model's text out of its scorers."""
    from reasoning_gym.factory import DATASETS

    for kind, _ in DATASETS.values():
        if "eval" in kind.score_answer.__code__.co_names:
            # A module's own name goes before the built-in one. These scorers ask whether a text is a list; that is all it can be then.
            vars(sys.modules[kind.__module__])["eval"] = ast.literal_eval


def dataset_names() -> list[str]:
    """The datasets there are."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def check(described: Described) -> str:
    """Makes the dataset, to see whether that can be done; empty where it can, else why not."""
    try:
        _dataset(described)
    except Exception as error:  # noqa: BLE001 - whatever the package objects to is the caller's to read
        names = dataset_names()
        known = f"; there are {len(names)}: {', '.join(names)}" if described[0] not in names else ""
        return f"reasoning-gym's {described[0]}: {type(error).__name__}: {error}{known}"
    return ""


def question(described: Described, index: int) -> tuple[str, str | None]:
    """A question and the answer that the package has for it; some datasets have none."""
    entry = _entry(described, index)
    answer = entry["answer"]
    return str(entry["question"]), None if answer is None else str(answer)


def score(described: Described, index: int, asked: str, answer: str) -> float:
    """The dataset's own score of an answer.

    Raises:
        ValueError: `asked` is not the question that the package makes now: it has changed since the task was made.
    """
    entry = _entry(described, index)
    if str(entry["question"]) != asked:
        raise ValueError(
            f"entry {index} of {described[0]} has another question here: is it another version of reasoning-gym?"
        )
    if entry.get("metadata", {}).get("source_dataset", described[0]) in _EVALUATED and not is_arithmetic(answer):
        return 0.0
    random.seed(index)
    np.random.seed(index)
    return float(_dataset(described).score_answer(answer, entry))


def is_arithmetic(text: str) -> bool:
    """Whether evaluating `text` could do no more than compute: numbers, single letters and known functions; no attribute, text or other
    name.
    """
    if not _ARITHMETIC.fullmatch(text) or re.search(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.", text):
        return False
    return all(len(word) == 1 or word in _WORDS for word in re.findall(r"[A-Za-z]+", text))


@functools.lru_cache(maxsize=16)
def _dataset(described: Described) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    name, seed, size, settings = described
    more = json.loads(settings)
    if name == "composite":  # its parts are objects of the package
        more["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in more.get("datasets", ())]
    return reasoning_gym.create_dataset(name, seed=seed * SEED_STEP, size=size, **more)


@functools.lru_cache(maxsize=256)
def _entry(described: Described, index: int) -> dict[str, Any]:
    dataset = _dataset(described)
    random.seed(f"{described}/{index}")
    np.random.seed(index)
    entry: dict[str, Any] = dataset[index]
    return entry
