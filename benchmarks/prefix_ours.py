"""Palestra's own play for the prefix benchmark: `run_group` through the real service, its gateway and its engine client.

In: a router and its engines. Out: calls as the turn log has them. Conversations are digits, each of which the tiny tokenizer writes as one
token, so that prompts are as long as those which go to the router alone. It waits for the episodes, each with a deadline.
"""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.prefix_cells import ADDED, GROUPS, PROMPT, REPLY_S, SAMPLED, SIZE, Call
from palestra.agents.chat import ChatPolicy
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import PolicyPlayer
from palestra.agents.types import GroupAssignment, Limits, SamplingParams, SessionHandle
from palestra.envs.core import MessageEnv, Response
from palestra.envs.types import Message, StopReason, Task
from palestra.server.client import ServiceClient
from palestra.server.renderer.registry import load_renderer
from palestra.server.types import EngineError, Trajectory
from palestra.server.workers.types import EnginePlace
from tests.live import TOKEN, LiveService, settings


class Digits(MessageEnv):
    """Answers every message with digits, for a number of turns."""

    def __init__(self, prompts: list[str], turns: int, added: int) -> None:
        super().__init__(tasks=[Task(prompt, id=str(i)) for i, prompt in enumerate(prompts)])
        self.turns, self.added, self.turn = turns, added, 0
        self.draw = random.Random()

    def setup(self, task: Task) -> None:
        """See `MessageEnv.setup`."""
        self.turn = 0

    def respond(self, action: Message) -> Response:
        """See `MessageEnv.respond`."""
        self.turn += 1
        if self.turn >= self.turns:
            return Response(stop=StopReason.ENV_DONE)
        return Response([{"role": "user", "content": digits(self.draw, self.added)}])


def digits(draw: random.Random, count: int) -> str:
    """So many digits."""
    return "".join(draw.choice("0123456789") for _ in range(count))


def calls_of(trajectory: Trajectory) -> list[Call]:
    """A session's calls, in their order."""
    calls: list[Call] = []
    length = 0
    for turn in trajectory.turns:
        length += len(turn.prompt_delta)
        calls.append(Call(length, turn.cached_tokens, len(turn.completion_ids)))
        length += len(turn.completion_ids)
    return calls


class OurSessions:
    """Groups that Palestra plays."""

    def __init__(self, place: EnginePlace, model: Path, home: Path) -> None:
        self.place, self.model, self.home = place, model, home
        renderer = load_renderer(model)
        self._around = len(renderer.render([{"role": "user", "content": ""}]).ids)
        """Tokens of a prompt that are not the user's."""
        self._seed = 0

    def play(self, turns: int) -> list[list[list[Call]]]:
        """All groups at once: per group and session its calls.

        Raises:
            EngineError: an episode ended by a fault.
        """
        self._seed += 1
        store = self.home / f"ours-{self._seed}"
        shutil.rmtree(store, ignore_errors=True)
        chosen: dict[str, Any] = {
            "max_turns": turns,
            "max_response": SAMPLED,
            "max_context": 2000,
            "deadline_s": REPLY_S,
        }
        try:
            with LiveService(settings(store, "", engine=self.place, **chosen), self.model) as live:
                for worker in self.place.workers:
                    httpx.post(f"{worker}/flush_cache", timeout=REPLY_S).raise_for_status()
                return self._groups(ServiceClient(live.url, TOKEN), turns)
        finally:
            shutil.rmtree(store, ignore_errors=True)

    def _groups(self, client: ServiceClient, turns: int) -> list[list[list[Call]]]:
        draw = random.Random(self._seed)
        prompts = [digits(draw, PROMPT - self._around) for _ in range(GROUPS)]
        sampling = SamplingParams(max_tokens=SAMPLED)

        def policy(handle: SessionHandle) -> ChatPolicy:
            return ChatPolicy(handle, sampling)

        players = Players(lambda: Digits(prompts, turns, ADDED - self._around), PolicyPlayer(policy))
        threads = EpisodeThreads(GROUPS * SIZE)

        def play(number: int) -> list[list[Call]]:
            assignment = GroupAssignment(f"b{self._seed}-{number}", SIZE, 0, number, number)
            episodes = run_group(assignment, players, client, Limits(turns, REPLY_S), threads)
            if faults := [episode.error for episode in episodes if episode.stop_reason is StopReason.INFRA]:
                raise EngineError(f"an episode ended by a fault: {faults[0]}")
            handles = [SessionHandle(f"{assignment.group_id}-{i}", 0, "", "") for i in range(SIZE)]
            return [calls_of(client.trajectory(handle)) for handle in handles]

        with ThreadPoolExecutor(GROUPS) as pool:
            return list(pool.map(play, range(GROUPS)))
