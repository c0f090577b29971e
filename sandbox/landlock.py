"""Boxes of Landlock, for machines that refuse user namespaces. No root of their own: code sees the host's /usr where it is, and one folder.

In: specs; out: boxes whose agent and code are in Landlock domains under filters of calls. What the kernel cannot hold this way is said by
`enforced`. Waits for the keeper.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from palestra.sandbox import bundle
from palestra.sandbox.keeper import confine
from palestra.sandbox.local import CONTROL_FD, LaunchPlan, LocalBackend, Place, cgroup_levels
from palestra.sandbox.types import BackendName, BoxSpec, Enforced, Level, SandboxUnavailableError

logger = logging.getLogger(__name__)

LEAST_ABI = 3
"""Before it, files outside of the box could be cut short (Linux 6.2)."""
SIGNALS_ABI = confine.SCOPES_SINCE
"""From here on signals stay in the box (Linux 6.12)."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
SOURCES = ("/dev/urandom", "/dev/random")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


class Landlock(LocalBackend):
    """`types.Backend` on Landlock."""

    name: BackendName = "landlock"

    def __init__(self, *, python: str = "/usr/bin/python3") -> None:
        """`python` has to be below /usr."""
        super().__init__(python=python)
        self._abi = 0

    async def prepare(self) -> None:
        self._abi = confine.abi()
        own_users = os.geteuid() == 0
        if self._abi < LEAST_ABI:
            have = f"version {self._abi}" if self._abi else "none (or it is not in the kernel's lsm= list)"
            raise SandboxUnavailableError(
                f"landlock: version {LEAST_ABI} is needed (Linux 6.2), this kernel has {have}"
            )
        if self._abi < SIGNALS_ABI and not own_users:
            raise SandboxUnavailableError(
                f"landlock: version {self._abi} of this kernel lets code signal all processes of this user; version {SIGNALS_ABI} "
                "(Linux 6.12) is needed, or to run as root, so that each box has a user of its own"
            )
        if not self.python.startswith("/usr/"):
            raise SandboxUnavailableError(f"landlock: {self.python} must be an interpreter below /usr")
        bundle.compiled(self.python)

    async def plan(self, spec: BoxSpec, place: Place) -> LaunchPlan:
        if spec.image is not None:
            raise SandboxUnavailableError(
                f"landlock has no images (asked for {spec.image}): boxes see the host's own /usr"
            )
        read = [*SYSTEM, *SOURCES]
        for mount in spec.mounts:
            reached = await self.reach(mount.source)
            if reached != mount.target:
                raise SandboxUnavailableError(
                    f"landlock mounts nothing: boxes can see {reached} there, not at {mount.target}; give the mount that target"
                )
            read.append(reached)
        packages = None
        if spec.packages is not None:
            packages = await self.reach(os.path.abspath(spec.packages))  # noqa: ASYNC240 - no disk is asked
            read.append(packages)
        home, temporary = place.folder + "/workspace", place.folder + "/tmp"
        wish: dict[str, Any] = {
            "abi": self._abi, "folders": [home, temporary], "write": [place.folder], "read": read, "devices": list(DEVICES),
            "shared_user": int(not self.ground.root), "pids": 0 if self._counted() else spec.limits.pids,
        }  # fmt: skip
        return LaunchPlan(
            argv=tuple(bundle.command(self.python, CONTROL_FD, CONTROL_FD)),
            agent=bundle.compiled(self.python),
            mode="domain",
            home=home,
            packages=packages,
            env=(("TMPDIR", temporary),),
            setup=(("nested", int(self._abi >= SIGNALS_ABI)), ("places", {"/workspace": home, "/tmp": temporary})),
            confine=wish,
            folder=True,
        )

    def _counted(self) -> bool:
        """Whether a box's processes are counted apart from others'."""
        return self.ground.root or "pids" in self.ground.controllers

    def levels(self) -> Enforced:
        levels, notes = cgroup_levels(self.ground)
        notes.append(
            "Disk space is not limited, only each file's size: a Landlock box writes to the host's disk, in a folder of its own."
        )
        notes.append(
            "Code can ask whether a path of the host exists, and its size and times, but neither list nor read it."
        )
        if not self._counted():
            levels["pids"] = "watched"
            notes.append("Processes are counted with all others of this user: run as root, or have a cgroup delegated.")
        if not self.ground.root:
            notes.append(
                "Code cannot change modes, owners or times of files by their path (chmod): this user's own could be meant."
            )
            notes.append(
                "Code can change modes and times of mounted files of this user, by opening them; not their content."
            )
        processes: Level = "kernel"
        if self._abi < SIGNALS_ABI:
            processes = "watched"
            notes.append(
                f"Code can end its own box, not others: signals within it are free before Landlock {SIGNALS_ABI} (Linux 6.12)."
            )
        return Enforced(**levels, processes=processes, disk="watched", notes=tuple(notes))

    def explain(self, said: str) -> str:
        if "Landlock" in said:
            return "The kernel has Landlock, but refuses it to this process: a container's seccomp profile may be in the way"
        return ""
