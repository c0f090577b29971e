"""One connection to an MCP server: its tools described, its calls run.

A server's description goes in; specs and results as text come out. The client lives in one task on the process's loop
(it may not be left from another task than entered it); callers wait for it in their own threads, always with a
deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import IO, TYPE_CHECKING, Any

from palestra.envs import background
from palestra.envs.mcp.servers import McpServer
from palestra.envs.tools import ToolTimeout
from palestra.envs.types import EnvError, ToolError, ToolSpec

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)

CLOSE_S = 8.0
"""A program gets 2 s to end when its input closes, 2 s after SIGTERM and 2 s after SIGKILL (the SDK's own figures)."""
READ_TIMEOUT_S = 300.0
"""How long an HTTP server may be silent within an answer; calls have deadlines of their own."""
WORDS_KEPT = 1 << 20
"""Bytes of a program's error output that are kept; more than that, and it is begun anew."""
_TIED = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"
    "if os.getppid()!=int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)
"""Ends the program with the process that started it, also where that is killed (1 is PR_SET_PDEATHSIG, 9 SIGKILL)."""


class McpTools:
    """The tools of one server, connected. Thread-safe."""

    def __init__(self, server: McpServer) -> None:
        """Connects, starts the program where there is one, and asks for its tools.

        Raises:
            EnvError: it did not come up, or not in time.
        """
        self.server = server
        self.broken = False
        """The connection is lost, or a call went past its deadline and may still be running: it is not for reuse."""
        self._words: IO[bytes] | None = _words() if server.command else None
        self._client: Client | None = None
        self._stop: asyncio.Event | None = None
        self._ready: concurrent.futures.Future[tuple[ToolSpec, ...]] = concurrent.futures.Future()
        self._ended, self._pid = threading.Event(), os.getpid()
        self._task = background.call(self._start(_client(server, self._words)), server.start_s)
        done, _ = concurrent.futures.wait([self._ready], server.start_s)
        try:
            if not done:
                raise TimeoutError(f"not ready after {server.start_s:g} s")
            self.specs: tuple[ToolSpec, ...] = self._ready.result()
        except Exception as error:
            said = self._said()
            self.close()
            raise EnvError(f"MCP server {server.label}: {_reason(error)}{said}") from error

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a tool, by the server's own name. Waits at most its deadline.

        Raises:
            ToolError: the tool's own error, or arguments that the server refuses: for the model.
            ToolTimeout: it ran past its deadline; for the model too.
            EnvError: the server is gone or has a fault.
        """
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        if self._client is None:
            raise EnvError(f"MCP server {self.server.label}: closed")
        deadline = self.server.deadline(name)
        try:
            result = background.call(self._client.call_tool(name, arguments), deadline)
        except background.DeadlineError:
            self.broken = True
            raise ToolTimeout(f"tool {name} ran past {deadline:g} s") from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(str(error)) from None
            raise self._fault(name, error) from error
        except Exception as error:
            raise self._fault(name, error) from error
        self._shorten_words()
        text = _text(result)
        if result.is_error:
            raise ToolError(text or "the tool failed and said nothing")
        return text

    def close(self) -> None:
        """Ends the connection, and the program with what it started. Waits for it, at most `CLOSE_S`."""
        self._client, self.broken = None, True
        if os.getpid() != self._pid:
            return  # a forked child: the program and its pipes are the parent's
        end = self._task.cancel if self._stop is None else self._stop.set
        background.loop().call_soon_threadsafe(end)
        if not self._ended.wait(CLOSE_S):
            logger.warning("MCP server %s did not end within %g s; its task is cancelled", self.server.label, CLOSE_S)
            background.loop().call_soon_threadsafe(self._task.cancel)
        if self._words is not None:
            self._words.close()

    async def _start(self, client: Client) -> asyncio.Task[None]:
        task = asyncio.create_task(self._serve(client))
        task.add_done_callback(lambda _: self._ended.set())
        return task

    async def _serve(self, client: Client) -> None:
        """Holds the client open until `close`; what ends it before is told to who waits for the start."""
        try:
            async with client:
                specs = await _specs(client, self.server)
                self._client, self._stop = client, asyncio.Event()
                self._ready.set_result(specs)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller that waits is told
            self.broken = True
            if self._ready.done():
                logger.warning("MCP server %s ended by %s", self.server.label, _reason(error))
            else:
                self._ready.set_exception(error)

    def _fault(self, name: str, error: Exception) -> EnvError:
        self.broken = True
        return EnvError(f"MCP server {self.server.label}: tool {name}: {_reason(error)}{self._said()}")

    def _said(self) -> str:
        """The last words of a program, for messages."""
        if self._words is None or self._words.closed:
            return ""
        size = os.fstat(self._words.fileno()).st_size
        words = os.pread(self._words.fileno(), 500, max(0, size - 500)).decode(errors="replace").strip()
        return f"; its last words: {words}" if words else ""

    def _shorten_words(self) -> None:
        if self._words is not None and os.fstat(self._words.fileno()).st_size > WORDS_KEPT:
            os.ftruncate(self._words.fileno(), 0)


def _client(server: McpServer, words: IO[bytes] | None) -> Client:
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
    except ImportError as error:
        raise EnvError("MCP servers need an extra: pip install 'palestra[mcp]'") from error
    if server.command and words is not None:
        program = shutil.which(server.command[0], path=dict(server.env).get("PATH"))
        if program is None:
            raise EnvError(f"MCP server {server.label}: there is no program {server.command[0]!r}")
        arguments = ["-I", "-S", "-c", _TIED, str(os.getpid()), program, *server.command[1:]]
        start = StdioServerParameters(command=sys.executable, args=arguments, env=dict(server.env))
        return Client(stdio_client(start, errlog=words))  # type: ignore[arg-type]  # only its descriptor is used
    return Client(_http(server))


@contextlib.asynccontextmanager
async def _http(server: McpServer) -> AsyncIterator[Any]:
    """The transport to a URL. The SDK closes only HTTP clients of its own making, and those have no headers."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(30.0, read=READ_TIMEOUT_S)
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout) as http,
        streamable_http_client(server.url, http_client=http) as streams,
    ):
        yield streams


def _words() -> IO[bytes]:
    """A file for a program's error output, without a name. Appended to, so that cutting it leaves no hole."""
    with contextlib.ExitStack() as undo:
        words = undo.enter_context(tempfile.TemporaryFile())
        flags = fcntl.fcntl(words.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(words.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
        undo.pop_all()
        return words


async def _specs(client: Client, server: McpServer) -> tuple[ToolSpec, ...]:
    specs: list[ToolSpec] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
            if not server.tools or tool.name in server.tools:
                specs.append({"type": "function", "function": function})
        cursor = page.next_cursor
        if not cursor:
            break
    if missing := sorted(set(server.tools) - {spec["function"]["name"] for spec in specs}):
        raise EnvError(f"it has no tool {missing[0]!r}")
    return tuple(specs)


def _text(result: Any) -> str:
    """What a model reads of a result: its texts; of the rest, what kind it is. The structure where there is no text."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource":
            parts.append(getattr(block.resource, "text", None) or f"[resource {block.resource.uri}]")
        elif block.type == "resource_link":
            parts.append(f"[resource {block.uri}]")
        else:
            parts.append(f"[{block.type} {getattr(block, 'mime_type', '')}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The error's text; of a group (the SDK's tasks raise such), of its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
