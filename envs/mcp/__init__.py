"""MCP servers as tools, over the official SDK (extra `mcp`), which is imported when the first server is reached."""

from palestra.envs.mcp.connection import McpTools
from palestra.envs.mcp.env import McpEnv
from palestra.envs.mcp.pool import close_servers
from palestra.envs.mcp.servers import McpServer, read_server

__all__ = ["McpEnv", "McpServer", "McpTools", "close_servers", "read_server"]
