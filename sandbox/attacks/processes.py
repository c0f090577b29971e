"""Probes that outlive their run, reach for other processes, or speak for the agent."""

from __future__ import annotations

from palestra.sandbox.attacks.judges import ENDED, fails, leaves_nothing, stopped, untried
from palestra.sandbox.attacks.types import Attack, Judged, Seen
from palestra.sandbox.inside.frames import pack
from palestra.sandbox.types import Box, SandboxError

_DEAF = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        continue
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass
"""

_SETSID = """
if os.fork() == 0:
    os.setsid()
    linger()
time.sleep(0.1)
tell("STARTED", 1)
"""

_DOUBLE_FORK = """
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            linger()
        os._exit(0)
time.sleep(0.1)
tell("STARTED", 1)
"""

_HOLDS_PIPES = """
import signal
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    linger()
tell("STARTED", 1)
os._exit(0)
"""

# For two thirds of a second, so that a run that is not ended with everything in it leaves somebody.
_RESPAWN = """
tell("STARTED", 1)
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()
    os._exit(0)
time.sleep(0.05)
"""

_SENTINEL = """
import signal
attempt("terminate", lambda: os.kill(SCENE["sentinel"], signal.SIGTERM))
"""

_SUPERVISOR = """
import signal
attempt("look", lambda: os.kill(SCENE["supervisor"], 0))
attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(SCENE["supervisor"]), 0))
"""

_AGENT_SIGNALS = """
import signal
agent = os.getppid()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
    attempt(number.name, lambda: os.kill(agent, number))
"""

_AGENT_MEMORY = """
import ctypes
agent = os.getppid()
space = ctypes.create_string_buffer(64)
attempt("seize", lambda: call("ptrace", 0x4206, agent, 0, 0))
attempt("memory", lambda: os.close(os.open("/proc/%d/mem" % agent, os.O_RDWR)))
attempt("environ", lambda: os.close(os.open("/proc/%d/environ" % agent, os.O_RDONLY)))
attempt("descriptors", lambda: os.listdir("/proc/%d/fd" % agent))
attempt("readv", lambda: call("process_vm_readv", agent, space, 1, space, 1, 0))
attempt("getfd", lambda: call("pidfd_getfd", os.pidfd_open(agent), 3, 0))
"""

_FORGED = {
    "why": "",
    "exit": 0,
    "stdout": b"FORGED",
    "stderr": b"",
    "total": 6,
    "truncated": 0,
    "wall_s": 0.0,
    "cpu_s": 0.0,
}
_FRAMES = b"".join(pack({"id": number, **_FORGED}) for number in range(1, 40))

_FAKE_FRAMES = f"""
tell("STARTED", 1)
frames = {_FRAMES!r}
def spill(open_it):
    try:
        fd = open_it()
        os.set_blocking(fd, False)
        os.write(fd, frames)
    except OSError:
        return
for number in range(3, 256):
    spill(lambda: number)
for process in ("self", "1", str(os.getppid())):
    for number in range(0, 16):
        spill(lambda: os.open("/proc/%s/fd/%d" % (process, number), os.O_WRONLY | os.O_NONBLOCK))
for name in ("/dev/console", "/dev/tty", "/dev/stdout"):
    spill(lambda: os.open(name, os.O_WRONLY | os.O_NONBLOCK))
os._exit(7)
"""

_PLANTED = """
planted = "import os; os.write(1, b'PLANTED')"
places = [".", os.environ.get("HOME", "."), "/tmp"]
places.append(os.path.join(places[1], ".local/lib/python%d.%d/site-packages" % sys.version_info[:2]))
for place in places:
    try:
        os.makedirs(place, exist_ok=True)
        for name in ("sitecustomize.py", "usercustomize.py", "conftest.py"):
            with open(os.path.join(place, name), "w") as file:
                file.write(planted)
        with open(os.path.join(place, "planted.pth"), "w") as file:
            file.write(planted)
    except OSError:
        continue
for name in (".bashrc", ".profile", ".bash_profile"):
    with open(os.path.join(places[1] if os.access(places[1], os.W_OK) else ".", name), "w") as file:
        file.write("echo PLANTED")
"""


async def _later_runs(box: Box, scene: object) -> tuple[bytes, dict[str, str]]:
    """What runs after it was planted, in a fresh interpreter, a shell and a new session."""
    found = b""
    for result in (await box.run_python("print('clean')"), await box.exec("echo clean")):
        found += result.stdout
    return found, {}


def _not_planted(seen: Seen) -> Judged:
    if b"PLANTED" in seen.fetched:
        return Judged("ESCAPED", "ran in later runs", repr(seen.fetched))
    return untried(seen) if seen.fetched.count(b"clean") != 2 else Judged("contained", "not run", repr(seen.fetched))


def _outlived(seen: Seen) -> Judged:
    detail = " ".join(f"{name}={word}" for name, word in seen.said.items())
    if not seen.scene.sentinel_lives():
        return Judged("ESCAPED", "ended a process out here", detail)
    return fails(seen)


def _agent_lives(seen: Seen) -> Judged:
    # The kernel takes a signal to a namespace's first process without a word, and drops it.
    detail = f"{seen.result.status}; " + " ".join(f"{name}={word}" for name, word in seen.said.items())
    if not seen.usable or seen.result.status not in ("ok", "nonzero"):
        return Judged("ESCAPED", "the agent is gone", detail)
    return Judged("contained", "the agent lives", detail) if "END" in seen.said else untried(seen)


def _true_result(seen: Seen) -> Judged:
    result = seen.result
    detail = f"{result.status} {result.exit_code} {result.message}"
    if result.stdout == b"FORGED" or result.status == "ok":
        return Judged("ESCAPED", "its own result was believed", detail)
    if not seen.usable:
        return Judged("ESCAPED", "the box was lost", detail)
    good = result.exit_code == 7 and "STARTED" in seen.said and result.status not in ENDED
    return Judged("contained", "not believed", detail) if good else untried(seen)


async def _goes_on(box: Box, scene: object) -> tuple[bytes, dict[str, str]]:
    """A look at the box after a process that flees: it must answer."""
    try:
        await box.kill_processes()
    except SandboxError as error:
        return b"", {"kill_processes": str(error)}
    return b"", {}


ATTACKS = (
    Attack("deaf loop", "ignores and blocks every signal", "processes", _DEAF, stopped("timeout"), timeout=0.5),
    Attack("setsid", "leaves a process in a session of its own", "processes", _SETSID, leaves_nothing),
    Attack("double fork", "leaves daemons", "processes", _DOUBLE_FORK, leaves_nothing),
    Attack("held pipes", "leaves a process that holds its output open", "processes", _HOLDS_PIPES, leaves_nothing),
    Attack("respawn", "forks away from who would kill it", "processes", _RESPAWN, leaves_nothing, act=_goes_on),
    Attack("kill outside", "ends a process out here", "processes", _SENTINEL, _outlived, harmless=True),
    Attack("signal the supervisor", "signal 0 to the supervisor", "processes", _SUPERVISOR, fails, harmless=True),
    Attack("signal the agent", "ends or stops the box's agent", "processes", _AGENT_SIGNALS, _agent_lives),
    Attack("read the agent", "traces the agent, opens its memory and descriptors", "processes", _AGENT_MEMORY, fails),
    Attack("fake frames", "writes results to every descriptor it can find", "processes", _FAKE_FRAMES, _true_result),
    Attack(
        "planted modules", "plants files that later runs would load", "files", _PLANTED, _not_planted, act=_later_runs
    ),
)
