"""Uses an environment in a process of its own, for laws about what is left running: `python -m palestra.envs.checking.worker close|kill`.

In: a request on standard input, {"module", "class", "env_id", "args"}. Out: one line of JSON on standard output. `close` plays and closes
several environments and tells how many processes, threads and descriptors there were after each half; `kill` begins an episode, says so
and waits to be killed (the watcher above it has a deadline).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from palestra.envs.checking.playing import Subject, play_script
from palestra.envs.checking.types import Untestable
from palestra.envs.core import MessageEnv
from palestra.envs.registry import register_builtin
from palestra.envs.types import Message, Task
from palestra.sandbox.keeper.processes import descendants

CYCLES = 4
"""Environments of each half."""


def main(mode: str) -> int:
    """Does as it was asked."""
    out = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is not our report
    request = json.loads(sys.stdin.buffer.read())
    importlib.import_module(request["module"])
    register_builtin(
        request["env_id"].rpartition(":")[2], f"{request['module']}:{request['class']}"
    )  # unless that import did
    subject = Subject(request["env_id"], request["args"], 2)
    if mode == "kill":
        env = subject.make()
        task = subject.tasks[0]
        env.reset(seed=0, options={"task": task})
        env.step(_script(subject, task)[0])
        _tell(out, {"playing": task.id})
        threading.Event().wait()
    counts = []
    for _ in range(2):
        for cycle in range(CYCLES):
            _cycle(subject, cycle)
        counts.append(_counts())
    subject.close()
    _tell(out, {"counts": counts})
    return 0


def _cycle(subject: Subject, cycle: int) -> None:
    """One environment: a whole episode, or one that is dropped in its middle."""
    task = subject.tasks[cycle % len(subject.tasks)]
    script = _script(subject, task)
    with closing(subject.make()) as env:
        if cycle % 2:
            play_script(env, script, task)
        else:
            env.reset(seed=0, options={"task": task})
            env.step(script[0])


def _script(subject: Subject, task: Task) -> list[Message]:
    try:
        return subject.oracle(task)
    except Untestable:
        inner = subject.inner
        assert isinstance(inner, MessageEnv), "the subject saw to it"
        inner.action_space.seed(0)
        return [inner.action_space.sample()]


def _counts() -> dict[str, int]:
    """What this process has."""
    return {
        "processes": len(descendants(os.getpid())),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _tell(descriptor: int, what: Mapping[str, Any]) -> None:
    os.write(descriptor, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
