"""The command that trains, as all scripts and manifests have it. Pure."""

from __future__ import annotations

import json
from typing import Any

from palestra.cli.planner.export.fleet import MODEL
from palestra.cli.planner.export.types import Export
from palestra.cli.planner.export.words import var
from palestra.cli.planner.inputs import RUNS

DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What a trainer's sums need to come out the same twice; engines set their own, so it is never theirs."""


RUN, TRAIN = "run.toml", "train.toml"
"""The configuration with every default, and the form of it that a run takes: scripts name the second."""
ONLY_PLANNED = ("hardware", "workload")
"""Tables that a run reads as the planner does."""
OF_ENGINES = ("sglang", "router")
"""Tables that are passed to engines and their router by whoever starts them."""


def run_form(export: Export) -> dict[str, Any]:
    """The resolved tables for `palestra train`: without what a run does not know and nobody gave, since it refuses a field that nothing
    would honour. What was given stays, so that it is refused by its name.

    Where engines stand apart, nothing says which to start and how: the scripts name their addresses, and a run takes one of the two.
    """
    tables: dict[str, Any] = {}
    for table, values in export.report.resolved.items():
        ours = getattr(export.case.input, table, None)
        if table in OF_ENGINES and export.apart:
            continue
        if ours is None or table in ONLY_PLANNED:
            tables[table] = values
            continue
        known = RUNS[table].model_fields.keys() if table in RUNS and table != "sandbox" else set()
        # No box is "none" to a run, but a table that is left out: of [sandbox] only what was given is said.
        left = {
            key: value
            for key, value in values.items()
            if key in ours.model_fields_set or key not in type(ours).model_fields or key in known
        }
        if table == "rollout" and export.apart:
            left = {key: value for key, value in left.items() if key not in ("pd", "engines")}
        elif table == "rollout":
            left = {**_counted(export), **left}
        if left:
            tables[table] = left
    return tables


def _counted(export: Export) -> dict[str, int]:
    """How many engines a run starts. Left out, a run starts one, and the plan counted as many as there are GPUs for; run.toml leaves it
    out, so that other sizes can be tried in it."""
    case = export.case
    said = case.input.rollout.pd is not None or case.external_urls or "topology" in export.report.resolved["rollout"]
    return {} if export.fleet is None or said else {"engines": case.engines[-1].count}


def train_words(export: Export, folder: str = "", model: str = var(MODEL)) -> tuple[str, ...]:
    """`palestra train`, with what a file cannot know: where the model lies, and where engines are that were started apart.

    `folder`: of the configuration, with its slash; "" for the present one.
    """
    words = ["palestra", "train", folder + TRAIN]
    if export.case.input.model.path is None:
        words.append(f"--model.path={model}")
    if export.fleet is not None and export.apart:
        words.append(_listed("rollout.urls", export.fleet.urls))
        if export.fleet.router is not None:
            words.append(f"--rollout.router_url={export.fleet.router.url}")
    elif export.case.input.placement.external_urls:
        words.append(_listed("rollout.urls", export.case.external_urls))
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
