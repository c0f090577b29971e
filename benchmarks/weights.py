"""How fast a trainer's weights reach two SGLang engines, by each transport, and how long the engines stand still for it.

The model has the form of SmolLM2-135M. `--setup` installs the engines and starts them, `--quick` measures within four minutes, no option
measures five rounds, `--teardown` ends what runs. The last line printed is one JSON object. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

if TYPE_CHECKING:
    from benchmarks.engines import Engines

TRANSPORTS = ("disk", "tensor", "distributed")
BUCKET = 64 * 2**20
FLIGHTS, TOKENS = 4, 120
"""Requests at each engine while weights change, and their length."""


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    from benchmarks import engines

    def prepare() -> Engines:
        model = engines.HOME / "weights" / "model"
        make_model(model)
        return engines.Engines("weights", model, options={"max_total_tokens": 16_384, "dtype": "float32"})

    return engines.main(argv, __doc__.split("\n")[0], "weights", prepare, measure, rounds=5)


def make_model(folder: Path) -> None:
    """SmolLM2-135M's shape with random numbers, and the tests' tokenizer; the fp32 weights are 538 MB."""
    if (folder / "config.json").is_file():
        return
    from tests.tiny import make_tiny_llama

    make_tiny_llama(
        folder,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )


def measure(engines: Engines, rounds: int) -> dict[str, Any]:
    """All transports in turn, round after round; medians. Weights are verified in every second publish, which is timed apart."""
    from benchmarks.weights_runs import Runs

    found: dict[str, list[Any]] = {name: [] for name in TRANSPORTS}
    verified: dict[str, list[Any]] = {name: [] for name in TRANSPORTS}
    spans_ok = True
    with Runs(engines, BUCKET) as runs, ThreadPoolExecutor(2 * FLIGHTS) as pool:
        for transport in TRANSPORTS:  # groups, buffers and page cache, once
            runs.publish(transport, verify=False)
        for _ in range(rounds):
            for transport in TRANSPORTS:
                flights = [pool.submit(runs.generate, url, TOKENS) for url in engines.urls for _ in range(FLIGHTS)]
                time.sleep(1.0)  # so that they are under way
                found[transport].append(runs.publish(transport, verify=False))
                spans_ok &= _whole(flights)
                verified[transport].append(runs.publish(transport, verify=True))
                print(f"{transport}: {found[transport][-1]} verified {verified[transport][-1]}", file=sys.stderr)
        copying = runs.memory_speed()
    speed = {name: _median(each.bytes / 1e6 / each.seconds for each in all_) for name, all_ in found.items()}
    return {
        "mb_s": speed,
        "memcpy_mb_s": copying,
        "of_memcpy": {name: round(value / copying, 3) for name, value in speed.items()},
        "still_s": {name: _median(each.still_s for each in all_) for name, all_ in found.items()},
        "verified_s": {name: _median(each.seconds for each in all_) for name, all_ in verified.items()},
        "seconds": {name: _median(each.seconds for each in all_) for name, all_ in found.items()},
        "spans_ok": spans_ok,
        **speed,
    }


def _median(values: Any) -> float:
    return float(round(statistics.median(values), 3))


def _whole(flights: list[Future[dict[str, Any]]]) -> bool:
    """Whether every request reached its length with spans that cover it, and some were under way when the weights changed."""
    from palestra.server.engine_wire import version_of

    changed = False
    for meta in (flight.result() for flight in flights):
        spans = meta["weight_versions"]
        ends = [span["end"] for span in spans]
        versions = [version_of(span["version"]) for span in spans]
        if [span["start"] for span in spans] != [0, *ends[:-1]] or ends[-1] != TOKENS or versions != sorted(versions):
            return False
        changed |= len(spans) > 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
