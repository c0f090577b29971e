"""What two engines find of their prompts in their caches: by the router's policy, with and without a leader, and played by Palestra.

`--setup` installs the engines and starts them, `--quick` measures within four minutes, no option measures three rounds, `--teardown` ends
what runs. The last line printed is one JSON object. See docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

if TYPE_CHECKING:
    from benchmarks.engines import Engines

POLICIES = ("cache_aware", "round_robin", "manual", "consistent_hashing", "random")
OURS = "consistent_hashing"
"""The policy of the router that Palestra stands on by default."""


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    from benchmarks import engines

    def prepare() -> Engines:
        return engines.Engines("prefix", _model(), options={"max_total_tokens": 65_536})

    return engines.main(argv, __doc__.split("\n")[0], "prefix", prepare, measure, rounds=3)


def measure(engines: Engines, rounds: int) -> dict[str, Any]:
    """All cells, interleaved over the rounds; shares as means, and all of them under `runs`."""
    from benchmarks.prefix_cells import Cell, RawSessions, bound, hit
    from benchmarks.prefix_ours import OurSessions

    cells = {
        "alone": Cell("none", False),
        "leader": Cell("none", True),
        "group": Cell("group", False),
        "group+leader": Cell("group", True),
        "turns alone": Cell("none", False, 3),
        "turns group+leader": Cell("group", True, 3),
    }
    found: dict[str, dict[str, list[float]]] = {policy: {name: [] for name in cells} for policy in (*POLICIES, "ours")}
    bounds: dict[str, float] = {}
    vocab = _vocab(engines.model)
    for _ in range(rounds):
        for policy in POLICIES:
            with engines.router(policy) as place:
                raw = RawSessions(place.url, place.workers, vocab)
                for name, cell in cells.items():
                    groups = asyncio.run(raw.play(cell))
                    found[policy][name].append(hit([s for group in groups for s in group]))
                    bounds["turns" if cell.turns > 1 else "once"] = bound(groups)
                if policy == OURS:
                    ours = OurSessions(place, engines.model, engines.home)
                    for name, turns in (("group+leader", 1), ("turns group+leader", 3)):
                        groups = ours.play(turns)
                        found["ours"][name].append(hit([s for group in groups for s in group]))
                        bounds["ours, turns" if turns > 1 else "ours"] = bound(groups)
            print(
                f"{policy}: { {name: [round(v, 3) for v in runs] for name, runs in found[policy].items()} }",
                file=sys.stderr,
            )
    means = {
        policy: {name: round(statistics.mean(runs), 4) for name, runs in by.items() if runs}
        for policy, by in found.items()
    }
    return {
        "hit": {policy: means[policy]["alone"] for policy in POLICIES},
        "ours": means["ours"]["group+leader"],
        "bound": round(bounds["ours"], 4),
        "of_bound": round(means["ours"]["group+leader"] / bounds["ours"], 4),
        "turns": {
            "hit": {policy: means[policy]["turns alone"] for policy in POLICIES},
            "ours": means["ours"]["turns group+leader"],
            "bound": round(bounds["ours, turns"], 4),
        },
        "leader": {policy: means[policy]["leader"] for policy in POLICIES},
        "group": {policy: means[policy]["group"] for policy in POLICIES},
        "group_leader": {policy: means[policy]["group+leader"] for policy in POLICIES},
        "runs": rounds,
    }


def _model() -> Path:
    """The tiny MoE, made once."""
    from benchmarks.engines import HOME
    from tests.tiny import make_tiny_moe

    folder = HOME / "tiny-moe"
    if not (folder / "config.json").is_file():
        make_tiny_moe(folder, max_position_embeddings=2048, initializer_range=0.1)
    return folder


def _vocab(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
