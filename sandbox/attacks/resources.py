"""Probes that take more than is given: memory, processes, disk, descriptors, output, time."""

from __future__ import annotations

from dataclasses import replace

from palestra.sandbox.attacks.judges import bounded, fails, stopped, untried
from palestra.sandbox.attacks.types import BOUNDS, Attack, Judged, Seen
from palestra.sandbox.types import MIB

_ONE_PIECE = """
held = 0
pieces = []
try:
    while held < 1024:
        pieces.append(b"x" * (8 << 20)); held += 8
        tell("held", held)
except MemoryError:
    pieces.clear()
    tell("refused", "ENOMEM")
"""

_FORKED = """
ready, answer = os.pipe()
children = []
for number in range(8):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        try:
            held = b"x" * (60 << 20)
        except MemoryError:
            os._exit(1)
        os.write(answer, b"h")
        time.sleep(30)
        os._exit(0)
    children.append(pid)
os.close(answer)
time.sleep(1.5)
alive = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
os.set_blocking(ready, False)
try:
    held = len(os.read(ready, 100))
except BlockingIOError:
    held = 0
tell("held", min(held, len(alive)))
"""

# At most 512 processes, so that it ends nothing where nothing holds it.
_FORK_BOMB = """
for _ in range(9):
    try:
        os.fork()
    except OSError:
        pass
while True:
    pass
"""

_PROCESSES = """
made = 0
try:
    while made < 400:
        if os.fork() == 0:
            linger()
        made += 1
except OSError as error:
    tell("refused", word(error))
tell("made", made)
"""

_THREADS = """
import threading
made, hold = 0, threading.Event()
try:
    while made < 400:
        threading.Thread(target=hold.wait, daemon=True).start()
        made += 1
except RuntimeError:
    tell("refused", "EAGAIN")
tell("made", made)
"""

_DESCRIPTORS = """
made = []
try:
    while len(made) < 5000:
        made.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    tell("refused", word(error))
tell("made", len(made))
for fd in made:
    os.close(fd)
"""

_FILL = """
def fill(place):
    written = 0
    piece = b"x" * (1 << 20)
    try:
        for number in range(8):
            path = os.path.join(place, "fill-%d" % number)
            with open(path, "wb", buffering=0) as file:
                for _ in range(8):
                    written += file.write(piece)
    except OSError as error:
        tell("refused", word(error))
    tell("written", written)
    for number in range(8):
        try:
            os.unlink(os.path.join(place, "fill-%d" % number))
        except OSError:
            continue
"""

# An inode costs the kernel about 1 KiB, which counts as the box's memory where the files lie in memory.
_INODES = """
made = 0
try:
    for made in range(45000):
        os.close(os.open("inode-%d" % made, os.O_WRONLY | os.O_CREAT))
        if made % 5000 == 0:
            tell("made", made)
except OSError as error:
    tell("refused", word(error))
tell("made", made)
"""

_SPARSE = """
attempt("sparse", lambda: os.truncate(os.open("sparse", os.O_RDWR | os.O_CREAT), 1 << 40))
tell("size", os.stat("sparse").st_size)
"""

_LIFTED = """
import resource
for name in ("NOFILE", "FSIZE", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:
        tell(name, "EPERM")
    except OSError as error:
        tell(name, word(error))
    else:
        tell(name, "DONE" if resource.getrlimit(kind)[1] == resource.RLIM_INFINITY else "EPERM")
attempt("nice", lambda: os.nice(-5))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
"""

_OUTPUT = """
while True:
    os.write(1, b'y' * 4096)
"""

_SPIN = """
for _ in range(3):
    os.fork()
while True:
    pass
"""


def _filled(place: str, name: str) -> Attack:
    code = f"{_FILL}\nfill({place})"
    return Attack(f"fill {name}", f"writes 64 MiB to {name}", "disk", code, bounded("written", "disk_bytes", 1.1))


def _inodes(seen: Seen) -> Judged:
    detail = f"made {seen.said.get('made')}; {seen.result.status} {seen.result.message}"
    if not seen.usable:
        return Judged("ESCAPED", "the box was lost", detail)
    if int(seen.said.get("made", "0")) > 40_000:
        return Judged("ESCAPED", "as many as it wanted", detail)
    good = seen.result.status == "oom" or "refused" in seen.said
    return Judged("contained", "stopped", detail) if good else untried(seen)


def _cpu(seen: Seen) -> Judged:
    used = seen.result.usage.cpu_s / max(seen.result.usage.wall_s, 0.1)
    detail = f"{used:.2f} cores of {seen.limits.cpus}"
    if seen.result.status != "timeout":
        return untried(seen)
    if used > seen.limits.cpus * 1.6 or not seen.usable:
        return Judged("ESCAPED", "more than its share", detail)
    return Judged("contained", "held to its share", detail)


ATTACKS = (
    Attack("1 GiB", "allocates and touches 1 GiB", "memory", _ONE_PIECE, bounded("held", "memory_bytes", unit=MIB)),
    Attack("forked memory", "8 processes of 60 MiB", "memory", _FORKED, bounded("held", "memory_bytes", unit=60 * MIB)),
    Attack("fork bomb", "forks without end", "pids", _FORK_BOMB, stopped("timeout", "pids"), timeout=1.0),
    Attack("many processes", "starts 400 processes", "pids", _PROCESSES, bounded("made", "pids")),
    Attack("many threads", "starts 400 threads", "pids", _THREADS, bounded("made", "pids")),
    Attack("descriptors", "opens 5000 files", "memory", _DESCRIPTORS, bounded("made", "open_files")),
    _filled("os.getcwd()", "/workspace"),
    _filled("'/tmp'", "/tmp"),
    _filled("'/dev/shm'", "/dev/shm"),
    Attack(
        "inodes",
        "makes 45,000 empty files",
        "disk",
        _INODES,
        _inodes,
        timeout=30.0,
        limits=replace(BOUNDS, memory_bytes=32 * MIB),
    ),
    Attack("sparse file", "makes a file of 1 TiB", "disk", _SPARSE, bounded("size", "file_bytes")),
    Attack("endless output", "writes without end", "memory", _OUTPUT, stopped("output_limit")),
    Attack("endless loop", "runs without end", "cpu", "while True: pass", stopped("timeout"), timeout=0.5),
    Attack(
        "CPU share",
        "8 processes that compute, with half a core allowed",
        "cpu",
        _SPIN,
        _cpu,
        timeout=1.0,
        limits=replace(BOUNDS, cpus=0.5),
    ),
    Attack("limits lifted", "raises its own limits and priority", "processes", _LIFTED, fails),
)
