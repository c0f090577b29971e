"""Holds memory where no group does: looks now and then, and kills. What grows faster than it looks gets further than its limit."""

from __future__ import annotations

from palestra.sandbox.keeper import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from palestra.sandbox.keeper.boxes import Kept

EVERY_S = 0.1


def look(boxes: Iterable[Kept], tell: Callable[[dict[str, Any]], None]) -> None:
    """Kills the largest process of each box that has more than it may; its agent is spared, unless it alone is too large."""
    for kept in boxes:
        if not kept.watch or kept.ending or kept.status is not None:
            continue
        pids = processes.descendants(kept.pid) | {kept.pid}
        if sum(processes.memory(pids).values()) <= kept.watch:
            continue
        sizes = processes.share(pids)
        if sum(sizes.values()) <= kept.watch:
            continue
        own = {kept.pid} | (processes.children(kept.pid) if kept.mode == "namespace" else set())
        victims = {pid: size for pid, size in sizes.items() if pid not in own} or sizes
        # Told before it is done, so that whoever sees the process end can know why.
        tell({"event": "oom", "box": kept.number})
        processes.kill({max(victims, key=victims.__getitem__)})
