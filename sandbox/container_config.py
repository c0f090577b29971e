"""What a box is for a container engine: the body of its create call, and what the engine says that it holds.

In: a spec; the engine's own description of itself. Out: JSON of the Engine API, version 1.41 and newer, and `Enforced`. Pure: loads no SDK,
waits for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from palestra.sandbox import bundle
from palestra.sandbox.types import MIB, BoxSpec, Enforced, Level

HOME, PACKAGES = "/workspace", "/opt/packages"
USER = 1000
"""User and group in the box. No process limit of the user is set: other boxes' processes would count, for they have the same one."""
AGENT_FILES = 256
"""Descriptors that the agent itself may need."""
SHM_BYTES = 16 * MIB
INODES = 32768
"""Files of a tmpfs: its names cost the kernel memory, too."""
OOM_SCORE = 500
"""When the whole machine runs out of memory, boxes end before services do; code in them sets 1000 on itself."""


def body(
    spec: BoxSpec,
    *,
    image: str,
    python: str,
    labels: Mapping[str, str],
    seccomp: Mapping[str, Any] | None,
    runtime: str | None,
) -> dict[str, Any]:
    """The create call of a box whose first process is the agent, on its standard streams. The engine removes it when that ends, and it
    ends when nobody is attached any more."""
    return {
        "Image": image,
        # Not a command: an image's own entry point must not run.
        "Entrypoint": bundle.command(python, 0, 1),
        "Cmd": [],
        "User": f"{USER}:{USER}",
        "Hostname": "box",
        "WorkingDir": HOME,
        "Labels": dict(labels),
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": True,
        # An image's own check would start processes beside the agent.
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": {**_confinement(seccomp), **_limits(spec), **({"Runtime": runtime} if runtime else {})},
    }


def _confinement(seccomp: Mapping[str, Any] | None) -> dict[str, Any]:
    security = ["no-new-privileges"]
    if seccomp is not None:
        security.append("seccomp=" + json.dumps(seccomp))
    return {
        "AutoRemove": True,
        "RestartPolicy": {"Name": "no"},
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "CapDrop": ["ALL"],
        "SecurityOpt": security,
        "ReadonlyRootfs": True,
        "LogConfig": {"Type": "none", "Config": {}},
        "Init": False,
        "OomScoreAdj": OOM_SCORE,
    }


def _limits(spec: BoxSpec) -> dict[str, Any]:
    limits = spec.limits
    files = max(limits.open_files, AGENT_FILES)
    size = f"size={limits.disk_bytes},nr_inodes={INODES},nosuid,nodev,exec"
    binds = [(mount.source, mount.target) for mount in spec.mounts]
    if spec.packages is not None:
        binds.append((spec.packages, PACKAGES))
    return {
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "PidsLimit": limits.pids,
        "NanoCpus": int(limits.cpus * 1e9),
        "ShmSize": min(limits.disk_bytes, SHM_BYTES),
        "Tmpfs": {"/tmp": f"{size},mode=1777", HOME: f"{size},mode=0755,uid={USER},gid={USER}"},
        "Ulimits": [
            {"Name": "nofile", "Soft": files, "Hard": files},
            {"Name": "fsize", "Soft": limits.file_bytes, "Hard": limits.file_bytes},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "Mounts": [
            {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True, "BindOptions": {"Propagation": "rprivate"}}
            for source, target in binds
        ],
    }  # fmt: skip


def setup(spec: BoxSpec, *, counts_itself: bool) -> dict[str, Any]:
    """The agent's first request."""
    limits = spec.limits
    return {
        "op": "setup",
        "mode": "namespace",
        "limits": {"open_files": limits.open_files, "file_bytes": limits.file_bytes},
        "preload": list(spec.preload),
        # Also an image may have packages there.
        "packages": PACKAGES,
        "env": bundle.environment(spec.env, HOME),
        "home": HOME,
        "cgroup": int(counts_itself),
    }


def enforced(info: Mapping[str, Any], *, filtered: bool) -> Enforced:
    """What this engine holds, by its own words; `filtered`: whether a process in a box was seen to run under a system call filter."""
    notes = []
    levels: dict[str, Level] = {}
    for promise, flags, what in (
        ("memory", ("MemoryLimit",), "limits of memory"),
        ("pids", ("PidsLimit",), "limits of processes"),
        ("cpu", ("CpuCfsQuota", "CpuCfsPeriod"), "limits of CPU time"),
    ):
        held = all(info.get(flag) for flag in flags)
        levels[promise] = "kernel" if held else "none"
        if not held:
            notes.append(f"{promise}: this engine has no {what} (info says so): give it a cgroup controller for them.")
    if levels["memory"] == "kernel" and not info.get("SwapLimit") and str(info.get("CgroupVersion", "1")) == "1":
        notes.append("memory: swap is not limited on this engine's host: boot it with swapaccount=1, or without swap.")
    levels["syscalls"] = "kernel" if filtered else "none"
    if not filtered:
        notes.append("syscalls: this engine runs containers without seccomp: use one that is built with it.")
    return Enforced(**levels, notes=tuple(notes))
