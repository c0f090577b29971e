"""What /metrics says, in Prometheus' text form. In: the engine. Out: text. Names are SGLang's, so that one reader
serves both engines."""

from __future__ import annotations

from palestra.server.embedded.engine import Engine


def exposition(engine: Engine) -> str:
    """All values as they are now."""
    core = engine.core
    store = core.scheduler.store
    rows = (
        ("num_running_reqs", "gauge", "Requests in the batch", engine.running),
        ("num_queue_reqs", "gauge", "Requests that wait for a place", engine.queued),
        ("num_used_tokens", "gauge", "Tokens of running requests", sum(len(j.tokens) for j in core.scheduler.running)),
        ("num_stored_tokens", "gauge", "Tokens in the prefix store", len(store) * store.page_size),
        ("generation_tokens_total", "counter", "Tokens sampled", core.generated),
        ("prompt_tokens_total", "counter", "Prompt tokens of requests that ran", core.prompted),
        ("cached_tokens_total", "counter", "Those of them that the prefix store had", core.cached),
    )
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}", f"sglang:{name} {value}"]
    return "\n".join(lines) + "\n"
