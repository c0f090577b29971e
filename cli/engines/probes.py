"""What engines and routers answer when they are looked at, read once: ready or not, alive or not, how large an engine's pools are.

In: a URL. Out: plain values. Each call waits for one HTTP answer, with a deadline in seconds.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.cli import status


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What one engine has room for, as it says itself. None: it does not say."""

    tokens: int | None
    """Of its cache, all of its data parallel ranks together."""
    requests: int | None
    """That it runs at a time."""
    context: int | None
    """Prompt and reply together, tokens."""

    def __str__(self) -> str:
        parts = [
            f"{size:,} {what}"
            for size, what in (
                (self.tokens, "tokens of cache"),
                (self.requests, "requests at a time"),
                (self.context, "tokens a request"),
            )
            if size is not None
        ]
        return ", ".join(parts) or "sizes unknown"


def engine_alive(url: str, timeout_s: float) -> bool:
    """Whether an engine answers. /health is not asked: it makes SGLang generate a token, and fails while the engine is paused."""
    return _get(f"{url}/model_info", timeout_s) is not None


def engine_ready(url: str, timeout_s: float) -> PoolSizes | None:
    """Its pools, once an engine that was just started has generated a token; None before."""
    if not engine_alive(url, timeout_s) or _get(f"{url}/health", timeout_s) is None:
        return None
    return pool_sizes(url, timeout_s)


def pool_sizes(url: str, timeout_s: float) -> PoolSizes | None:
    """What /server_info says of an engine's pools; None where it does not answer."""
    info = _json(f"{url}/server_info", timeout_s)
    if not isinstance(info, Mapping):
        return None
    ranks = [state for state in info.get("internal_states") or [] if isinstance(state, Mapping)]
    tokens, each = _size(info.get("max_total_num_tokens")), "effective_max_running_requests_per_dp"
    running = [size for state in ranks if (size := _size(state.get(each))) is not None]
    return PoolSizes(
        tokens=None if tokens is None else tokens * max(1, len(ranks)),
        requests=sum(running) if running else _size(info.get("max_running_requests")),
        context=_size(info.get("context_length")),
    )


def router_alive(url: str, timeout_s: float) -> bool:
    """Whether a router answers."""
    return _get(f"{url}/health", timeout_s) is not None


def router_lacks(url: str, workers: Sequence[str], timeout_s: float) -> list[str] | None:
    """Those of the workers that the router does not list as healthy; None where it does not answer, or not as a router does."""
    listed = _json(f"{url}/workers", timeout_s)
    rows = listed.get("workers") if isinstance(listed, Mapping) else None
    if not isinstance(rows, list) or not router_alive(url, timeout_s):
        return None
    healthy = {str(row.get("url")).rstrip("/") for row in rows if isinstance(row, Mapping) and row.get("is_healthy")}
    return [worker for worker in workers if worker.rstrip("/") not in healthy]


def _get(url: str, timeout_s: float) -> bytes | None:
    """As `status.get`, also of a process that dies in the middle of its answer."""
    try:
        return status.get(url, timeout_s)
    except http.client.HTTPException:
        return None


def _json(url: str, timeout_s: float) -> Any:
    raw = _get(url, timeout_s)
    try:
        return None if raw is None else json.loads(raw)
    except ValueError:
        return None


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
