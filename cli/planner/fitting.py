"""The search for changes that make a plan hold: the first of a few that adds no error. Pure, and bounded.

In: a case, what must hold, and how cases are judged. Out: changes by field path, as a finding suggests them. Candidates are first held to
arithmetic, which is cheap; only those that pass it are judged by all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import ceil
from typing import Any, cast

from palestra.cli.planner.case import Case
from palestra.cli.planner.inputs import PlanInput
from palestra.envs.config import Section
from palestra.envs.findings import Finding, Severity
from palestra.trainer.layout.types import stage_layers

Changes = Mapping[str, Any]
"""Field path -> value; None takes the field away."""
Judge = Callable[[Case], Iterable[Finding]]
Holds = Callable[[Case], bool]
MOST_JUDGED = 24
"""Candidates of one search that all rules are asked about: a search is part of a plan, and a plan answers at once."""
LAYOUT = (
    "train.ep",
    "train.pp",
    "train.first_stage_layers",
    "train.last_stage_layers",
    "train.tp",
    "train.etp",
    "train.sp",
)
"""Fields that belong together: the ends of a pipeline to its size, experts' to the tensors'."""
CHUNKS = (4096, 2048, 1024)
"""Predictions whose logits exist at a time, as a plan suggests them."""


@dataclass(frozen=True)
class Trial(Case):
    """A case that a search tries. Rules judge it like any other, but do not search in it."""


def tried(case: Case, changes: Changes) -> Trial:
    """The case with fields changed; their values are not checked for range."""
    given: Section = case.input
    for path, value in changes.items():
        given = _with(given, path, value)
    return Trial(cast(PlanInput, given), case.model)


def _with(section: Section, path: str, value: Any) -> Section:
    key, _, below = path.partition(".")
    if below:
        return section.model_copy(update={key: _with(getattr(section, key), below, value)})
    field = type(section).model_fields[key]
    return section.model_copy(update={key: field.get_default() if value is None else value})


class Search:
    """One search from one case: what holds, which errors are there anyway, and how many candidates were judged."""

    def __init__(self, case: Case, holds: Holds, judge: Judge) -> None:
        self._case, self._holds, self._judge = case, holds, judge
        self._known: frozenset[tuple[str, str]] | None = None
        self._left = MOST_JUDGED

    def fits(self, changes: Changes) -> bool:
        """Whether it holds with these changes, without an error more."""
        return self._holds(tried(self._case, changes)) and self.sound(changes)

    def sound(self, changes: Changes) -> bool:
        """Whether these changes add no error. Past MOST_JUDGED candidates: no."""
        if self._left <= 0:
            return False
        self._left -= 1
        if self._known is None:
            self._known = self._errors({})
        return self._errors(changes) <= self._known

    def _errors(self, changes: Changes) -> frozenset[tuple[str, str]]:
        found = self._judge(tried(self._case, changes))
        return frozenset((each.code, each.path) for each in found if each.severity is Severity.ERROR)


def first(case: Case, candidates: Iterable[Changes], holds: Holds, judge: Judge) -> Changes:
    """The first candidate that holds and adds no error; empty: none does."""
    search = Search(case, holds, judge)
    return next((each for each in candidates if search.fits(each)), {})


def fit_training(case: Case, limit: float, judge: Judge) -> Changes:
    """Changes of `[train]` after which the fullest rank needs `limit` bytes at most; empty: none were found.

    Single changes first, from what costs least (shorter micro-batches) to what costs most (tensor parallel size); then all of the cheap
    ones together, then those with another layout, less what turns out not to be needed.
    """

    def holds(trial: Case) -> bool:
        return 0 < trial.worst_train_bytes <= limit

    search = Search(case, holds, judge)
    singles = chain(_cheap(case), _layouts(case))
    found = next((each for each in singles if search.fits(each)), None)
    if found is None:
        found = _together(case, search, holds)
    return found or {}


def _together(case: Case, search: Search, holds: Holds) -> Changes | None:
    """The cheap changes added up; then with each layout, mildest first."""
    taken: dict[str, Any] = {}
    for change in _strongest(case):
        wider = {**taken, **change}
        if search.sound(wider):
            taken = wider
            if holds(tried(case, wider)):
                return _needed(case, wider, search, holds)
    for layout in _grid(case):
        wider = {**taken, **layout}
        if search.fits(wider):
            return _needed(case, wider, search, holds)
    return None


def _needed(case: Case, changes: Changes, search: Search, holds: Holds) -> Changes:
    """The changes less those without which it holds as well: the dearest are tried first."""
    kept = dict(changes)
    parts = [path for path in reversed(list(changes)) if path not in LAYOUT]
    for path in parts:
        less = {each: value for each, value in kept.items() if each != path}
        if less and holds(tried(case, less)) and search.sound(less):
            kept = less
    return kept


def _cheap(case: Case) -> Iterator[Changes]:
    """Single changes that leave the layout alone, in the order in which they are worth trying."""
    yield from ({"train.max_tokens_per_gpu": tokens} for tokens in _shorter(case))
    if not case.on_cpu and case.recompute != "full":
        yield {"train.recompute": "full"}
    yield from shorter_chunks(case)
    if not case.on_cpu and case.input.train.optimizer_offload < 1:
        yield {"train.optimizer_offload": 1.0}


def shorter_chunks(case: Case) -> Iterator[Changes]:
    """Fewer predictions whose logits exist at a time."""
    chunk = case.input.train.logprob_chunk_tokens
    yield from ({"train.logprob_chunk_tokens": each} for each in CHUNKS if not chunk or each < chunk)


def _strongest(case: Case) -> Iterator[Changes]:
    """The last, strongest value of each cheap change."""
    last: dict[str, Changes] = {}
    for change in _cheap(case):
        last["".join(change)] = change
    yield from last.values()


def _shorter(case: Case) -> Iterator[int]:
    """Smaller micro-batches: halves, down to the longest row."""
    given, least = case.max_tokens_per_gpu, ceil(case.longest_row / case.layout.cp)
    half = given // 2
    while half > least:
        yield half
        half //= 2
    if least < given:
        yield least


def _layouts(case: Case) -> Iterator[Changes]:
    """Single sizes raised: experts', the pipeline's, the tensors'."""
    if case.on_cpu:
        return
    yield from ({"train.ep": ep} for ep in _expert_sizes(case, case.layout.pp))
    for pp in _doubled(case.layout.pp, min(case.model.layers, case.train_gpus)):
        yield from _pipeline(case, pp)
    yield from (_tensors(case, tp) for tp in _doubled(case.layout.tp, _most_tensors(case)))


def _grid(case: Case) -> Iterator[Changes]:
    """Sizes raised together; a larger tensor parallel size is the last resort."""
    if case.on_cpu:
        return
    layout = case.layout
    pipelines: list[Changes] = [{}]
    for pp in _doubled(layout.pp, min(case.model.layers, case.train_gpus)):
        pipelines += _pipeline(case, pp)
    tensors: list[Changes] = [{}, *(_tensors(case, tp) for tp in _doubled(layout.tp, _most_tensors(case)))]
    for tensor, pipeline in product(tensors, pipelines):
        tp, pp = tensor.get("train.tp", layout.tp), pipeline.get("train.pp", layout.pp)
        if case.train_gpus % (tp * pp * layout.cp):
            continue
        for ep in (None, *_expert_sizes(case, pp)):
            yield {**({} if ep is None else {"train.ep": ep}), **pipeline, **tensor}


def _doubled(size: int, most: int) -> Iterator[int]:
    while (size := 2 * size) <= most:
        yield size


def _most_tensors(case: Case) -> int:
    """Tensor parallel groups stay within a node."""
    return min(case.input.hardware.gpus_per_node, case.train_gpus)


def _expert_sizes(case: Case, pp: int) -> Iterator[int]:
    """Larger expert parallel sizes that experts and processes divide into."""
    for ep in _doubled(case.layout.ep, case.model.experts):
        if case.model.experts % ep == 0 and case.train_gpus % (case.layout.etp * ep * pp) == 0:
            yield ep


def _tensors(case: Case, tp: int) -> Changes:
    """A tensor parallel size with what has to go with it: experts need sequence parallel regions beside it, and their own size where they
    are not spread."""
    found: dict[str, Any] = {"train.tp": tp}
    if case.model.experts and not case.sp:
        found["train.sp"] = True
    if case.model.experts and case.layout.ep == 1:
        found["train.etp"] = tp
    return found


def _pipeline(case: Case, pp: int) -> Iterator[Changes]:
    """A pipeline's size with ends that its layers divide into."""
    layers, train = case.model.layers, case.input.train
    whole = ceil(layers / pp)
    for last in (None, layers - (pp - 1) * whole):
        if (last is None or last >= 1) and stage_layers(layers, pp, None, last) is not None:
            found: dict[str, Any] = {"train.pp": pp}
            if train.first_stage_layers is not None:
                found["train.first_stage_layers"] = None
            if train.last_stage_layers != last:
                found["train.last_stage_layers"] = last
            yield found
            return


def pipeline_ends(case: Case) -> Iterator[Changes]:
    """Other numbers of layers for the ends of the pipeline, of which every stage between has about its share. Ends carry the
    embedding and the logits, so they get fewer."""
    layers, pp, train = case.model.layers, case.layout.pp, case.input.train
    if pp < 2:
        return
    for middle, less in product(range(layers // pp, layers // pp + 3), range(5)):
        firsts = (middle - less,) if pp > 2 else (layers // 2 + less, layers // 2 - less)
        for first_ in firsts:
            last = layers - first_ - (pp - 2) * middle
            known = (first_, last) == (train.first_stage_layers, train.last_stage_layers)
            if min(first_, last) >= 1 and not known and stage_layers(layers, pp, first_, last) is not None:
                yield {"train.first_stage_layers": first_, "train.last_stage_layers": last}
        if pp == 2 and less == 4:
            return
