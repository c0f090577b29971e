"""Laws of what is left running: nothing, after an environment was closed, and after its process was killed.

Each takes the `Subject` and returns what was seen; it raises `Broken` or `Untestable`. The environment is used in a process of its own,
under a watcher to which all its orphans fall; both are waited for, with a deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from palestra.envs.checking.playing import Subject
from palestra.envs.checking.types import Broken, Untestable
from palestra.envs.checking.worker import CYCLES
from palestra.envs.registry import load_env_class

DEADLINE_S = 90.0
"""Of the process that uses the environment; the watcher's own is a little later."""
SPARE_S = 30.0
GRACE_S = 10.0
"""How long processes may take to end by themselves after the one that used the environment is gone, seconds."""


def closing(subject: Subject) -> str:
    """Nothing is left running after close, and closed environments do not pile up."""
    told = _watched(subject, "close")
    before, after = told["said"]["counts"]
    for what, count in after.items():
        # One that is left per environment makes CYCLES more; a pool that is shared by all of them has its size by then.
        if count >= before[what] + CYCLES:
            raise Broken(
                f"{CYCLES} environments were made, played and closed: {what} went from {before[what]} to {count}"
            )
    return ""


def killed(subject: Subject) -> str:
    """Nothing is left running after its process was killed in the middle of an episode."""
    _watched(subject, "kill")
    return ""


def _watched(subject: Subject, mode: str) -> dict[str, Any]:
    """What the watcher told of a process that used the environment.

    Raises:
        Untestable: another process cannot make it.
        Broken: it left something, or could not play.
    """
    if not sys.platform.startswith("linux"):
        raise Untestable("processes are followed by /proc, which is Linux's")
    request = _request(subject)
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("watcher.py")),
        mode,
        f"{DEADLINE_S:g}",
        f"{GRACE_S:g}",
    ]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, env=surroundings, timeout=DEADLINE_S + SPARE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"the watcher did not end after {DEADLINE_S + SPARE_S:g} s") from None
    if done.returncode != 0:
        raise Broken(f"the watcher failed: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    if told["left"]:
        raise Broken("left running:\n" + "\n".join(told["left"]))
    if told["fault"]:
        raise Broken(f"a process that used it: {told['fault']}")
    return told


def _request(subject: Subject) -> bytes:
    made = load_env_class(subject.env_id)
    if made.__module__ == "__main__" or "<locals>" in made.__qualname__:
        raise Untestable("its class is in a script or a function, where another process cannot find it")
    told = {"module": made.__module__, "class": made.__qualname__, "env_id": subject.env_id, "args": dict(subject.args)}
    try:
        return json.dumps(told).encode()
    except TypeError as error:
        raise Untestable(f"its arguments cannot be handed to another process: {error}") from None
