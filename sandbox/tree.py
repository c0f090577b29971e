"""Folders of a box as tar archives, and back.

In: a box, whose agent reads and writes single files; out: an archive that is put together out here, so that nothing in the box is believed
about more than names and contents. Waits for the box.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from palestra.sandbox.types import BoxFileError, Entry

if TYPE_CHECKING:
    from palestra.sandbox.box import AgentBox

MOST_ENTRIES = 20_000
MOST_DEPTH = 64
FILE_S = 30.0


async def pack_tree(box: AgentBox, roots: Sequence[str], max_bytes: int) -> bytes:
    """A tar archive of these folders; names are paths from the root of the box, or from /workspace where a root is relative. Sockets,
    pipes and devices are left out.

    Raises:
        BoxFileError: more than `max_bytes`, too many entries, or a folder that cannot be read.
    """
    buffer = io.BytesIO()
    count = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        pending = list(roots)
        while pending:
            folder = pending.pop()
            if folder.count("/") > MOST_DEPTH:
                raise BoxFileError(f"{folder[:80]}...: deeper than {MOST_DEPTH} folders")
            for entry in await box.list(folder):
                count += 1
                path = posixpath.normpath(posixpath.join(folder, entry.name))
                if count > MOST_ENTRIES:
                    raise BoxFileError(f"{folder}: more than {MOST_ENTRIES} entries")
                await _add(box, archive, path, entry, max_bytes - buffer.tell())
                if entry.kind == "folder":
                    pending.append(path)
    return buffer.getvalue()


async def _add(box: AgentBox, archive: tarfile.TarFile, path: str, entry: Entry, room: int) -> None:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.mode = entry.mode & 0o777
    if entry.kind == "file":
        if entry.size > room:
            raise BoxFileError(f"{path}: no room for its {entry.size} bytes in what was asked for")
        data = await box.get(path, max_bytes=room)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    elif entry.kind == "folder":
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif entry.kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, entry.target
        archive.addfile(member)


async def unpack_tree(box: AgentBox, archive: bytes) -> None:
    """Writes an archive's folders, files and links into the box, from its root.

    Raises:
        BoxFileError: the box refuses one of them.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
        for member in members:
            path = "/" + member.name
            request: dict[str, Any] = {"path": path}
            if member.isdir():
                await box.ask({"op": "folder", **request}, FILE_S)
            elif member.issym():
                await box.ask({"op": "link", "target": member.linkname, **request}, FILE_S)
            elif member.isreg() and (content := members.extractfile(member)) is not None:
                await box.put(path, content.read(), mode=member.mode)
