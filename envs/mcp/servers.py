"""Which MCP server is meant: a program that is started and spoken to over its pipes, or a URL.

A description from a class or a run's configuration goes in, an `McpServer` comes out. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from palestra.envs.tools import IO_TIMEOUT_S

LIFETIMES = ("episode", "env", "process")


@dataclass(frozen=True, slots=True)
class McpServer:
    """One server. Hashable: what it offers is asked once per process."""

    command: tuple[str, ...] = ()
    """Program and arguments; it is spoken to over its standard input and output."""
    url: str = ""
    """Or the URL of a streamable-HTTP server."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the program. Of ours it gets PATH, HOME and the like, and nothing else."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers for the URL."""
    tools: tuple[str, ...] = ()
    """The tools that are offered; empty: all of them."""
    prefix: str = ""
    """Put before the names of its tools, where two servers have one of the same name."""
    lifetime: str = "env"
    """`episode`: a new one for each episode, for servers that keep state which must not last. `env`: one per live
    environment, ended by its `close`. `process`: given to the next environment, ended with the process, for servers
    without state."""
    timeout_s: float = IO_TIMEOUT_S
    """Deadline of a call; the model is told that it passed."""
    timeouts: tuple[tuple[str, float], ...] = ()
    """Deadlines of single tools, by the server's own names."""
    start_s: float = 60.0
    """Deadline for starting it and asking what it offers."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command or a url")
        if self.lifetime not in LIFETIMES:
            raise ValueError(f"an MCP server's lifetime is one of {LIFETIMES}, got {self.lifetime!r}")
        if min(self.timeout_s, self.start_s, *(seconds for _, seconds in self.timeouts)) <= 0:
            raise ValueError("deadlines of an MCP server must be over 0 s")

    @property
    def label(self) -> str:
        """What messages call it."""
        return (self.url or " ".join(self.command))[:200]

    def deadline(self, tool: str) -> float:
        """Seconds that a call of `tool` may take."""
        return dict(self.timeouts).get(tool, self.timeout_s)


def read_server(value: Any) -> McpServer:
    """A server from a URL, a command as a list, or a mapping of `McpServer`'s fields (as a run's TOML has it).

    Raises:
        ValueError: it describes no server.
    """
    if isinstance(value, McpServer):
        return value
    if isinstance(value, str):
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"an MCP server is a URL or a command as a list, got {value!r}")
        return McpServer(url=value)
    if isinstance(value, Mapping):
        known = {field.name for field in fields(McpServer)}
        if unknown := sorted(value.keys() - known):
            raise ValueError(f"MCP server: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return McpServer(**{name: _frozen(item) for name, item in value.items()})
    if isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return McpServer(command=tuple(value))
    raise ValueError(f"an MCP server is a URL, a command as a list, or a table, got {value!r}")


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value
