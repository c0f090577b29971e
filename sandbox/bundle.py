"""The agent as it is sent into a box: a line of Python that starts it, and its modules behind a length.

In: the interpreter that the box has, where it can be run out here; then the modules travel compiled, which makes boxes start
quicker. Out: bytes for the channel, ahead of the first frame. Waits for one run of that interpreter, once.
"""

from __future__ import annotations

import functools
import marshal
import os
import subprocess
from pathlib import Path

from palestra.sandbox.types import SandboxUnavailableError

MODULES = ("frames", "kernel", "files", "commands", "jobs", "bash_session", "python_session", "sessions", "agent")
"""In the order in which they need each other."""

BOOT = """
import marshal, os, sys
def take(n):
    got = b""
    while len(got) < n:
        more = os.read(int(sys.argv[1]), n - len(got))
        if not more:
            os._exit(3)
        got += more
    return got
module = type(sys)
pack = sys.modules["palestra_box"] = module("palestra_box")
pack.__path__ = []
for name, code in marshal.loads(take(int.from_bytes(take(4), "big"))):
    made = sys.modules["palestra_box." + name] = module("palestra_box." + name)
    made.__package__ = "palestra_box"
    setattr(pack, name, made)
    exec(compile(code, "<palestra " + name + ">", "exec") if isinstance(code, bytes) else code, made.__dict__)
sys.modules["palestra_box.agent"].main(int(sys.argv[1]), int(sys.argv[2]))
"""

FLAGS = ("-I", "-S", "-B", "-u")
"""Isolated from variables, folders and .pth files that somebody may have planted; unbuffered, so that what was written before a run is
killed is there."""

_COMPILE = """
import marshal, sys
parts = marshal.loads(sys.stdin.buffer.read())
done = [(name, compile(code, "<palestra " + name + ">", "exec", optimize=2)) for name, code in parts]
sys.stdout.buffer.write(marshal.dumps(done))
"""


def command(python: str, control_in: int, control_out: int) -> list[str]:
    """The command line of an agent that talks on these descriptors."""
    return [python, *FLAGS, "-c", BOOT, str(control_in), str(control_out)]


@functools.cache
def sources() -> bytes:
    """The modules' texts, for an interpreter of any version."""
    folder = Path(__file__).parent / "inside"
    return _behind_length(marshal.dumps([(name, (folder / f"{name}.py").read_bytes()) for name in MODULES]))


@functools.cache
def compiled(python: str) -> bytes:
    """The modules compiled by the interpreter that will run them.

    Raises:
        SandboxUnavailableError: it cannot be run.
    """
    try:
        done = subprocess.run(
            [python, *FLAGS, "-c", _COMPILE],
            input=sources()[4:],
            capture_output=True,
            timeout=60,
            env={},
            check=True,
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(
            f"{python} cannot be run: {error}; a box needs Python 3.9 or newer there"
        ) from error
    return _behind_length(done.stdout)


def _behind_length(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def environment(extra: tuple[tuple[str, str], ...], home: str) -> dict[str, str]:
    """Variables of everything in a box. One thread for numerical libraries: boxes share the cores."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", **threads, **dict(extra)}


def readable(path: str) -> bool:
    """Whether everybody can read a file, or enter and list a folder: a box's user is nobody's."""
    at = Path(path).resolve()
    least = 0o005 if at.is_dir() else 0o004
    return os.stat(at).st_mode & least == least and all(os.stat(folder).st_mode & 0o001 for folder in at.parents)
