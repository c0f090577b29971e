"""Words of the sandbox: what is run, what comes back, what a backend promises. Loads nothing but the standard
library; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Status = Literal["ok", "nonzero", "timeout", "oom", "pids", "output_limit", "session_lost", "infra_error"]
"""How a run ended. All but `infra_error` are the code's own doing and count for the reward; `infra_error` is ours, is tried again, and
never counts (law 4).

ok             exit code 0
nonzero        another exit code, or a signal that was not ours
timeout        killed (or interrupted) at its deadline
oom            the kernel killed its main process for memory
pids           it failed after processes were refused to it
output_limit   killed for writing more than `Limits.total_output_bytes`
session_lost   the session's interpreter ended or can no longer be believed; open another
infra_error    the box was lost, or could not be had
"""

SessionKind = Literal["python", "bash"]
BackendName = Literal["bubblewrap", "docker", "landlock", "remote", "unsafe_subprocess"]

MIB = 1 << 20


class SandboxError(Exception):
    """The sandbox cannot do what was asked: root of this package's errors."""


class SandboxUnavailableError(SandboxError):
    """A backend cannot work on this machine; the text says what is missing and how to get it."""


class SandboxBusyError(SandboxError):
    """No box was free within the deadline, or a host's queue is full. Try later, or raise the number of boxes."""


class BoxLostError(SandboxError):
    """The box is gone (a fault of ours, not of the code in it): take another one. `exec` and its like say `infra_error` instead."""


class BoxProtocolError(SandboxError):
    """What came out of a box is not what its agent would say: code in it got at the channel. The box is dead."""


class BoxFileError(SandboxError):
    """A file in the box cannot be read or written: absent, no regular file, too large, no room."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the code in one box may use, all its processes together unless said otherwise."""

    memory_bytes: int = 256 * MIB
    """Memory of all processes, and of files in /tmp, /workspace and /dev/shm. Without a cgroup: of each process, and a watchdog on the sum.
    """
    pids: int = 64
    """Processes and threads at a time."""
    disk_bytes: int = 64 * MIB
    """Size of /workspace, and of /tmp, each."""
    file_bytes: int = 64 * MIB
    """Size of one file."""
    open_files: int = 256
    """Descriptors of one process."""
    output_bytes: int = 64 * 1024
    """Bytes kept of each stream of a run, from its beginning."""
    total_output_bytes: int = 16 * MIB
    """Bytes that a run may write to its streams before it is killed."""
    cpus: float = 1.0
    """CPU time per time, where a cgroup can hold it."""

    def __post_init__(self) -> None:
        for name in ("disk_bytes", "file_bytes", "open_files", "output_bytes", "total_output_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; it must be at least 1")
        if self.memory_bytes < 32 * MIB:
            raise ValueError(f"limits.memory_bytes is {self.memory_bytes}; an interpreter alone needs 32 MiB")
        if self.pids < 4:
            raise ValueError(f"limits.pids is {self.pids}; the box's own agent and a shell need 4")
        if self.cpus <= 0:
            raise ValueError(f"limits.cpus is {self.cpus}; it must be positive")
        if self.output_bytes > MAX_OUTPUT_BYTES:
            raise ValueError(f"limits.output_bytes is {self.output_bytes}; at most {MAX_OUTPUT_BYTES} are possible")


MAX_OUTPUT_BYTES = 4 * MIB
"""Most bytes of one stream that an answer can hold."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that boxes may read, such as a data set. Never writable."""

    source: str
    """Absolute path on the host (of a docker daemon: on the daemon's host)."""
    target: str
    """Absolute path in the box."""

    def __post_init__(self) -> None:
        for name, path in (("source", self.source), ("target", self.target)):
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"mount {name} {path!r}: give an absolute path without '..'")


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """What a box is like. Boxes of equal specs are interchangeable while nothing ran in them."""

    limits: Limits = field(default_factory=Limits)
    image: str | None = None
    """Image of the docker backend; None: its default one. Other backends have the host's own /usr and refuse an image."""
    mounts: tuple[Mount, ...] = ()
    preload: tuple[str, ...] = ()
    """Modules that the zygote has imported before it forks, such as numpy."""
    packages: str | None = None
    """A site-packages folder of the host that Python in the box imports from; it is mounted at /opt/packages."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables that everything in the box has, beside PATH, HOME and LANG."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run used."""

    wall_s: float = 0.0
    """From its start to the end of its main process, seconds. Waiting for a box or for its turn is not in it."""
    cpu_s: float = 0.0
    """User and system time of all processes that ended, seconds."""
    peak_bytes: int | None = None
    """Most memory that the box had at a time since its start; None where no cgroup counts it."""
    oom_kills: int = 0
    """Processes that the kernel killed for memory during the run, also where the main one went on."""
    refused_pids: int = 0
    """Processes that were refused for their number during the run."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of a run. Partial output is here whatever the status."""

    status: Status
    exit_code: int | None = None
    """Of the main process; None where it ended by a signal, or has not ended (a session's cell)."""
    signal: int | None = None
    """That ended the main process."""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Whether a stream had more than was kept of it."""
    bytes_total: int = 0
    """Bytes written to both streams, those not kept too."""
    usage: Usage = field(default_factory=Usage)
    message: str = ""
    """Of `timeout`, `session_lost`, `infra_error` and the like: what happened, in a line."""

    @property
    def text(self) -> str:
        """Both streams, stdout first, as UTF-8 with replacement characters."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a folder of the box."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    """Bytes, of a file."""
    mode: int = 0o644
    """Permissions."""
    target: str = ""
    """What a link names."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a box at a moment: /workspace and /tmp. Processes are not in it."""

    archive: bytes
    """A tar archive with paths from the root of the box."""


Level = Literal["kernel", "watched", "none"]
"""How a promise is kept: by the kernel at once; by a process of ours that looks now and then; not at all."""


@dataclass(frozen=True, slots=True)
class Enforced:
    """What a backend holds on this machine, as it stands, not as it could."""

    files: Level = "kernel"
    """Code sees no file of the host but those mounted for it."""
    network: Level = "kernel"
    """Code reaches no address, the host's loopback and abstract sockets included."""
    processes: Level = "kernel"
    """Nothing of a box outlives it, nor sees or signals processes outside."""
    memory: Level = "kernel"
    pids: Level = "kernel"
    disk: Level = "kernel"
    """`Limits.disk_bytes` holds; `watched`: only each file's size."""
    syscalls: Level = "kernel"
    """Calls that widen the kernel's attack surface are refused (seccomp)."""
    cpu: Level = "kernel"
    """`Limits.cpus` holds."""
    notes: tuple[str, ...] = ()
    """A sentence for each promise that is weaker than `kernel`: why, and what would make it whole."""

    def weaker(self) -> dict[str, Level]:
        """Promises that are not held by the kernel."""
        levels = {name: getattr(self, name) for name in PROMISES}
        return {name: level for name, level in levels.items() if level != "kernel"}


PROMISES = ("files", "network", "processes", "memory", "pids", "disk", "syscalls", "cpu")


class Session(Protocol):
    """An interpreter that keeps its state between runs. One run at a time; others wait their turn."""

    kind: SessionKind

    @property
    def alive(self) -> bool: ...

    async def run(self, code: str, *, timeout: float = 30.0, max_output: int | None = None) -> ExecResult:
        """Runs code. At `timeout` (seconds, from its start) the code is interrupted as by Ctrl-C; what does not give in is killed, and the
        session with it. Status and exit code are what the interpreter said: code that runs in it can lie about itself, so a verdict never
        comes from here (see `grading`)."""
        ...

    async def interrupt(self) -> None:
        """Ctrl-C to what runs now."""
        ...

    async def close(self) -> None:
        """Ends the interpreter and all that it started. Safe to call twice."""
        ...


class Box(Protocol):
    """One place to run code in, with files that last as long as it. Used by one episode."""

    id: str
    spec: BoxSpec

    @property
    def alive(self) -> bool: ...

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 30.0,
        max_output: int | None = None,
    ) -> ExecResult:
        """Runs a program (a list) or a line of shell (a text). It is over when its main process is; what that left running is killed,
        except what belongs to an open session."""
        ...

    async def run_python(
        self,
        code: str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        timeout: float = 30.0,
        max_output: int | None = None,
    ) -> ExecResult:
        """Runs code as `__main__` of an interpreter that nothing ran in before, forked from one that has loaded `BoxSpec.preload`."""
        ...

    async def open_session(self, kind: SessionKind) -> Session: ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, with the folders above it. Relative paths are below /workspace."""
        ...

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        """A regular file's content; links are not followed."""
        ...

    async def list(self, path: str = ".") -> list[Entry]: ...

    async def export(self, path: str = ".", *, max_bytes: int = 64 * MIB) -> bytes:
        """A tar archive of a folder."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def restore(self, snapshot: Snapshot) -> None: ...

    async def fork(self) -> Box:
        """Another box of the same spec with the same files."""
        ...

    async def kill_processes(self) -> None:
        """Kills all that runs in the box, sessions too; the files stay."""
        ...

    async def close(self) -> None:
        """Destroys the box. Returns when its processes are gone. Safe to call twice."""
        ...


class Backend(Protocol):
    """A way to make boxes on this machine (or, `remote`, on others)."""

    name: BackendName

    async def start(self) -> None:
        """Once, before `create`.

        Raises:
            SandboxUnavailableError: it cannot work here.
        """
        ...

    def enforced(self) -> Enforced:
        """What it holds here; known after `start`."""
        ...

    async def create(self, spec: BoxSpec) -> Box:
        """A box that nothing ran in.

        Raises:
            SandboxUnavailableError: this spec cannot be had from this backend.
            SandboxBusyError: no room now.
        """
        ...

    async def reap(self) -> int:
        """Removes what a former process of ours, killed, left behind on this machine; how many boxes that were. Never touches boxes of a
        process that lives."""
        ...

    async def close(self) -> None:
        """Destroys all boxes. Safe to call twice."""
        ...
