"""The cells of the benchmark: what is measured, in which order, and the JSON that comes of it.

In: a `Stage` with everything running. Out: one dictionary. Palestra and its peers take turns in one run, so that what else the machine does
hits them alike. It waits for the load generator, a process of its own per cell.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gateway_check import check_store
from benchmarks.gateway_peers import PEERS
from benchmarks.gateway_stage import Stage

OURS = "palestra"
TURNS = ((0, 8), (96, 128))
"""The first and the last turns of long sessions."""
OPEN = 2048
"""Sessions of the last cell."""
SPREAD_S = 6.5
"""They begin within so long a time, as if they had been under way for ever: 5 s of the engine's and 1.5 s of their own to a call."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long the cells are."""

    rounds: dict[int, int]
    """Sessions per agent, by concurrency."""
    peer_rounds: dict[int, int]
    peer_limit_s: float
    """Of a cell of a peer: on a busy machine a minute would not do."""
    repeats: int
    """Of the cells that are interleaved with the peers."""
    in_step: int
    """Sessions of the long conversations."""
    turn_repeats: int
    open_turns: int
    """Calls of each of the OPEN sessions."""
    open_think_s: float
    """The longest wait between two of them."""
    keep_latency: bool
    """False: the engine answers at once in the turns between the first and the last."""


QUICK = Scale(
    rounds={1: 2, 8: 3, 64: 1, 256: 1},
    peer_rounds={8: 2, 64: 1},
    peer_limit_s=4.5,
    repeats=1,
    in_step=8,
    turn_repeats=1,
    open_turns=2,
    open_think_s=1.0,
    keep_latency=False,
)
FULL = Scale(
    rounds={1: 20, 8: 12, 64: 4, 256: 2},
    peer_rounds={8: 8, 64: 2},
    peer_limit_s=60.0,
    repeats=3,
    in_step=16,
    turn_repeats=2,
    open_turns=6,
    open_think_s=3.0,
    keep_latency=True,
)


@dataclass(slots=True)
class Cells:
    """Measures."""

    stage: Stage
    scale: Scale
    costs: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    latency: dict[str, dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    open_close: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0

    def run(self) -> dict[str, Any]:
        """All of it."""
        began = time.monotonic()
        for _ in range(self.scale.repeats):
            for sessions in (8, 64):
                self.cell(OURS, sessions, self.scale.rounds[sessions])
                for peer in PEERS:
                    self.cell(peer.name, sessions, self.scale.peer_rounds[sessions], self.scale.peer_limit_s)
            for sessions in (1, 256):
                self.cell(OURS, sessions, self.scale.rounds[sessions])
        turns = self.turns()
        wide = self.wide()
        return {**self._report(turns, wide), "seconds": round(time.monotonic() - began, 1)}

    def cell(self, gateway: str, sessions: int, rounds: int, limit_s: float = 0.0) -> None:
        """One gateway at one concurrency."""
        got = self.stage.load(gateway, sessions=sessions, rounds=rounds, limit_s=limit_s)
        self._note(f"{gateway} at {sessions}", got)
        self.costs[gateway][sessions].append(got["cpu_ms_per_call"])
        self.latency[gateway][sessions].append((got["p50_ms"], got["p99_ms"]))
        if gateway == OURS:
            self.open_close.append(got["open_close_ms"])

    def turns(self) -> dict[str, float | None]:
        """CPU-ms per call of the first and the last turns of long sessions; None where a call failed."""
        marks = TURNS if not self.scale.keep_latency else (TURNS[0], (8, 96), TURNS[1])
        runs = []
        for _ in range(self.scale.turn_repeats):
            got = self.stage.load(OURS, sessions=self.scale.in_step, turns=TURNS[-1][1], in_step=True, marks=marks)
            self._note(f"{self.scale.in_step} sessions of {TURNS[-1][1]} turns", got)
            if got["marks"]:
                runs.append((got["marks"][0], got["marks"][-1]))
        first, last = ([run[at] for run in runs] for at in (0, 1))
        return {"8": _middle(first), "128": _middle(last)}

    def wide(self) -> dict[str, Any]:
        """OPEN sessions with an engine that takes 5 s, in a service that has just started, whose memory is clean."""
        with self.stage.fresh_service():
            got = self.stage.load(
                OURS,
                sessions=OPEN,
                turns=self.scale.open_turns,
                latency_s=5.0,
                think_s=self.scale.open_think_s,
                spread_s=SPREAD_S,
                probe=True,
                close=False,  # the service is ended
            )
            self._note(f"{OPEN} sessions", got)
        return {
            "errors": got["errors"],
            "lag_p99_ms": round(got["lag"]["p99_ms"], 2),
            "lag_max_ms": round(got["lag"]["max_ms"], 2),
            "kb_per_session": round(got["kb_per_session"], 1),
            "calls": got["calls"],
            "cpu_ms_per_call": round(got["cpu_ms_per_call"], 3),
            "latency_ms": {"p50": round(got["p50_ms"], 1), "p99": round(got["p99_ms"], 1)},
        }

    def _note(self, what: str, got: dict[str, Any]) -> None:
        if got["errors"]:
            self.wrong += got["errors"]
            self.errors += [f"{what}: {said}" for said in got["said"]]
        cost = f"{got['cpu_ms_per_call']:.2f} CPU-ms a call"
        times = f"p50 {got['p50_ms']:.0f} ms, p99 {got['p99_ms']:.0f} ms"
        print(
            f"{what}: {cost}, {times}, {got['calls']} calls in {got['wall_s']:.1f} s, {got['errors']} errors",
            file=sys.stderr,
            flush=True,
        )

    def _report(self, turns: dict[str, float | None], wide: dict[str, Any]) -> dict[str, Any]:
        unsound = check_store(self.stage)
        for said in [*self.errors, *unsound]:
            print(f"WRONG: {said}", file=sys.stderr)
        ours = self.costs[OURS]
        return {
            "cpu_ms_per_call": {str(n): _middle(ours[n]) for n in sorted(ours)},
            "turns": turns,
            "peers": {peer.name: {str(n): _middle(v) for n, v in self.costs[peer.name].items()} for peer in PEERS},
            "sessions_2048": wide,
            "latency_ms": {
                name: {str(n): _latency(cells[n]) for n in sorted(cells)} for name, cells in self.latency.items()
            },
            "open_close_cpu_ms": _middle(self.open_close),
            "errors": self.wrong,
            "store": unsound or "every turn once",
            "versions": {peer.name: peer.version for peer in PEERS},
            "machine": self.stage.machine(),
        }


def _middle(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _latency(values: list[tuple[float, float]]) -> dict[str, float]:
    return {"p50": round(statistics.median(v[0] for v in values), 1), "p99": round(max(v[1] for v in values), 1)}
