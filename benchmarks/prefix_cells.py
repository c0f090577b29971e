"""How much of the prompts two engines find in their caches: by the router's policy, and played by Palestra.

In: a router's URL and the engines behind it. Out: shares, 0 to 1: cached prompt tokens over prompt tokens, with the bound that the prompts
allow. Caches are emptied before each cell. It waits for the engines' replies, each at most `REPLY_S` seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

GROUPS, SIZE = 8, 8
PROMPT, SAMPLED, ADDED = 300, 16, 60
"""Tokens of a first prompt, of a reply, and of what comes between two turns."""
REPLY_S = 120.0
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the engine counted it."""

    prompt: int
    cached: int
    reply: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to play all sessions."""

    key: str
    """none, session or group: what the routing key is."""
    leader_first: bool
    turns: int = 1


def hit(sessions: Sequence[Sequence[Call]]) -> float:
    """Cached prompt tokens over prompt tokens."""
    calls = [call for session in sessions for call in session]
    return sum(call.cached for call in calls) / sum(call.prompt for call in calls)


def bound(groups: Sequence[Sequence[Sequence[Call]]]) -> float:
    """The largest share that these prompts allow on engines that keep all: of a group's first prompts all but one, and of later prompts
    what came before, are known. An engine computes the last token of a prompt and of a reply anew."""
    known = total = 0
    for sessions in groups:
        for place, session in enumerate(sessions):
            before = 0
            for turn, call in enumerate(session):
                total += call.prompt
                known += (call.prompt - 1 if place else 0) if turn == 0 else before
                before = call.prompt + call.reply - 1
    return known / total


async def flush(http: aiohttp.ClientSession, workers: Sequence[str]) -> None:
    """Empties the engines' caches."""
    for worker in workers:
        async with http.post(f"{worker}/flush_cache") as reply:
            reply.raise_for_status()


class RawSessions:
    """Sessions in token ids, straight to a router's /generate."""

    def __init__(self, router: str, workers: Sequence[str], vocab: int) -> None:
        self.router, self.workers, self.vocab = router, workers, vocab
        self._seed = 0

    async def play(self, cell: Cell) -> list[list[list[Call]]]:
        """All groups at once: per group and session its calls."""
        timeout = aiohttp.ClientTimeout(total=REPLY_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            await flush(http, self.workers)
            return list(await asyncio.gather(*(self._group(http, cell, number) for number in range(GROUPS))))

    async def _group(self, http: aiohttp.ClientSession, cell: Cell, number: int) -> list[list[Call]]:
        self._seed += 1
        name, draw = f"g{self._seed}", random.Random(self._seed)
        prompt = [draw.randrange(10, self.vocab) for _ in range(PROMPT)]
        begun = asyncio.Event()

        def start(index: int) -> asyncio.Task[list[Call]]:
            return asyncio.create_task(self._session(http, cell, name, index, prompt, begun))

        sessions = [start(0)]
        if cell.leader_first:
            await begun.wait()
        sessions += [start(index) for index in range(1, SIZE)]
        return list(await asyncio.gather(*sessions))

    async def _answer(self, http: aiohttp.ClientSession, body: Any, headers: dict[str, str]) -> Any:
        """A router whose retries are off answers 500 where an engine has just closed an idle connection: such a call is made again."""
        for attempt in range(ATTEMPTS):
            async with http.post(f"{self.router}/generate", json=body, headers=headers) as reply:
                if reply.status != 500 or attempt == ATTEMPTS - 1:
                    reply.raise_for_status()
                    return await reply.json()
        raise AssertionError("the last attempt returns or raises")

    async def _session(
        self, http: aiohttp.ClientSession, cell: Cell, group: str, index: int, prompt: list[int], begun: asyncio.Event
    ) -> list[Call]:
        draw = random.Random(f"{group}-{index}")
        key = {"none": None, "group": group, "session": f"{group}-{index}"}[cell.key]
        headers = {} if key is None else {"X-SMG-Routing-Key": key}
        ids, calls = list(prompt), []
        for _ in range(cell.turns):
            params = {"temperature": 1.0, "max_new_tokens": SAMPLED, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
            try:
                answer = await self._answer(http, body, headers)
            finally:
                begun.set()
            calls.append(Call(len(ids), answer["meta_info"]["cached_tokens"], len(answer["output_ids"])))
            ids = [*ids, *answer["output_ids"], *(draw.randrange(10, self.vocab) for _ in range(ADDED))]
        return calls
