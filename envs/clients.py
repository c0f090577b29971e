"""One official `openai` client for all who call models from this process for the same purpose, on the process's loop thread.

Nothing goes in; a client comes out that is called through `post` with an absolute URL. Closing waits for its connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from palestra.envs import background

if TYPE_CHECKING:
    import openai

CLOSE_S = 10.0
"""Longest wait for connections to close, seconds."""


class SharedClient:
    """Made at its first use, and made anew where a forked child has a new loop. Without a deadline, a bound or retries of its own."""

    def __init__(self, *, trust_env: bool) -> None:
        """`trust_env`: whether the environment's proxies are used."""
        self._trust_env = trust_env
        self._made: tuple[asyncio.AbstractEventLoop, openai.AsyncOpenAI] | None = None

    def get(self) -> openai.AsyncOpenAI:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = loop, self._make()
        return self._made[1]

    def _make(self) -> openai.AsyncOpenAI:
        import httpx2
        import openai

        # 0 lifts aiohttp's limit of 100 connections, which None would leave in place.
        limits = httpx2.Limits(max_connections=0, max_keepalive_connections=None, keepalive_expiry=30.0)
        http = openai.DefaultAioHttpClient(limits=limits, trust_env=self._trust_env, timeout=None)
        return openai.AsyncOpenAI(
            api_key="per-call", base_url="http://per-call", http_client=http, max_retries=0, timeout=None
        )

    def close(self) -> None:
        """Closes its connections; the next call opens new ones."""
        made, self._made = self._made, None
        if made is not None and made[0] is background.loop():
            background.call(made[1].close(), CLOSE_S)
