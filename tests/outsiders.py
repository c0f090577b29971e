"""Outsiders: plain clients of the official library in sessions of a service, and what must be true of what they were told."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from palestra.agents.types import SessionHandle
from palestra.server.client import ServiceClient
from palestra.server.rows import trajectory_rows


def play(
    handle: SessionHandle, number: int, heard: list[tuple[int, str]], turns: int, max_tokens: int = 24
) -> list[str]:
    """A plain client of the official library; the ids and texts of the replies that it got."""
    got: list[str] = []
    messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
    with OpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=12, timeout=60) as agent:
        for turn in range(turns):
            reply = agent.chat.completions.create(model="m", messages=messages, max_tokens=max_tokens)
            got.append(reply.id)
            heard.append((number, reply.id))
            messages += [
                reply.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": f"turn {turn} of {number}"},
            ]
    return got


def check_acknowledged(client: ServiceClient, handles: list[SessionHandle], acknowledged: list[list[str]]) -> None:
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
