"""Sessions of a box: what they keep whatever is done to them, on the agent without confinement and in a namespace of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from palestra.sandbox import bundle
from palestra.sandbox.box import AgentBox
from palestra.sandbox.channel import StreamChannel
from palestra.sandbox.inside import bash_session
from palestra.sandbox.types import BoxFileError, BoxSpec, Limits
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests import sandbox_sessions as cases

NAMES = sorted(name for name in dir(cases) if name.startswith("check_") and name not in cases.CONFINED_ONLY)
SPEC = BoxSpec(limits=Limits(total_output_bytes=4 << 20))
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
async def box() -> AsyncIterator[AgentBox]:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    yield await backend.create(SPEC)
    await backend.close()


@pytest.mark.walk
@pytest.mark.parametrize("name", NAMES)
async def test_sessions(box: AgentBox, name: str) -> None:
    await getattr(cases, name)(box)


@pytest.mark.walk
async def test_an_image_without_bash_is_told_when_a_session_is_opened(
    box: AgentBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bash_session, "PLACES", ("/nowhere/bash",))
    with pytest.raises(RuntimeError, match=r"no bash in this box .*nowhere.* a session of kind bash needs it"):
        bash_session.Bash()
    with pytest.raises(BoxFileError, match="no sessions of kind perl; known: python, bash"):
        await box.ask({"op": "open", "kind": "perl"}, 10)


NAMESPACED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from palestra.sandbox.inside import kernel

assert os.getpid() == 1, "not process 1"
def unreadable():
    raise PermissionError(13, "no /proc")
kernel.parents = unreadable
reaper = kernel.Reaper(kernel.DOMAIN)

def start(*words):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for word in words:
            if os.fork() == 0:
                if word == "away":
                    os.setsid()
                if word == "twice" and os.fork() != 0:
                    os._exit(0)
                os.write(told, b"%d " % os.getpid())
                time.sleep(1000)
        time.sleep(1000)
    found = [pid]
    text = b""
    while text.count(b" ") < len(words):
        text += os.read(ready, 100)
    return [pid, *map(int, text.split())]

def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

session = start("near")
other = start("near", "twice")
job = start("near", "away", "twice")
reaper.watched |= {session[0], other[0], job[0]}
assert reaper.present() == set()
reaper.kill_job(job[0], {session[0], other[0]}, reaper.present())
assert reaper.take(job[0])[0] == 9
assert not any(map(lives, job)), "something of the job is left"
assert all(map(lives, session + other)), "the job took a session with it"
late = start("away")
reaper.kill_session(session[0], {other[0]})
assert reaper.take(session[0])[0] == 9
assert not any(map(lives, session + late[1:]))
assert all(map(lives, other)), "one session took another with it"
reaper.kill_session(other[0], set())
assert not any(map(lives, other))
print("well")
"""


@pytest.mark.ci
def test_a_domain_without_proc_ends_jobs_and_keeps_sessions() -> None:
    """In a namespace of processes, so that nothing outside can be hit."""
    argv = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", NAMESPACED, str(ROOT / ".dev")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr


class TestNamespace:
    """The same cases where the agent is process 1, as it is in most backends."""

    @pytest.fixture
    async def box(self, tmp_path: Path) -> AsyncIterator[AgentBox]:
        ours, theirs = socket.socketpair()
        agent = bundle.command("/usr/bin/python3", theirs.fileno(), theirs.fileno())
        argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *agent]
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        )
        theirs.close()
        channel = await StreamChannel.over(ours)

        async def destroy() -> None:
            await asyncio.to_thread(process.wait)

        box = AgentBox("namespace", SPEC, channel, UnsafeSubprocess(i_understand=True), destroy)
        channel.write(bundle.sources())
        home = str(tmp_path)
        setup: dict[str, Any] = {"op": "setup", "mode": "namespace", "limits": {}, "preload": [], "packages": None}
        await box.ask({**setup, "env": bundle.environment((), home), "home": home}, 30)
        yield box
        await box.close()

    @pytest.mark.full  # the backends run the same cases in the ci tier
    @pytest.mark.parametrize("name", NAMES)
    async def test_sessions(self, box: AgentBox, name: str) -> None:
        await getattr(cases, name)(box)
