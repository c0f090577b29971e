"""What the agent asks of the kernel: staying unreadable, ending what others started, and being a good ancestor.

In: process ids. Out: nothing is left running. Waits only for processes that were killed.
"""

from __future__ import annotations

import errno
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

NAMESPACE, DOMAIN, TREE = "namespace", "domain", "tree"
"""How all but the agent is found: it is process 1 of a namespace; it is in a Landlock domain that signals do not leave; by walking the
tree of processes, which code can run away from."""

RLIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "file_bytes": resource.RLIMIT_FSIZE,
    "pids": resource.RLIMIT_NPROC,
    "address_bytes": resource.RLIMIT_AS,
}


def prctl(option: int, value: int) -> None:
    """One call of prctl(2).

    Raises:
        OSError: the kernel refuses.
    """
    import _ctypes  # ctypes itself is a tenth of a box's start

    itself: Any = None
    address = _ctypes.dlsym(_ctypes.dlopen(itself, 0), "prctl")
    if _ctypes.call_function(address, (option, value, 0, 0, 0)) != 0:
        raise OSError(f"prctl({option}, {value}) was refused")


def become_ancestor(mode: str) -> None:
    """Makes the agent the parent of every orphan and unreadable to the others, and makes sure that `mode` is safe to use.

    Raises:
        RuntimeError: signals of this process would reach others than the box's.
    """
    prctl(PR_SET_DUMPABLE, 0)
    if mode == NAMESPACE:
        if os.getpid() != 1:
            raise RuntimeError("the agent is not process 1 of a namespace of its own")
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if mode == DOMAIN:
        try:
            os.kill(os.getppid(), 0)
        except PermissionError:
            return
        raise RuntimeError("the agent can signal processes outside of its domain")


def limit(limits: dict[str, int]) -> None:
    """Sets resource limits of this process and what it will start; names as in `RLIMITS`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in limits.items():
        kind = RLIMITS[name]
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


def parents() -> dict[int, int]:
    """Parent of each process that /proc shows."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
    return found


def below(roots: set[int], tree: dict[int, int]) -> set[int]:
    """`roots` and all their descendants."""
    found = set(roots)
    grew = True
    while grew:
        more = {pid for pid, parent in tree.items() if parent in found} - found
        grew = bool(more)
        found |= more
    return found


class Reaper:
    """Ends processes and collects what they leave. Exit statuses of `watched` ones are kept in `ended` until somebody takes them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: set[int] = set()
        self.ended: dict[int, int] = {}
        self.cpu_s = 0.0

    def collect(self, *, wait: bool = False) -> bool:
        """Collects children that ended; with `wait`, until there is none left. Whether any child is left."""
        while True:
            try:
                pid, status, used = os.wait4(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.cpu_s += used.ru_utime + used.ru_stime
            if pid in self.watched:
                self.watched.discard(pid)
                self.ended[pid] = status

    def kill_all(self) -> None:
        """Ends everything but the agent."""
        if self.mode == TREE:
            self.kill_but(set(), set())
            return
        if self.collect():  # somebody is there
            # The kernel signals all at once and refuses forks to who has a deadly signal: nobody gets away.
            os.kill(-1, signal.SIGKILL)
            self.collect(wait=True)

    def kill_but(self, leaders: set[int], older: set[int]) -> None:
        """Ends everything but the agent, what descends from `leaders`, and what is in `older`."""
        me = os.getpid()
        while True:
            tree = parents()
            mine = below({me}, tree) if self.mode == TREE else set(tree)
            strangers = mine - below(leaders, tree) - older - {me, 1}
            strangers -= {pid for pid in strangers if self._gone(pid, tree)}
            if not strangers:
                self.collect()
                return
            for pid in strangers:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for pid in strangers:
                if tree.get(pid) == me:
                    self._collect_one(pid)

    def _gone(self, pid: int, tree: dict[int, int]) -> bool:
        """Whether it has ended, and only waits for a parent that lives to notice."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESRCH)
        return state in (b"Z", b"X") and tree.get(pid) != os.getpid()

    def _collect_one(self, pid: int) -> None:
        try:
            _, status, used = os.wait4(pid, 0)
        except ChildProcessError:
            return
        self.cpu_s += used.ru_utime + used.ru_stime
        if pid in self.watched:
            self.watched.discard(pid)
            self.ended[pid] = status
