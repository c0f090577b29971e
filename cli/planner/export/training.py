"""The command that trains, as all scripts and manifests have it. Pure."""

from __future__ import annotations

import json

from palestra.cli.planner.export.fleet import MODEL
from palestra.cli.planner.export.serving import urls_of
from palestra.cli.planner.export.types import Export
from palestra.cli.planner.export.words import var

DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What a trainer's sums need to come out the same twice; engines set their own, so it is never theirs."""


RUN, TRAIN = "run.toml", "train.toml"
"""The configuration, and the form of it that the scripts give to a run whose prefill and decode engines stand apart."""


def config_of(export: Export) -> str:
    """The file that the run gets: rollout.pd and rollout.urls both say which engines there are, so a run takes one of them."""
    return TRAIN if export.apart and export.case.input.rollout.pd is not None else RUN


def train_words(export: Export, folder: str = "", model: str = var(MODEL)) -> tuple[str, ...]:
    """`palestra train`, with what a file cannot know: where the model lies, and where engines are that were started apart.

    `folder`: of the configuration, with its slash; "" for the present one.
    """
    words = ["palestra", "train", folder + config_of(export)]
    if export.case.input.model.path is None:
        words.append(f"--model.path={model}")
    if export.fleet is not None and export.apart:
        words.append(_listed("rollout.urls", export.fleet.urls))
        if export.fleet.router is not None:
            words.append(f"--rollout.router_url={export.fleet.router.url}")
    elif not export.case.input.rollout.urls and (urls := urls_of(export.case)):
        words.append(_listed("rollout.urls", urls))
    return tuple(words)


def train_env(export: Export) -> dict[str, str]:
    """What the trainer's process is told beside its words."""
    return {"PYTHONUNBUFFERED": "1", **(DETERMINISTIC if export.case.input.train.deterministic else {})}


def wall_clock_s(export: Export) -> int | None:
    """The longest that the whole job may take; None: nothing was said."""
    given = export.case.input.run.wall_clock_s
    return None if given is None else max(1, round(given))


def _listed(field: str, urls: tuple[str, ...]) -> str:
    # Without spaces: `ray job submit` puts its words together for a shell, and quotes those with spaces in a way of its own.
    return f"--{field}={json.dumps(list(urls), separators=(',', ':'), ensure_ascii=False)}"
