"""The two requests that make a box: to the keeper, which starts its first program, and to its agent. Waits for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra.sandbox import bundle
from palestra.sandbox.types import MIB, BoxSpec

if TYPE_CHECKING:
    from palestra.sandbox.local import Ground, LaunchPlan, Place


def spawn_request(spec: BoxSpec, place: Place, plan: LaunchPlan, ground: Ground) -> dict[str, Any]:
    """What the keeper is asked."""
    limits = spec.limits
    grouped = plan.cgroup and plan.bounded and bool(ground.cgroup)
    return {
        "op": "spawn", "box": place.number, "mode": plan.mode, "argv": plan.argv, "files": plan.files,
        "own_user": int(plan.own_user), "folder": int(plan.folder), "confine": plan.confine,
        "limits": {"memory": limits.memory_bytes, "pids": limits.pids, "cpus": limits.cpus} if grouped else None,
        "watch": limits.memory_bytes if plan.bounded and not grouped else 0,
    }  # fmt: skip


def setup_request(spec: BoxSpec, plan: LaunchPlan, ground: Ground) -> dict[str, Any]:
    """What the agent is asked first."""
    limits = {"open_files": spec.limits.open_files, "file_bytes": spec.limits.file_bytes}
    controllers = ground.controllers if plan.cgroup else frozenset()
    own_count = plan.mode == "namespace" or (ground.root and plan.own_user)
    if plan.bounded and "pids" not in controllers and own_count:
        limits["pids"] = spec.limits.pids
    if plan.bounded and "memory" not in controllers:
        # Address space is not memory: numpy alone maps several times what it uses.
        limits["address_bytes"] = 4 * spec.limits.memory_bytes + 1024 * MIB
    env = bundle.environment((*plan.env, *spec.env), plan.home)
    return {
        "op": "setup", "mode": plan.mode, "limits": limits, "preload": list(spec.preload), "packages": plan.packages,
        "env": env, "home": plan.home, **dict(plan.setup),
    }  # fmt: skip
