"""No sandbox: code runs as this user, on this machine, with nothing between. For machines that are themselves the sandbox, by explicit
wish.

In: specs; out: boxes whose agent is a plain process of the keeper's, which ends what they leave. Waits for processes to end.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from palestra.sandbox import bundle
from palestra.sandbox.box import AgentBox
from palestra.sandbox.local import CONTROL_FD, SETUP_S, LaunchPlan, LocalBackend, Place
from palestra.sandbox.types import PROMISES, BackendName, BoxSpec, Enforced, SandboxUnavailableError

logger = logging.getLogger(__name__)


class UnsafeSubprocess(LocalBackend):
    """`types.Backend` that protects nothing but from leftovers."""

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
        super().__init__(python=sys.executable)

    async def prepare(self) -> None:
        logger.warning("unsafe_subprocess: model-written code runs with all rights of this user")

    async def plan(self, spec: BoxSpec, place: Place) -> LaunchPlan:
        if spec.image or spec.mounts:
            raise SandboxUnavailableError("unsafe_subprocess has no images and mounts nothing")
        home, temporary = place.folder + "/workspace", place.folder + "/tmp"
        return LaunchPlan(
            argv=tuple(bundle.command(self.python, CONTROL_FD, CONTROL_FD)),
            agent=bundle.compiled(self.python),
            mode="tree",
            home=home,
            packages=spec.packages,
            env=(("TMPDIR", temporary),),
            # Without these the files of a box would be looked for in the host's own /workspace and /tmp.
            setup=(("places", {"/workspace": home, "/tmp": temporary}),),
            own_user=False,
            cgroup=False,
            bounded=False,
            folder=True,
        )

    async def create(self, spec: BoxSpec) -> AgentBox:
        box = await super().create(spec)
        try:
            for path in ("/workspace", "/tmp"):  # nothing else makes them: no program of ours confines this agent first
                await box.ask({"op": "folder", "path": path}, SETUP_S)
        except BaseException:
            await box.close()
            raise
        return box

    def levels(self) -> Enforced:
        nothing: dict[str, Any] = dict.fromkeys(PROMISES, "none")
        return Enforced(**nothing, notes=("Nothing is enforced: choose another backend.",))
