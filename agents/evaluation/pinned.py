"""Episodes of one policy version: what another version had a part in is void, whatever its score.

A player and a version go in, a player comes out that looks up who sampled what before an episode counts. It waits for that look-up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from palestra.agents.evaluation.types import Row
from palestra.agents.play import Env, infra_episode
from palestra.agents.players import Player
from palestra.agents.types import Limits, SessionHandle, SessionHost
from palestra.envs.types import Episode, Task

VOID = "Void"
"""What the fault of a void episode begins with."""


@dataclass(frozen=True, slots=True)
class PinnedPlayer:
    """Plays as `player` does; an episode with tokens of another version has no reward, and says why."""

    player: Player
    version: int
    versions_of: Callable[[SessionHandle], frozenset[int]]
    """Which versions sampled a session's tokens. A fault of it is a fault of the episode: what nobody could check does not count."""

    def play(
        self,
        env: Env,
        host: SessionHost,
        handle: SessionHandle,
        limits: Limits,
        task: Task,
        seed: int,
        replied: threading.Event,
    ) -> Episode:
        """See `Player.play`."""
        episode = self.player.play(env, host, handle, limits, task, seed, replied)
        return pinned(episode, handle, self.version, self.versions_of)


def pinned(
    episode: Episode, handle: SessionHandle, version: int, versions_of: Callable[[SessionHandle], frozenset[int]]
) -> Episode:
    """The episode as it is, or void where another version had a part in it. One without a reward needs no look-up."""
    if episode.reward.value is None:
        return episode
    others = versions_of(handle) - {version}
    if not others:
        return episode
    told = ", ".join(map(str, sorted(others)))
    return infra_episode(
        episode.task_id, f"{VOID}: version {told} had a part in it, and {version} is evaluated", like=episode
    )


def is_void(row: Row) -> bool:
    """Whether another version took an episode its reward."""
    return row.error is not None and row.error.startswith(f"{VOID}:")
