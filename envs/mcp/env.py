"""Environments whose tools are MCP servers', beside `@tool` methods of their own.

Tasks go in; the calls of each message go to the server that has the tool, and its answers come out as tool messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palestra.envs.mcp import pool
from palestra.envs.mcp.connection import McpTools
from palestra.envs.mcp.servers import McpServer, read_server
from palestra.envs.schema import read_object
from palestra.envs.spaces import fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import Call, asked_of, result_text, run_call, tool_message, unknown_tool
from palestra.envs.types import EnvError, Task, ToolError, ToolSpec


class McpEnv(ToolEnv):
    """A `ToolEnv` with the tools of `mcp_servers`.

    - A tool's error, arguments that a server refuses, and a deadline that passed are answers for the model.
    - A server that dies or cannot be reached raises `EnvError`: the episode has no reward, and the next one gets a new
      connection.
    - Servers start when the environment is made for the first time in a process, later ones with the first episode.
      `close` ends them, see `McpServer.lifetime`.
    """

    mcp_servers: ClassVar[Mapping[str, Any]] = {}
    """By a name of your own: a URL, a command as a list, or a table of `McpServer`'s fields."""

    def __init__(
        self,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
        mcp_servers: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads the servers and what they offer; one that nobody asked before is started for that.

        Raises:
            ValueError: a server that cannot be read, or two tools of one name.
            EnvError: a server did not come up.
        """
        given = self.mcp_servers if mcp_servers is None else mcp_servers
        self._servers: dict[str, McpServer] = {name: read_server(value) for name, value in given.items()}
        self._open: dict[str, McpTools] = {}
        self._remote: dict[str, tuple[str, str]] = {}
        self._remote_specs: list[ToolSpec] = []
        try:
            self._describe()
            super().__init__(render_mode, tasks)
        except BaseException:
            self.close()
            raise

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return (*super().tool_specs(), *fresh(self._remote_specs))

    def setup(self, task: Task) -> None:
        """Gives the episode its connections. A subclass that overrides this calls it."""
        super().setup(task)
        for name, server in self._servers.items():
            held = self._open.get(name)
            if held is not None and (held.broken or (server.lifetime == "episode" and self._used)):
                self._let_go(name)
            if name not in self._open:
                self._open[name] = pool.lease(server)
        self._used = True

    def run_tool(self, asked: Mapping[str, Any], beside: bool = False) -> Call:
        name, raw = asked_of(asked)
        if name not in self._remote:
            if name in self.tools:
                return run_call(asked, self.tools, self, beside)
            error = str(unknown_tool(name, [*self.tools, *self._remote]))
            return Call(name, None, None, error, tool_message(asked, name, result_text(f"Error: {error}")))
        arguments, result, problem = None, None, None
        try:
            arguments = _arguments(raw)
            result = self._call(name, arguments)
            text = result_text(result)
        except ToolError as refusal:
            problem = str(refusal)
            text = result_text(f"Error: {problem}")
        return Call(name, arguments, result, problem, tool_message(asked, name, text))

    def close(self) -> None:
        """Gives the connections back."""
        for name in list(self._open):
            self._let_go(name)
        super().close()

    _used = False
    """An episode was begun on the connections that are open."""

    def _describe(self) -> None:
        """What the servers offer, from what is known of them, or by asking them: then the connection is kept for the
        first episode."""
        for name, server in self._servers.items():
            specs = pool.offered(server)
            if specs is None:
                self._open[name] = pool.lease(server)
                specs = self._open[name].specs
            for shown, spec in pool.own_specs(server, specs).items():
                if shown in self.tools or shown in self._remote:
                    raise ValueError(f"two tools are called {shown!r}: give the MCP server {name!r} a prefix")
                self._remote[shown] = (name, shown.removeprefix(server.prefix))
                self._remote_specs.append(spec)

    def _call(self, shown: str, arguments: dict[str, Any]) -> str:
        name, tool = self._remote[shown]
        held = self._open.get(name)
        if held is None:
            raise EnvError(f"MCP server {name!r} is not open: no episode is going on")
        return held.call(tool, arguments)

    def _let_go(self, name: str) -> None:
        pool.give_back(self._open.pop(name))


def _arguments(raw: Any) -> dict[str, Any]:
    try:
        return read_object(raw)
    except ValueError as error:
        raise ToolError(str(error)) from None
