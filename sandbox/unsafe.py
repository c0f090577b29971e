"""No sandbox: code runs as this user, on this machine, with nothing between. For machines that are themselves the sandbox, by explicit
wish.

In: specs; out: boxes whose agent is a plain child process. Waits for processes to end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from palestra.sandbox import bundle
from palestra.sandbox.box import AgentBox
from palestra.sandbox.channel import StreamChannel
from palestra.sandbox.types import PROMISES, BackendName, BoxSpec, Enforced, SandboxUnavailableError

logger = logging.getLogger(__name__)


class UnsafeSubprocess:
    """`types.Backend` that protects nothing but from leftovers, and those only if they do not hide."""

    name: BackendName = "unsafe_subprocess"

    def __init__(self, *, i_understand: bool = False) -> None:
        """`i_understand`: that code in these boxes can do all that this user can.

        Raises:
            SandboxUnavailableError: it was not said.
        """
        if not i_understand:
            raise SandboxUnavailableError(
                "unsafe_subprocess runs model-written code with all rights of this user; if this machine is itself a sandbox, say "
                "i_understand=True (in a configuration: sandbox.i_understand = true)"
            )
        self._numbers = itertools.count(1)
        self._boxes: set[AgentBox] = set()

    async def start(self) -> None:
        logger.warning("unsafe_subprocess: model-written code runs with all rights of this user")

    def enforced(self) -> Enforced:
        nothing: dict[str, Any] = dict.fromkeys(PROMISES, "none")
        return Enforced(**nothing, notes=("Nothing is enforced: choose another backend.",))

    async def create(self, spec: BoxSpec) -> AgentBox:
        if spec.image or spec.mounts:
            raise SandboxUnavailableError("unsafe_subprocess has no images and mounts nothing")
        home = tempfile.mkdtemp(prefix="palestra-box-")
        ours, theirs = socket.socketpair()
        argv = bundle.command(sys.executable, theirs.fileno(), theirs.fileno())
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={}, cwd="/")
        theirs.close()
        channel = await StreamChannel.over(ours)

        async def destroy() -> None:
            await asyncio.to_thread(process.wait)
            await asyncio.to_thread(shutil.rmtree, home, True)
            self._boxes.discard(box)

        box = AgentBox(f"unsafe-{process.pid}-{next(self._numbers)}", spec, channel, self, destroy)
        channel.write(bundle.sources())
        limits = {"open_files": spec.limits.open_files, "file_bytes": spec.limits.file_bytes}
        setup = {
            "op": "setup", "mode": "tree", "limits": limits, "preload": list(spec.preload), "packages": spec.packages,
            "env": bundle.environment(spec.env, home), "home": home,
        }  # fmt: skip
        reply = await box.ask(setup, 30)
        if reply["missing"]:
            await box.close()
            raise SandboxUnavailableError(f"cannot preload: {'; '.join(map(str, reply['missing']))}")
        self._boxes.add(box)
        return box

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        for box in list(self._boxes):
            await box.close()
