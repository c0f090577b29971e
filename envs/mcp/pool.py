"""Connections that wait for their next environment, and what each server offers.

A server goes in, a connection of the caller's own comes out; given back, it is kept where the server says so, or ended.
Waiting is the connection's own: its start and its end.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping

from palestra.envs.mcp.connection import McpTools
from palestra.envs.mcp.servers import McpServer
from palestra.envs.spaces import fresh
from palestra.envs.types import ToolSpec

KEPT = 64
"""Connections to one server that are kept for the next environments."""

_lock = threading.Lock()
_idle: dict[McpServer, list[McpTools]] = {}
_offered: dict[McpServer, tuple[ToolSpec, ...]] = {}


def lease(server: McpServer) -> McpTools:
    """A connection that nobody else has: one that was kept, or a new one.

    Raises:
        EnvError: the server did not come up.
    """
    with _lock:
        kept = _idle.get(server)
        if kept:
            return kept.pop()
    tools = McpTools(server)
    with _lock:
        _offered[server] = tools.specs
    return tools


def give_back(tools: McpTools) -> None:
    """Takes a connection back. One that is broken, or that its server does not want kept, is ended; that is waited for."""
    with _lock:
        kept = _idle.setdefault(tools.server, [])
        if tools.server.lifetime == "process" and not tools.broken and len(kept) < KEPT:
            kept.append(tools)
            return
    tools.close()


def offered(server: McpServer) -> tuple[ToolSpec, ...] | None:
    """What a server offers, where one was asked before in this process."""
    with _lock:
        return _offered.get(server)


def own_specs(server: McpServer, specs: tuple[ToolSpec, ...]) -> Mapping[str, ToolSpec]:
    """Specs under the names that a model sees, by those names."""
    named = {}
    for spec in specs:
        copy: ToolSpec = fresh(spec)
        copy["function"]["name"] = server.prefix + spec["function"]["name"]
        named[copy["function"]["name"]] = copy
    return named


def close_servers() -> None:
    """Ends all connections that are kept. Those in use end with their environments."""
    with _lock:
        waiting = [tools for kept in _idle.values() for tools in kept]
        _idle.clear()
    for tools in waiting:
        tools.close()


def _forget() -> None:
    """A forked child has neither the loop thread nor the pipes to itself: the parent's connections are not its own."""
    global _lock, _idle
    _lock, _idle = threading.Lock(), {}


atexit.register(close_servers)
os.register_at_fork(after_in_child=_forget)
