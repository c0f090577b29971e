"""Engines and a router that others run: looked at once, never managed.

In: their URLs. Out: their pool sizes, or one error with all that do not answer. Waits for each a bounded time: they are said to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from palestra.cli.engines.part import FleetError
from palestra.cli.engines.probes import PoolSizes, engine_alive, pool_sizes, router_lacks

ANSWER_S = 10.0
"""For one answer."""


def probe(urls: Sequence[str], router_url: str | None, answer_s: float = ANSWER_S) -> dict[str, PoolSizes]:
    """The pools of each engine that says them, by URL; all are asked at once, and the router whether it has them.

    Raises:
        FleetError: an engine or the router does not answer, or the router lacks an engine.
    """
    with ThreadPoolExecutor(min(32, len(urls)), thread_name_prefix="engine-look") as threads:
        alive = list(threads.map(partial(engine_alive, timeout_s=answer_s), urls))
        silent = [url for url, answers in zip(urls, alive, strict=True) if not answers]
        if silent:
            raise FleetError(
                f"rollout.urls: {', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer GET /model_info within "
                f"{answer_s:.0f} s as an SGLang engine does; start what is missing, or take it out"
            )
        pools = list(threads.map(partial(pool_sizes, timeout_s=answer_s), urls))
    if router_url is not None:
        lacks = router_lacks(router_url, urls, answer_s)
        if lacks is None:
            raise FleetError(
                f"rollout.router_url: {router_url} does not answer GET /health and GET /workers as a router does"
            )
        if lacks:
            raise FleetError(
                f"rollout.router_url: the router {router_url} does not have {', '.join(lacks)} as healthy; add it there with "
                f"POST /workers, or take it out of rollout.urls"
            )
    return {url: pool for url, pool in zip(urls, pools, strict=True) if pool is not None}
