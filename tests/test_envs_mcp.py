"""MCP servers as tools: over pipes and over HTTP, written with the SDK here; faults, deadlines, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.mcp import McpEnv, McpServer, McpTools, close_servers, read_server
from palestra.envs.tools import ToolTimeout, tool
from palestra.envs.types import EnvError, Message, StopReason, Task, ToolError

SERVER = '''
import asyncio, os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes = []

@server.tool()
def add(text: str) -> int:
    """Adds a note and says how many there are."""
    notes.append(text)
    return len(notes)

@server.tool()
def read() -> list[str]:
    """All notes."""
    return notes

@server.tool()
def refuse() -> str:
    raise ToolError("not today")

@server.tool()
def pid() -> int:
    return os.getpid()

@server.tool()
async def hang() -> str:
    await asyncio.sleep(60)
    return "late"

print("notes begin", file=sys.stderr)
server.run("stdio")
'''

PLAIN = """
import json, os, sys
print("notes begin", file=sys.stderr, flush=True)
notes = 0
names = ("add", "pid", "hang", "stick")
tools = [{"name": name, "inputSchema": {"type": "object", "properties": {}}} for name in names]
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params") or {}
    if "id" not in asked or params.get("name") == "hang":
        continue
    if params.get("name") == "stick":
        time.sleep(60)
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if method == "initialize":
        server = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    elif method == "tools/list":
        answer["result"] = {"tools": tools}
    elif method == "tools/call":
        notes += params["name"] == "add"
        text = str(notes if params["name"] == "add" else os.getpid())
        answer["result"] = {"content": [{"type": "text", "text": text}]}
    else:
        answer["error"] = {"code": -32601, "message": "Method not found"}
    print(json.dumps(answer), flush=True)
"""
"""A server without the SDK, of the protocol before its latest revision: it starts in milliseconds."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("mcp") / "plain.py"
    path.write_text(PLAIN)
    return [sys.executable, "-S", "-E", str(path)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("mcp") / "notes.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


_others = set[int]()
"""Children that were there before the test: graders and boxes of other tests."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child that a test started outlives it."""
    _others.clear()
    _others.update(children())
    yield
    close_servers()
    assert children() == set()


def children() -> set[int]:
    """Pids of the live children of this process that came since the test began."""
    found = set[int]()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found - _others


def kill_child(pid: int) -> None:
    """SIGKILL for a server that this process started."""
    assert pid in children()
    os.kill(pid, signal.SIGKILL)


class TestDescriptions:
    @pytest.mark.parametrize(
        ("value", "server"),
        [
            ("http://127.0.0.1:1/mcp", McpServer(url="http://127.0.0.1:1/mcp")),
            (["run", "it"], McpServer(command=("run", "it"))),
            (
                {"command": ["run"], "env": {"B": "2", "A": "1"}, "timeouts": {"slow": 60.0}, "lifetime": "process"},
                McpServer(("run",), env=(("A", "1"), ("B", "2")), timeouts=(("slow", 60.0),), lifetime="process"),
            ),
        ],
    )
    def test_read(self, value: Any, server: McpServer) -> None:
        assert read_server(value) == server
        assert hash(read_server(value)) == hash(server)

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("run it", "a URL or a command"),
            ([], "a URL, a command"),
            (7, "a URL, a command"),
            ({}, "either a command or a url"),
            ({"url": "http://a", "command": ["b"]}, "either a command or a url"),
            ({"uri": "http://a"}, "unknown uri"),
            ({"url": "http://a", "lifetime": "ever"}, "lifetime"),
            ({"url": "http://a", "timeout_s": 0}, "over 0 s"),
        ],
    )
    def test_what_is_no_server_is_refused(self, value: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            read_server(value)

    def test_deadlines_by_tool(self) -> None:
        server = read_server({"url": "http://a", "timeout_s": 5, "timeouts": {"slow": 60}})
        assert (server.deadline("slow"), server.deadline("other")) == (60, 5)

    def test_a_program_that_is_not_there_is_said_at_once(self) -> None:
        with pytest.raises(EnvError, match="there is no program '/nowhere/server'"):
            McpTools(read_server(["/nowhere/server"]))

    def test_an_address_where_nobody_listens_is_a_fault(self) -> None:
        with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
            McpTools(read_server("http://127.0.0.1:9/mcp"))


def ask(name: str, arguments: str = "{}", call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def say(*calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.mark.walk
class TestPrograms:
    def test_its_last_words_are_in_the_message_when_it_does_not_start(self) -> None:
        with pytest.raises(EnvError, match="its last words: bad luck"):
            McpTools(read_server([sys.executable, "-c", "import sys; sys.exit('bad luck')"]))

    def test_one_that_never_speaks_is_ended_at_its_deadline(self) -> None:
        silent = {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_s": 0.3}
        with pytest.raises(EnvError, match=r"not ready after 0.3 s"):
            McpTools(read_server(silent))

    def test_an_environment_plays_on_a_server_of_its_own(self, program: list[str]) -> None:
        class Notes(McpEnv):
            mcp_servers: ClassVar[dict[str, Any]] = {
                "notes": {"command": program, "prefix": "notes_", "timeouts": {"hang": 0.2}}
            }
            tasks = (Task("go", 2, "t"),)

            @tool
            def double(self, x: int) -> int:
                return 2 * x

            def score(self, task: Task, transcript: Any) -> float:
                return float(any(call.name == "notes_add" and call.result == str(task.answer) for call in self.calls))

        env = Notes()
        names = [spec["function"]["name"] for spec in env.tool_specs()]
        assert names == ["double", "notes_add", "notes_read", "notes_refuse", "notes_pid", "notes_hang"]
        assert env.tool_specs()[1]["function"]["parameters"]["required"] == ["text"]
        env.reset(seed=0)
        got = env.step(
            say(
                ask("notes_add", '{"text": "日本"}', "a"),
                ask("notes_add", "[1]", "b"),
                ask("notes_add", '{"nothing": 1}', "c"),
                ask("notes_refuse", "{}", "d"),
                ask("nowhere", "{}", "e"),
                ask("double", '{"x": 2}', "f"),
                ask("notes_hang", "{}", "g"),
                ask("notes_read", "", "h"),
            )
        )[0]
        assert [message["tool_call_id"] for message in got] == list("abcdefgh")
        texts = [message["content"] for message in got]
        assert (texts[0], texts[5], texts[7]) == ("1", "4", "日本")
        assert texts[1] == "Error: arguments must be a JSON object, got list"
        assert "Field required" in texts[2]
        assert "not today" in texts[3]
        assert "notes_add" in texts[4]
        assert texts[6] == "Error: tool hang ran past 0.2 s"
        assert env.tool_errors == 5
        again = Notes()  # what the server offers is known: nothing is started before the first episode
        assert (len(children()), again.tool_specs()) == (1, env.tool_specs())
        again.close()
        env.close()
        assert children() == set()

    def test_a_server_killed_in_mid_call_is_a_fault_and_the_next_episode_has_a_new_one(self, plain: list[str]) -> None:
        env = McpEnv(tasks=[Task("go", None, "t")], mcp_servers={"notes": plain})
        env.reset(seed=0)
        env.step(say(ask("add", '{"text": "a"}')))
        pid = int(env.step(say(ask("pid")))[0][0]["content"])
        killer = threading.Timer(0.3, kill_child, [pid])
        killer.start()
        episode = play(env, ScriptedPolicy([say(ask("hang"))]), Limits(), task=0, seed=0)
        killer.join()
        assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)
        assert "tool hang" in (episode.error or "")
        assert "notes begin" in (episode.error or "")
        env.reset(seed=0)
        assert env.step(say(ask("add", '{"text": "b"}')))[0][0]["content"] == "1"
        env.close()

    def test_lifetimes(self, plain: list[str]) -> None:
        def count(env: McpEnv) -> str:
            env.reset(seed=0)
            return str(env.step(say(ask("add", '{"text": "a"}')))[0][0]["content"])

        def made(lifetime: str) -> McpEnv:
            server = {"command": plain, "lifetime": lifetime, "tools": ["add"]}
            return McpEnv(tasks=[Task("go", None, "t")], mcp_servers={"notes": server})

        env = made("episode")
        assert [count(env), count(env)] == ["1", "1"]
        assert [spec["function"]["name"] for spec in env.tool_specs()] == ["add"]
        env.close()
        env = made("process")
        assert [count(env), count(env)] == ["1", "2"]
        env.close()
        other = made("process")
        assert count(other) == "3"
        other.close()
        assert len(children()) == 1

    def test_the_program_ends_with_a_process_that_is_killed(self, plain: list[str]) -> None:
        """It is stuck in a call and reads nothing, so that no closed pipe can have ended it."""
        read, write = os.pipe()
        forked = os.fork()
        if forked == 0:
            try:
                tools = McpTools(read_server(plain))
                os.write(write, tools.call("pid", {}).encode())
                tools.call("stick", {})
            finally:
                os._exit(1)
        os.close(write)
        assert select.select([read], [], [], 60)[0], "the server did not start"
        ended = os.pidfd_open(int(os.read(read, 20)))
        try:
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
            assert select.select([ended], [], [], 20)[0], "the server outlived its parent"
        finally:
            os.close(ended)
            os.close(read)


FROM_PYPI = '''
from fastmcp import FastMCP

server = FastMCP("sums")

@server.tool
def divide(a: int, b: int) -> float:
    """Divides."""
    return a / b
'''


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_server_that_comes_from_pypi_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """fastmcp's command line serves what is written for it; nothing of it is in our environment."""
    venv.create(tmp_path / "env", with_pip=True)
    install = [str(tmp_path / "env" / "bin" / "python"), "-m", "pip", "install", "--quiet", "fastmcp>=4,<5"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=500)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "sums.py").write_text(FROM_PYPI)
    command = [str(tmp_path / "env" / "bin" / "fastmcp"), "run", str(tmp_path / "sums.py"), "--no-banner"]
    env = McpEnv(tasks=[Task("go", None, "t")], mcp_servers={"sums": {"command": command, "start_s": 120}})
    env.reset(seed=0)
    asked = [ask("divide", '{"a": 1, "b": 2}'), ask("divide", '{"a": 1, "b": 0}'), ask("divide", '{"a": "x"}')]
    right, zero, wrong = (message["content"] for message in env.step(say(*asked))[0])
    env.close()
    assert right == "0.5"
    assert zero.startswith("Error: ")
    assert wrong.startswith("Error: ")


@pytest.fixture(scope="module")
def http() -> Iterator[tuple[str, Any]]:
    """A streamable-HTTP server in a thread, whose tools come in pages of two; its URL and its uvicorn server."""
    import uvicorn
    from mcp import types
    from mcp.server.lowlevel import Server

    names = ("one", "two", "three", "four", "five")
    schema = {"type": "object", "properties": {}}

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        start = int(params.cursor or 0) if params else 0
        tools = [types.Tool(name=name, description=name, input_schema=schema) for name in names[start : start + 2]]
        return types.ListToolsResult(tools=tools, next_cursor=str(start + 2) if start + 2 < len(names) else None)

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        if params.name == "five":
            await asyncio.sleep(30)
        if params.name == "four":
            raise ValueError("a bug of the server")
        if params.name == "three":
            image = types.ImageContent(type="image", data="QQ==", mime_type="image/png")
            return types.CallToolResult(content=[types.TextContent(type="text", text="see"), image])
        if params.name == "two":
            return types.CallToolResult(content=[], structured_content={"day": "日"})
        return types.CallToolResult(content=[types.TextContent(type="text", text="no such luck")], is_error=True)

    server = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    config = uvicorn.Config(server.streamable_http_app(), host="127.0.0.1", port=0, log_config=None)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    for _ in range(1000):
        if running.started:
            break
        thread.join(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/mcp", running
    running.should_exit = True
    thread.join(10)


def _until_it_fails(tools: McpTools) -> None:
    """A connection that is open can serve one call more."""
    for _ in range(100):
        tools.call("two", {})


class TestHttp:
    def test_pages_results_and_errors(self, http: tuple[str, Any]) -> None:
        tools = McpTools(read_server({"url": http[0], "timeout_s": 20, "timeouts": {"five": 0.2}}))
        assert [spec["function"]["name"] for spec in tools.specs] == ["one", "two", "three", "four", "five"]
        with pytest.raises(ToolError, match="no such luck"):
            tools.call("one", {})
        assert tools.call("two", {}) == '{"day": "日"}'
        assert tools.call("three", {}) == "see\n[image image/png]"
        with pytest.raises(ToolTimeout, match=r"five ran past 0.2 s"):
            tools.call("five", {})
        assert tools.broken
        assert tools.call("two", {})
        with pytest.raises(EnvError, match="tool four"):
            tools.call("four", {})
        tools.close()
        with pytest.raises(EnvError, match="closed"):
            tools.call("two", {})

    def test_two_tools_of_one_name_and_one_that_is_not_there_are_refused(self, http: tuple[str, Any]) -> None:
        with pytest.raises(ValueError, match="two tools are called 'one': give the MCP server 'b' a prefix"):
            McpEnv(mcp_servers={"a": http[0], "b": {"url": http[0]}})
        with pytest.raises(EnvError, match="no tool 'six'"):
            McpEnv(mcp_servers={"a": {"url": http[0], "tools": ["six"]}})

    def test_calls_of_one_message_run_at_the_same_time(self, http: tuple[str, Any]) -> None:
        class Side(McpEnv):
            parallel: ClassVar[bool] = True
            tasks = (Task("go", None, "t"),)

        env = Side(mcp_servers={"a": {"url": http[0], "timeouts": {"five": 0.3}}})
        env.reset(seed=0)
        got = env.step(say(ask("five", "{}", "x"), ask("two", "{}", "y"), ask("five", "{}", "z")))[0]
        assert [message["tool_call_id"] for message in got] == ["x", "y", "z"]
        assert "日" in got[1]["content"]
        env.close()

    def test_a_server_that_went_away_is_a_fault(self, http: tuple[str, Any]) -> None:
        tools = McpTools(read_server({"url": http[0], "timeout_s": 20}))
        http[1].should_exit = True
        while http[1].servers and any(server.is_serving() for server in http[1].servers):
            threading.Event().wait(0.01)
        with pytest.raises(EnvError, match="MCP server"):
            _until_it_fails(tools)
        tools.close()
