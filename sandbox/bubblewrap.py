"""Boxes of namespaces, made by bubblewrap: the default. Each has its own users, processes, network, files and limits; no daemon, no image.

In: specs; out: boxes that see /usr of the host, read-only, and nothing else of it. Waits for bwrap and the keeper.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from palestra.sandbox import bundle, seccomp
from palestra.sandbox.local import CONTROL_FD, FILES_FD, LaunchPlan, LocalBackend, Place, cgroup_levels
from palestra.sandbox.types import MIB, BackendName, BoxSpec, Enforced, Mount, SandboxUnavailableError

PACKAGES = "/opt/packages"
UID = 1000
"""Of all that runs in a box, as it sees itself; out here it is somebody else."""
NAMES = b"root:x:0:0:root:/:/usr/sbin/nologin\nbox:x:1000:1000:box:/workspace:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
GROUPS = b"root:x:0:\nbox:x:1000:\nnogroup:x:65534:\n"
HOSTS = b"127.0.0.1 localhost box\n::1 localhost\n"
SHARED_MEMORY = 16 * MIB
"""Most bytes in /dev/shm."""
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
OPEN_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
INSTALL = "install bubblewrap 0.6 or newer (apt-get install bubblewrap, dnf install bubblewrap)"


class Bubblewrap(LocalBackend):
    """`types.Backend` on user namespaces."""

    name: BackendName = "bubblewrap"

    def __init__(self, *, bwrap: str = "bwrap", python: str = "/usr/bin/python3") -> None:
        """`bwrap` and `python` are programs; the latter has to be below /usr, where boxes find it too."""
        super().__init__(python=python)
        self._wanted = bwrap
        self._bwrap = ""
        self._options: frozenset[str] = frozenset()
        self._filter = b""

    async def prepare(self) -> None:
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        """Finds bwrap and the interpreter, and what they can."""
        found = shutil.which(self._wanted)
        if found is None:
            raise SandboxUnavailableError(f"bubblewrap: no program {self._wanted}; {INSTALL}")
        self._bwrap = os.path.abspath(found)
        if not self.python.startswith("/usr/") or not os.path.exists(self.python):
            raise SandboxUnavailableError(
                f"bubblewrap: {self.python} must be an interpreter below /usr; install the system's python3"
            )
        self._options = _options(self._bwrap)
        if missing := {"--size", "--perms", "--as-pid-1", "--seccomp"} - self._options:
            raise SandboxUnavailableError(f"{self._bwrap} does not know {', '.join(sorted(missing))}; {INSTALL}")
        try:
            self._filter = seccomp.program()
        except ValueError as error:
            raise SandboxUnavailableError(f"bubblewrap: {error}") from None
        bundle.compiled(self.python)

    async def plan(self, spec: BoxSpec, place: Place) -> LaunchPlan:
        if spec.image is not None:
            raise SandboxUnavailableError(
                f"bubblewrap has no images (asked for {spec.image}): boxes see the host's own /usr; take docker"
            )
        mounts = [Mount(await self.reach(mount.source), mount.target) for mount in spec.mounts]
        if spec.packages is not None:
            mounts.append(Mount(await self.reach(spec.packages), PACKAGES))
        return LaunchPlan(
            argv=(self._bwrap, *self._namespaces(), *self._files(spec, mounts), *self._environment(), *self._program()),
            agent=bundle.compiled(self.python),
            mode="namespace",
            packages=PACKAGES if spec.packages is not None else None,
            files=(self._filter, NAMES, GROUPS, HOSTS),
        )

    def _namespaces(self) -> list[str]:
        nested = ["--disable-userns"] if "--disable-userns" in self._options else []
        return [
            *("--unshare-user", "--unshare-all", *nested, "--uid", str(UID), "--gid", str(UID), "--hostname", "box"),
            *("--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--seccomp", str(FILES_FD)),
        ]

    def _files(self, spec: BoxSpec, mounts: list[Mount]) -> list[str]:
        limits = spec.limits
        args = ["--ro-bind", "/usr", "/usr"]
        for path in SYSTEM:
            if os.path.islink(path):
                args += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                args += ["--ro-bind", path, path]
        args += ["--perms", "0755", "--dir", "/etc"]
        for path in OPEN_ETC:
            args += ["--ro-bind-try", path, path]
        for number, name in enumerate(("passwd", "group", "hosts"), FILES_FD + 1):
            args += ["--perms", "0444", "--file", str(number), f"/etc/{name}"]
        args += ["--proc", "/proc", "--dev", "/dev"]
        for size, mode, path in (
            (limits.disk_bytes, "1777", "/tmp"),
            (limits.disk_bytes, "0755", "/workspace"),
            (min(limits.disk_bytes, SHARED_MEMORY), "1777", "/dev/shm"),
        ):
            args += ["--size", str(size), "--perms", mode, "--tmpfs", path]
        for mount in mounts:
            args += ["--ro-bind", mount.source, mount.target]
        # What bwrap made belongs to the box's user: both would be disks without a limit.
        return [*args, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/workspace"]

    def _environment(self) -> list[str]:
        return ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]

    def _program(self) -> list[str]:
        return ["--", *bundle.command(self.python, CONTROL_FD, CONTROL_FD)]

    def levels(self) -> Enforced:
        levels, notes = cgroup_levels(self.ground)
        return Enforced(**levels, notes=tuple(notes))

    def explain(self, said: str) -> str:
        if not any(
            mark in said for mark in ("namespace", "uid map", "Operation not permitted", "Permission denied", "clone")
        ):
            return ""
        return f"User namespaces may be refused to this user here: {_refusals()}. Another backend is landlock"


def _options(bwrap: str) -> frozenset[str]:
    """What this bwrap knows.

    Raises:
        SandboxUnavailableError: it does not run.
    """
    try:
        done = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=30, env={}, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(f"{bwrap} cannot be run: {error}; {INSTALL}") from error
    return frozenset(word for word in (done.stdout + done.stderr).split() if word.startswith("--"))


REFUSING = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "an AppArmor profile for bwrap, or sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""Settings by which a machine refuses user namespaces: the file, its refusing value, and what allows them."""


def _refusals() -> str:
    found = [
        f"{path} is {value}; {remedy}"
        for path, (value, remedy) in REFUSING.items()
        if os.path.exists(path) and Path(path).read_text().strip() == value
    ]
    return " and ".join(found) or (
        "no sysctl says so, so it is a container's seccomp or AppArmor profile (docker: --security-opt seccomp=unconfined)"
    )
