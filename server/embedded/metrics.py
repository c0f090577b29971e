"""What the engine says of itself: /metrics, /v1/loads, /server_info. In: the engine. Out: text, or what becomes JSON. Waits for nothing.

Names are those of SGLang 0.5.23, so that one reader serves both engines. What SGLang knows and this engine does not have is left out.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from palestra.server.embedded.engine import Engine
from palestra.server.embedded.types import EngineOptions


def exposition(engine: Engine) -> str:
    """All values as they are now."""
    core = engine.core
    store = core.scheduler.store
    rows = (
        ("num_running_reqs", "gauge", "Requests in the batch", engine.running),
        ("num_queue_reqs", "gauge", "Requests that wait for a place", engine.queued),
        ("num_used_tokens", "gauge", "Tokens of running requests", engine.used_tokens),
        ("num_stored_tokens", "gauge", "Tokens in the prefix store", len(store) * store.page_size),
        ("generation_tokens_total", "counter", "Tokens sampled", core.generated),
        ("prompt_tokens_total", "counter", "Prompt tokens of requests that ran", core.prompted),
        ("cached_tokens_total", "counter", "Those of them that the prefix store had", core.cached),
    )
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}", f"sglang:{name} {value}"]
    return "\n".join(lines) + "\n"


def loads(engine: Engine, options: EngineOptions) -> dict[str, Any]:
    """The load, as one data-parallel rank."""
    core = engine.core
    largest, used = core.scheduler.max_tokens, engine.used_tokens
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.queued,
        "num_used_tokens": used,
        "num_total_tokens": used + sum(len(job.tokens) for job in core.scheduler.queue),
        "max_total_num_tokens": largest,
        "max_running_requests": options.max_running,
        "token_usage": used / largest,
        "cache_hit_rate": core.cached / core.prompted if core.prompted else 0.0,
    }
    return {"timestamp": datetime.now(UTC).isoformat(), "accelerator": None, "num_accelerators": 1, "loads": [load]}


def server_info(engine: Engine, options: EngineOptions) -> dict[str, Any]:
    """How the engine was set up, and its pool."""
    core = engine.core
    return {
        "model_path": options.model_path,
        "tokenizer_path": options.model_path,
        "served_model_name": options.model_path,
        "device": "cpu",
        "dtype": options.dtype,
        "context_length": core.context_length,
        "page_size": options.page_size,
        "max_running_requests": options.max_running,
        "max_total_num_tokens": core.scheduler.max_tokens,
        "max_req_input_len": core.context_length - 1,
        "chunked_prefill_size": options.chunk_size,
        "disable_radix_cache": False,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "weight_version": core.version,
        "internal_states": [{"weight_version": core.version, "is_paused": engine.paused}],
    }
