"""What the fields of `[rollout]` cannot be together. Pure.

In: values of the section. Out: findings, under the codes of `palestra plan`. The section's validators refuse a run by the first of them;
the planner, whose section has more fields, shows all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palestra.envs.findings import Finding, Severity

ONLY_SGLANG = (
    "engines", "gpus_per_engine", "ep", "dp", "dp_attention", "mem_fraction", "kv_dtype", "ssm_dtype", "state_ratio",
    "state_slots_pin", "state_strategy", "prefix_cache", "attention_backend", "deterministic", "hicache", "hicache_ratio",
    "weight_dtype", "conv_dtype", "pd", "router", "router_policy", "topology", "urls", "router_url", "agents", "agent_token_file",
    "environment", "device",
)  # fmt: skip
"""Fields of `[rollout]` that the embedded engine has no use for."""
ONLY_EMBEDDED = ("threads", "forced_ids")


def idle_fields(engine: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Finding]:
    """P428: fields that were given, are not what they are by default, and that this engine has no use for."""
    names = {"embedded": ONLY_SGLANG, "sglang": ONLY_EMBEDDED}.get(engine, ())
    other = "sglang" if engine == "embedded" else "embedded"
    for name in names:
        if name in given and given[name] != defaults.get(name):
            message = f'rollout.{name} needs rollout.engine = "{other}"'
            yield Finding("P428", Severity.ERROR, f"rollout.{name}", message, suggest={f"rollout.{name}": None})


def split_sizes(**kinds: tuple[int, int]) -> Iterator[Finding]:
    """P408: GPUs that are no whole number of engines. `kinds`: prefill and decode, each all its GPUs and those of one engine."""
    for kind, (gpus, each) in kinds.items():
        if gpus % each:
            message = f"rollout.pd: {gpus} {kind}_gpus are no multiple of {kind}_gpus_per_engine {each}"
            yield Finding("P408", Severity.ERROR, "rollout.pd", message)


def two_sources(given: Mapping[str, Any], *, topology: bool, split: bool, external: bool) -> Iterator[Finding]:
    """P409: more than one field says which engines there are. `given`: fields of the section that are not at their defaults."""
    for name in ("engines", "gpus_per_engine", "pd", "urls"):
        if topology and name in given:
            yield _source(f"rollout.{name} and rollout.topology both say which engines there are; give one")
    if split and external:
        yield _source(
            "rollout.pd is of engines that are started here, and rollout.urls of those that run already; give one"
        )


def no_router(router: str, engines: int, split: bool) -> Iterator[Finding]:
    """P433: several engines, and nothing that spreads requests over them."""
    if router == "none" and (engines > 1 or split):
        yield Finding("P433", Severity.ERROR, "rollout.router", 'rollout.router = "none" is for one engine')


def experts_dropped(router: str, routed: bool) -> Iterator[Finding]:
    """P422: the experts of each token are asked for, through a router that drops the question."""
    if routed and router == "sglang-router":
        yield Finding(
            "P422",
            Severity.ERROR,
            "rollout.router",
            "sglang-router drops return_routed_experts from requests: the experts of each token would not come back",
            'use rollout.router = "smg", or one engine with rollout.router = "none"',
            {"rollout.router": "smg"},
        )


def not_default(values: Mapping[str, Any], defaults: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of `names` whose values are not their defaults."""
    return {name: values[name] for name in names if name in values and values[name] != defaults.get(name)}


def _source(message: str) -> Finding:
    return Finding("P409", Severity.ERROR, "rollout.pd", message)
