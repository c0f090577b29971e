"""What the agent asks of the kernel: staying unreadable, ending what others started, and being a good ancestor.

In: process ids. Out: nothing is left running. Waits only for processes that were killed.
"""

from __future__ import annotations

import errno
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

NAMESPACE, DOMAIN, TREE = "namespace", "domain", "tree"
"""How all but the agent is found: it is process 1 of a namespace; it is in a Landlock domain that signals do not leave; by walking the
tree of processes, which code can run away from."""

PASSES, PROBABLE = 20, 65536
"""How often, and how far in numbers, processes are looked for that /proc does not show."""

RLIMITS = {
    "file_bytes": 1,
    "core_bytes": 4,
    "pids": 6,
    "open_files": 7,
    "address_bytes": 9,
}
"""Linux's numbers of limits, on x86 and Arm. (The module `resource` has them too, and takes a tenth of a box's start to load.)"""


NESTED = False
"""Whether each run is put into a Landlock domain of its own, below the agent's: it can signal neither the agent nor other runs."""


def prctl(option: int, value: int) -> None:
    """One call of prctl(2).

    Raises:
        OSError: the kernel refuses.
    """
    if _call("prctl", option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) was refused")


def nest() -> None:
    """Puts this process into a Landlock domain of its own, whose signals and abstract sockets do not leave it.

    Raises:
        OSError: the kernel refuses.
    """
    ruleset = _call("syscall", 444, bytes(16) + (3).to_bytes(8, sys.byteorder), 24, 0)
    if ruleset < 0 or _call("syscall", 446, ruleset, 0) != 0:
        raise OSError("a Landlock domain for the run was refused")
    os.close(ruleset)


def _call(name: str, *args: int | bytes) -> int:
    """Calls a function of the C library."""
    import _ctypes  # ctypes itself is a tenth of a box's start

    itself: Any = None
    return int(_ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(itself, 0), name), args))


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
    """Sets resource limits of this process and what it will start; names as in `RLIMITS`. A limit that is lower already stays."""
    for name, value in {"core_bytes": 0, **limits}.items():
        # Refused is only what would raise a limit.
        _call("setrlimit", RLIMITS[name], 2 * value.to_bytes(8, sys.byteorder))


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


def cpu_of(pid: int) -> float:
    """Seconds that a process and the children it collected have computed; without /proc, itself alone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        try:
            return time.clock_gettime((~pid << 3) | 2)  # the kernel's name for a process's clock
        except OSError:  # it ended
            return 0.0


def session_of(pid: int) -> int:
    """The process that began the (kernel's) session that a process is in; 0 where it ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def below(roots: set[int], tree: dict[int, int]) -> set[int]:
    """`roots` and all their descendants."""
    found = set(roots)
    grew = True
    while grew:
        more = {pid for pid, parent in tree.items() if parent in found} - found
        grew = bool(more)
        found |= more
    return found


COUNTED = {
    "oom": (("memory/memory.oom_control", b"oom_kill"), ("memory.events", b"oom_kill")),
    "pids": (("pids/pids.events", b"max"), ("pids.events", b"max")),
    "peak": (("memory/memory.max_usage_in_bytes", b""), ("memory.peak", b"")),
}
"""By version of cgroups: the file, and the name before the number."""


class Cgroup:
    """What the box's own cgroup counted, as it is seen in here; for boxes whose cgroup nobody out there can read. What has no file counts
    nothing."""

    def __init__(self, root: str = "/sys/fs/cgroup") -> None:
        self.files: dict[str, tuple[int, bytes]] = {}
        for name, places in COUNTED.items():
            for path, key in places:
                if os.path.exists(f"{root}/{path}"):
                    self.files[name] = os.open(f"{root}/{path}", os.O_RDONLY | os.O_CLOEXEC), key
                    break
        self.before = self._read()

    def begin(self) -> None:
        """A run begins: counts are from here on."""
        self.before = self._read()

    def since(self) -> dict[str, int]:
        """What was counted since then; the peak is the box's since it began."""
        return {name: value - self.before[name] if name != "peak" else value for name, value in self._read().items()}

    def _read(self) -> dict[str, int]:
        found = {}
        for name, (fd, key) in self.files.items():
            words = os.pread(fd, 4096, 0).split()
            found[name] = int(words[words.index(key) + 1 if key else 0])
        return found


class Reaper:
    """Ends processes and collects what they leave. Exit statuses of `watched` ones, and the seconds they computed, are kept in `ended`
    until somebody takes them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: set[int] = set()
        self.ended: dict[int, tuple[int, float]] = {}
        self.cpu_s = 0.0
        self.collected = 0

    def collect(self, *, wait: bool = False) -> bool:
        """Collects children that ended; with `wait`, until there is none left. Whether any child is left."""
        while True:
            try:
                pid, status, used = os.wait4(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._note(pid, status, used.ru_utime + used.ru_stime)

    def take(self, pid: int) -> tuple[int, float]:
        """The exit status of a watched process, and the seconds it computed; ends it first if need be."""
        if pid not in self.ended:
            os.kill(pid, signal.SIGKILL)
            self._collect_one(pid)
        return self.ended.pop(pid)

    def gone(self, pid: int) -> bool:
        """Whether a watched process has ended."""
        if pid in self.ended:
            return True
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill_all(self) -> None:
        """Ends everything but the agent."""
        if self.mode == TREE:
            self._kill_but(set())
            return
        if self.collect():  # somebody is there
            # The kernel signals all at once and refuses forks to who has a deadly signal: nobody gets away.
            os.kill(-1, signal.SIGKILL)
            self.collect(wait=True)

    def present(self) -> set[int]:
        """What runs in the box beside the agent; empty where /proc cannot be read."""
        try:
            tree = parents()
        except OSError:
            return set()
        return self._mine(tree)

    def kill_job(self, pid: int, leaders: set[int], older: set[int]) -> None:
        """Ends a job and what began since, but not what is of the sessions `leaders` or descends from `older`."""
        if not leaders:
            self.kill_all()
        elif self.mode == DOMAIN:
            self._kill_since(pid, leaders)
        else:
            self._kill_but(leaders | older)

    def kill_session(self, leader: int, others: set[int]) -> None:
        """Ends a session and strays, but nothing of the sessions or jobs `others`. One that left its session and its parents is nobody's,
        so it is a stray."""
        if not others:
            self.kill_all()
        elif self.mode == DOMAIN:
            self._kill_since(leader, others)
        else:
            self._kill_but(others | {pid for pid in self.present() if session_of(pid) in others})

    def _mine(self, tree: dict[int, int]) -> set[int]:
        me = os.getpid()
        return (below({me}, tree) if self.mode == TREE else set(tree)) - {me, 1}

    def _kill_but(self, kept: set[int]) -> None:
        """Ends everything but the agent, `kept` and what descends from those."""
        me = os.getpid()
        clean = 0
        # A process whose parent ends while /proc is read can be missed, so it is read once more when nobody was found.
        while clean < 2:
            tree = parents()
            mine = self._mine(tree)
            strangers = mine - below(kept & mine, tree)
            strangers -= {pid for pid in strangers if self._over(pid, tree)}
            clean = 0 if strangers else clean + 1
            for pid in strangers:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for pid in strangers:
                if tree.get(pid) == me:
                    self._collect_one(pid)
        self.collect()

    def _kill_since(self, first: int, kept: set[int]) -> None:
        """Where /proc cannot be read: ends what got a number since `first` did, except in the sessions of `kept`. Only for a domain that
        signals do not leave: others' processes have such numbers too."""
        me = os.getpid()
        for _ in range(PASSES):
            numbers = range(first, _newest() + 1)
            if len(numbers) == 0:  # numbers began anew meanwhile
                numbers = range(2, first + PROBABLE)
            found = False
            for pid in numbers:
                sid = session_of(pid)
                if sid == 0 or sid in kept or pid in kept or pid == me:
                    continue
                try:
                    os.kill(pid, signal.SIGKILL)
                    found = True
                except OSError:  # outside of the domain, or gone
                    continue
            self.collect()
            if not found:
                return

    def _over(self, pid: int, tree: dict[int, int]) -> bool:
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
        self._note(pid, status, used.ru_utime + used.ru_stime)

    def _note(self, pid: int, status: int, cpu_s: float) -> None:
        self.cpu_s += cpu_s
        self.collected += 1
        if pid in self.watched:
            self.watched.discard(pid)
            self.ended[pid] = status, cpu_s


def _newest() -> int:
    """A process number that was given out just now."""
    try:
        pid = os.fork()
    except OSError:  # no more processes are allowed: the numbers that can be in use are not known, so many are tried
        return os.getpid() + PROBABLE
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
