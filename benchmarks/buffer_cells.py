"""The cells of the benchmark: what is measured, in which order, and the JSON that comes of it.

In: a `Stage`. Out: one dictionary. The stores take turns in each round, so that what else the machine does hits them alike. It waits for
the stores.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks import buffer_peer
from benchmarks.buffer_crash import recover
from benchmarks.buffer_groups import LENGTHS, SIZE, make_group, same
from benchmarks.buffer_roles import AT_A_TIME
from benchmarks.buffer_stage import EMBEDDED, HTTP, PEER, PLAIN, POSTGRES, Stage
from palestra.server.types import TrajectoryGroup

SHORT, LONG = LENGTHS
WARM, CRASH = "warm", "crash"


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: groups put in one go after the other, then taken."""

    store: str
    tokens: int
    """Of a row."""
    batch: int
    """Groups in one call."""
    calls: int

    def names(self, turn: str | int) -> list[str]:
        """Of the groups, in their order."""
        return [f"{turn}-{self.store}-{self.tokens}-{self.batch}-{n}" for n in range(self.batch * self.calls)]


@dataclass(frozen=True, slots=True)
class Scale:
    """How long it takes."""

    rounds: int
    cells: tuple[Cell, ...]
    kills: int


CALLS = {
    EMBEDDED: {(SHORT, 1): 24, (SHORT, 8): 8, (LONG, 1): 8, (LONG, 8): 3},
    POSTGRES: {(SHORT, 1): 8, (SHORT, 8): 4, (LONG, 1): 3, (LONG, 8): 1},
    HTTP: {(SHORT, 1): 8, (SHORT, 8): 2, (LONG, 1): 2, (LONG, 8): 1},
    PEER: {(SHORT, 1): 3, (SHORT, 8): 1, (LONG, 1): 1},
    PLAIN: {(SHORT, 1): 1},
}
"""Of a round, by store, tokens and groups in one call: the slow ones few."""


def _cells(times: int, more: Mapping[tuple[str, int, int], int]) -> tuple[Cell, ...]:
    """The stores take turns."""
    calls = {(store, *key): count * times for store, counts in CALLS.items() for key, count in counts.items()}
    cells = [Cell(*key, count) for key, count in {**calls, **more}.items()]
    return tuple(sorted(cells, key=lambda cell: (cell.tokens, cell.batch)))


QUICK = Scale(rounds=3, cells=_cells(1, {}), kills=3)
FULL = Scale(rounds=8, cells=_cells(3, {(PLAIN, LONG, 1): 1}), kills=20)


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a cell."""

    put_per_s: float
    """Rows."""
    take_per_s: float
    put_ms: tuple[float, float]
    """CPU-milliseconds a row: of the client, which in process is all there is, and of the server behind it."""
    take_ms: tuple[float, float]


@dataclass(slots=True)
class Cells:
    """Measures."""

    stage: Stage
    scale: Scale
    found: dict[Cell, list[Taken]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """All of it."""
        began = time.monotonic()
        self.stage.start(self._record())
        # As the service does: a collector that walks the groups again and again would be measured with them.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        cells = [cell for cell in self.scale.cells if cell.store in self.stage.stores]
        for cell in cells:
            self.measure(Cell(cell.store, cell.tokens, cell.batch, 1), WARM)
        for number in range(self.scale.rounds):
            for cell in cells:
                self.found[cell].append(self.measure(cell, number))
        seed = time.time_ns() % 10**6
        recovery, faults = recover(self.stage, self.scale.kills, seed, self._crash_names())
        self.wrong += faults
        return {**self._report(recovery), "seconds": round(time.monotonic() - began, 1)}

    def measure(self, cell: Cell, turn: str | int) -> Taken:
        """One cell, and whether what came out is what went in."""
        store = self.stage.stores[cell.store]
        groups = [make_group(name, cell.tokens, kind) for kind, name in enumerate(cell.names(turn))]
        store.prepare(cell.batch, cell.tokens, SIZE)
        rows = len(groups) * SIZE
        started, before = time.perf_counter(), store.cpu_s()
        for at in range(0, len(groups), cell.batch):
            store.put(groups[at : at + cell.batch])
        between, middle = time.perf_counter(), store.cpu_s()
        first = got = store.take(cell.batch)
        count = len(got)
        for _ in range(cell.calls - 1):
            got = store.take(cell.batch)
            count += len(got)
        ended, after = time.perf_counter(), store.cpu_s()
        if count != len(groups) or not _came(first, groups):
            self.wrong.append(f"{cell}: {count} of {len(groups)} groups came out, or others")
        found = Taken(
            put_per_s=rows / (between - started),
            take_per_s=rows / (ended - between),
            put_ms=_ms_each(before, middle, rows),
            take_ms=_ms_each(middle, after, rows),
        )
        rates = f"{found.put_per_s:.0f} in, {found.take_per_s:.0f} out a second"
        cost = f"{sum(found.put_ms):.3f} in, {sum(found.take_ms):.3f} out"
        print(
            f"{cell.store}, {cell.tokens} tokens by {cell.batch}: {rows} rows, {rates}, CPU-ms {cost}",
            file=sys.stderr,
            flush=True,
        )
        return found

    def _record(self) -> Iterator[tuple[str, int, int]]:
        for cell in self.scale.cells:
            if cell.store == HTTP:
                warm = Cell(HTTP, cell.tokens, cell.batch, 1)
                turns: list[tuple[Cell, str | int]] = [(cell, number) for number in range(self.scale.rounds)]
                for one, turn in [(warm, WARM), *turns]:
                    for kind, name in enumerate(one.names(turn)):
                        yield name, one.tokens, kind
        for kind, name in enumerate(self._crash_names()):
            yield name, SHORT, kind

    def _crash_names(self) -> list[str]:
        return Cell(HTTP, SHORT, AT_A_TIME, 1).names(CRASH)

    def _report(self, recovery: Mapping[str, Any]) -> dict[str, Any]:
        for said in self.wrong:
            print(f"WRONG: {said}", file=sys.stderr)
        cells: Figures = defaultdict(lambda: defaultdict(dict))
        for cell, found in self.found.items():
            cells[cell.store][str(cell.tokens)][f"by_{cell.batch}"] = _figures(found)
        ours = {length: batches["by_8"] for length, batches in cells[EMBEDDED].items()}
        return {
            **{kind: {length: found[kind] for length, found in ours.items()} for kind in _RATES},
            "cpu_ms_per_row": {length: {way: found[way] for way in ("in", "out")} for length, found in ours.items()},
            "peers": {name: _beside(cells, name) for name in (PEER, PLAIN)},
            "recovery": recovery,
            "cells": cells,
            "wrong": self.wrong,
            "machine": self.stage.machine(),
        }


_RATES = ("put_per_s", "take_per_s")
Figures: TypeAlias = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""By store, length and batch."""


def _beside(cells: Figures, peer: str) -> dict[str, Any]:
    """A peer's rates, and how many times as high each of our stores' are."""
    theirs = {length: _best(batches) for length, batches in cells[peer].items()}

    def ratio(store: str, length: str, kind: str) -> float:
        return round(_best(cells[store][length])[kind] / theirs[length][kind], 1)

    return {
        **{kind: {length: rates[kind] for length, rates in theirs.items()} for kind in _RATES},
        "version": buffer_peer.VERSION,
        "ours_to_it": {
            store: {length: {kind: ratio(store, length, kind) for kind in _RATES} for length in theirs}
            for store in cells
            if store not in (PEER, PLAIN)
        },
    }


def _best(batches: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The better rates, of those with other batches."""
    return {kind: max(float(cell[kind]) for cell in batches.values()) for kind in _RATES}


def _figures(found: list[Taken]) -> dict[str, Any]:
    put, take = ([statistics.median(part) for part in zip(*ms, strict=True)] for ms in _split(found))
    return {
        "put_per_s": round(statistics.median(one.put_per_s for one in found)),
        "take_per_s": round(statistics.median(one.take_per_s for one in found)),
        "in": round(sum(put), 4),
        "out": round(sum(take), 4),
        "of_server": {"in": round(put[1], 4), "out": round(take[1], 4)},
    }


def _split(found: list[Taken]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    return [one.put_ms for one in found], [one.take_ms for one in found]


def _ms_each(before: tuple[float, float], after: tuple[float, float], rows: int) -> tuple[float, float]:
    client, server = (1e3 * (late - early) / rows for early, late in zip(before, after, strict=True))
    return client, server


def _came(found: Any, groups: list[TrajectoryGroup]) -> bool:
    """Whether the first batch is what was put first. The peer's has no names, and may be a later one: its ids must be some group's."""
    if not found:
        return False
    if isinstance(found[0], TrajectoryGroup):
        return all(same(*pair) for pair in zip(found, groups, strict=False))
    put = [[row.token_ids.tolist() for row in group.samples] for group in groups]
    return all([ids.tolist() for ids in group["tokens"]] in put for group in found)
