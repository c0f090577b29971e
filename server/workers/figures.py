"""What is measured of the engines: how much of the prompts they had cached, and how full they are.

In: replies (as they come), and what the watcher reads from the workers. Out: metrics of a step, a row of /status per worker. Pure;
memory is bounded.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_GROUPS = 512
FULL = 0.8
"""Share of a worker's cache from which on it has no room for more groups."""
_COUNTER = re.compile(r"^sglang:(cached_tokens_total|prompt_tokens_total)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """How full a worker is, summed over its data parallel ranks."""

    running: int
    waiting: int
    token_usage: float
    """Share of its cache that running requests hold."""

    @property
    def room(self) -> bool:
        """Whether it can take more groups."""
        return self.waiting == 0 and self.token_usage < FULL


def read_load(answer: Mapping[str, Any]) -> Load | None:
    """The answer of /v1/loads; None where it holds none.

    Raises:
        ValueError, TypeError: something in it is no number.
    """
    rows = answer.get("loads")
    ranks = [rank for rank in rows if isinstance(rank, Mapping)] if isinstance(rows, list) else []
    if not ranks:
        return None
    return Load(
        running=sum(int(rank.get("num_running_reqs") or 0) for rank in ranks),
        waiting=sum(int(rank.get("num_waiting_reqs") or 0) for rank in ranks),
        token_usage=max(float(rank.get("token_usage") or 0.0) for rank in ranks),
    )


@dataclass(slots=True)
class Share:
    """Cached tokens of all prompt tokens."""

    prompt: int = 0
    cached: int = 0

    def add(self, prompt: int, cached: int) -> None:
        """More of both."""
        self.prompt += prompt
        self.cached += cached

    @property
    def value(self) -> float | None:
        """From 0 to 1; None where there was no prompt."""
        return self.cached / self.prompt if self.prompt else None


def read_counters(exposition: str) -> Share | None:
    """A worker's own counters since its start, from its /metrics; None where it has none.

    Raises:
        ValueError: one of them is no number.
    """
    sums = {"prompt_tokens_total": 0.0, "cached_tokens_total": 0.0}
    found = False
    for name, value in _COUNTER.findall(exposition):
        sums[name] += float(value)
        found = True
    return Share(int(sums["prompt_tokens_total"]), int(sums["cached_tokens_total"])) if found else None


class PrefixFigures:
    """Shares of prompts that workers had cached: of all replies, of first turns and of later ones, per group and per worker."""

    def __init__(self, most_groups: int = MOST_GROUPS) -> None:
        self._most = most_groups
        self._turns = {False: Share(), True: Share()}
        """Since the last `take`, by whether the turn was a later one."""
        self._groups: OrderedDict[str, Share] = OrderedDict()
        self._totals: dict[str, Share] = {}
        self._taken: dict[str, Share] = {}

    def add(self, group: str, prompt: int, cached: int, *, later: bool) -> None:
        """One reply."""
        self._turns[later].add(prompt, cached)
        share = self._groups.get(group)
        if share is None:
            share = self._groups[group] = Share()
            if len(self._groups) > self._most:
                self._groups.popitem(last=False)
        share.add(prompt, cached)

    def counted(self, url: str, total: Share) -> None:
        """A worker's counters as they are now."""
        before = self._totals.get(url)
        if before is None:
            self._taken[url] = Share(total.prompt, total.cached)  # what it did before we knew it is not ours
        elif total.prompt < before.prompt:
            self._taken[url] = Share()  # it was started anew
        self._totals[url] = total

    def group(self, group: str) -> float | None:
        """The share of one group, if it is among the latest."""
        share = self._groups.get(group)
        return None if share is None else share.value

    def worker(self, url: str) -> float | None:
        """The share of one worker since its own start, by its own counters."""
        total = self._totals.get(url)
        return None if total is None else total.value

    def take(self, workers: Mapping[str, str]) -> dict[str, float]:
        """Metrics since the last call; `workers`: URL -> its name in them. What was not measured is left out."""
        first, later = self._turns[False], self._turns[True]
        found = {"first": first.value, "later": later.value}
        found["mean"] = Share(first.prompt + later.prompt, first.cached + later.cached).value
        for url, name in workers.items():
            if (total := self._totals.get(url)) is not None:
                taken = self._taken[url]
                found[name] = Share(total.prompt - taken.prompt, total.cached - taken.cached).value
                self._taken[url] = Share(total.prompt, total.cached)
        groups = [value for share in self._groups.values() if (value := share.value) is not None]
        if groups:
            found["group_min"] = min(groups)
        self._turns = {False: Share(), True: Share()}
        return {f"engine/prefix_hit/{name}": value for name, value in found.items() if value is not None}
