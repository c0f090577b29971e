"""The keeper's boxes, from fork to nothing left.

In: requests to start and to end a box, and the kernel's word that a child ended. Out: answers, through a callback. Nothing here waits: what
is not over yet is looked at again (`Boxes.step`).
"""

from __future__ import annotations

import gc
import os

from palestra.sandbox import cgroups
from palestra.sandbox.keeper import child, folders, processes
from palestra.sandbox.keeper.users import Users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Kept:
    """A box."""

    __slots__ = (
        "below",
        "ending",
        "folder",
        "groups",
        "mode",
        "number",
        "pid",
        "said",
        "status",
        "uid",
        "waiting",
        "watch",
    )

    def __init__(self, request: dict[str, Any], said: int) -> None:
        self.number: int = request["box"]
        self.mode: str = request["mode"]
        self.folder = False
        """Whether a folder was made for it."""
        self.watch: int = request.get("watch") or 0
        """Bytes that the watchdog lets it have; 0: a group does that."""
        self.said = said
        self.pid = 0
        self.uid: int | None = None
        self.groups: list[str] = []
        self.status: int | None = None
        """Of its first process, once that ended."""
        self.below: set[int] = set()
        """Processes that have to be gone too."""
        self.ending = False
        self.waiting: list[int] = []
        """Requests that are answered when it is gone."""


class Boxes:
    """All of them."""

    def __init__(
        self,
        where: cgroups.Hierarchy | None,
        users: Users | None,
        owner: str,
        base: str,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        """`base` is where folders of boxes are; `tell` sends a message to the service."""
        self.where, self.users, self.owner, self.base, self.tell = where, users, owner, base, tell
        self.kept: dict[int, Kept] = {}
        self.by_pid: dict[int, Kept] = {}

    def spawn(self, request: dict[str, Any], control: int, confine: Callable[[dict[str, Any]], None] | None) -> Kept:
        """Forks a box; `control` is closed here.

        Raises:
            OSError: it cannot be had; nothing of it is left.
        """
        if request["box"] in self.kept:
            os.close(control)
            raise FileExistsError(f"there is a box {request['box']} already")
        said, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        kept = Kept(request, said)
        try:
            if request["own_user"] and self.users is not None:
                kept.uid = self.users.take()
            if request["limits"] is not None and self.where is not None:
                kept.groups = cgroups.make(self.where, self.owner, str(kept.number), **request["limits"])
            if request["folder"]:
                folders.make(self.base, self.owner, kept.number, kept.uid)
                kept.folder = True  # from here on it is ours to remove: never one that was there before
            gc.disable()  # a collection in the child would copy the keeper's memory
            kept.pid = os.fork()
            if kept.pid == 0:
                child.become(request, control, theirs, kept.groups, kept.uid, confine)
        except BaseException:
            os.close(said)
            self._clear(kept)
            raise
        finally:
            os.close(theirs)
            os.close(control)
        self.kept[kept.number] = self.by_pid[kept.pid] = kept
        return kept

    def end(self, number: int, request: int) -> None:
        """Ends a box; `request` is answered when all of it is gone, at once if there is no such box."""
        kept = self.kept.get(number)
        if kept is None:
            self.tell({"id": request, "status": None, "said": ""})
            return
        kept.waiting.append(request)
        if not kept.ending:
            kept.ending = True
            self._strike(kept)
        self.step()

    def end_all(self) -> None:
        """Ends every box, for nobody."""
        for kept in self.kept.values():
            if not kept.ending:
                kept.ending = True
                self._strike(kept)

    def _strike(self, kept: Kept) -> None:
        """Kills what there is of it."""
        if kept.status is None:
            # A namespace dies with its first process, the child of the one that we started.
            below = processes.children if kept.mode == "namespace" else processes.descendants
            kept.below |= below(kept.pid)
            processes.kill({kept.pid} | kept.below)
        if kept.groups:
            cgroups.kill(kept.groups)

    def collect(self) -> None:
        """Collects processes that ended, and tells of boxes that did so by themselves."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            kept = self.by_pid.pop(pid, None)
            if kept is not None:
                kept.status = status
                if not kept.ending:
                    self.tell({"event": "ended", "box": kept.number, "status": status, "said": _tail(kept.said)})
                    self._adopt(kept)
        self.step()

    def _adopt(self, kept: Kept) -> None:
        """What a box left when its first process ended came to us: it ends."""
        mine = self._strays()
        kept.below |= mine
        processes.kill(mine)

    def _strays(self) -> set[int]:
        """Children of ours that we did not start, and that no box is known to have."""
        found = processes.children(os.getpid()) - set(self.by_pid)
        return found.difference(*(kept.below for kept in self.kept.values()))

    @property
    def unfinished(self) -> bool:
        """Whether `step` has something to look at."""
        return any(kept.ending for kept in self.kept.values())

    def step(self) -> None:
        """Looks at the boxes that are ending: kills what came up, and answers for those of which nothing is left."""
        ending = [kept for kept in self.kept.values() if kept.ending and kept.status is not None]
        if not ending:
            return
        strays = self._strays()
        processes.kill(strays)
        here = processes.children(os.getpid())
        for kept in ending:
            if kept.mode != "namespace":
                # Its orphans come to us one generation after the other.
                kept.below |= strays
                processes.kill(here & kept.below)
            kept.below &= here
            if not kept.below and not (kept.groups and cgroups.kill(kept.groups)) and self._clear(kept):
                self._gone(kept)

    def _gone(self, kept: Kept) -> None:
        del self.kept[kept.number]
        said = _tail(kept.said)
        os.close(kept.said)
        for request in kept.waiting:
            self.tell({"id": request, "status": kept.status, "said": said})

    def _clear(self, kept: Kept) -> bool:
        """Removes its group and folder and gives its user back; whether that is done."""
        if kept.groups and not cgroups.remove(kept.groups):
            return False
        if kept.folder:
            folders.remove_box(self.base, self.owner, kept.number)
        if kept.uid is not None and self.users is not None:
            self.users.give(kept.uid)
            kept.uid = None
        return True


def _tail(said: int) -> str:
    """The end of what was written to a pipe so far."""
    text = b""
    while True:
        try:
            data = os.read(said, 65536)
        except BlockingIOError:
            break
        if not data:
            break
        text = (text + data)[-child.SAID_BYTES :]
    return text.decode("utf-8", "replace").strip()
