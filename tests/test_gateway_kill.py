"""kill -9 of the service with 64 sessions in flight, twice: every acknowledged turn is there afterwards, once, and nobody was told."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from palestra.agents.types import SessionHandle
from palestra.server.client import ServiceClient
from palestra.server.rows import trajectory_rows
from tests.live import wait_for
from tests.served import Served

pytestmark = [pytest.mark.walk, pytest.mark.timeout(400)]
SESSIONS, TURNS = 64, 5


def play(handle: SessionHandle, number: int, heard: list[tuple[int, str]]) -> list[str]:
    """A plain client of the official library; the ids and texts of the replies that it got."""
    got: list[str] = []
    messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
    with OpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=12, timeout=60) as agent:
        for turn in range(TURNS):
            reply = agent.chat.completions.create(model="m", messages=messages, max_tokens=24)
            got.append(reply.id)
            heard.append((number, reply.id))
            messages += [
                reply.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": f"turn {turn} of {number}"},
            ]
    return got


def test_kill_9_with_64_sessions_in_flight(tmp_path: Path, tiny_moe: Path) -> None:
    served = Served(tmp_path, tiny_moe)
    try:
        client = served.up()
        handles = [client.open(max_turns=TURNS) for _ in range(SESSIONS)]
        heard: list[tuple[int, str]] = []
        with ThreadPoolExecutor(SESSIONS) as pool:
            runs = [pool.submit(play, handle, n, heard) for n, handle in enumerate(handles)]
            for share in (0.25, 0.6):
                wait_for(lambda share=share: len(heard) > share * SESSIONS * TURNS, "replies", 200)
                pid = served.pid("service")
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda pid=pid: served.ready() and served.pid("service") != pid, "the service's return", 100)
            acknowledged = [run.result(200) for run in runs]
        check(client, handles, acknowledged)
    finally:
        served.down()


def check(client: ServiceClient, handles: list[SessionHandle], acknowledged: list[list[str]]) -> None:
    """Delivered turns are the acknowledged replies, one to one and in one unbroken branch."""
    trained = 0
    for number, (handle, replies) in enumerate(zip(handles, acknowledged, strict=True)):
        client.reward(handle, 1.0)
        assert client.close_with(handle) == 1.0
        trajectory = client.trajectory(handle)
        delivered = [turn for turn in trajectory.turns if turn.delivered]
        assert [f"{turn.index}" for turn in delivered] == [reply.rpartition("-")[2] for reply in replies]
        parents = [turn.parent for turn in delivered]
        assert parents == [None, *(turn.index for turn in delivered[:-1])]
        assert all(f"{number}" in str(turn.messages[-2]["content"]) for turn in delivered)
        (row,) = trajectory_rows(trajectory)
        assert row.loss_mask.sum() == sum(len(turn.completion_ids) for turn in delivered)
        trained += int(row.loss_mask.sum())
    ledger = client.ledger()
    assert ledger["balanced"]
    assert ledger["sampled"] >= trained > 0
