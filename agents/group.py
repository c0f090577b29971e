"""Groups: the rollouts of one task, played side by side.

An assignment goes in; each rollout opens its session, plays, and closes the session with its `Episode`, whatever
happens to it or to its siblings. The first one goes ahead until its first reply, so that the engine has the shared
prompt in its cache when the others come.

It waits for a free thread, for the leader's first reply, and for the episodes; every wait has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.agents.play import Env, infra_episode, message_env
from palestra.agents.players import Player
from palestra.agents.types import GroupAssignment, Limits, SessionHandle, SessionHost
from palestra.envs.types import Episode, Task

logger = logging.getLogger(__name__)

QUEUE_ROUNDS = 10
"""How many whole episodes a rollout waits for a free thread."""
GRACE_S = 30.0
"""How much longer than its deadline an episode may take to end by itself: one tool call that is under way, and the
grader.
"""


class EpisodeThreads:
    """A thread per episode, at most `concurrency` at a time. Daemon threads: one that hangs neither fills a pool nor
    holds up the exit.
    """

    def __init__(self, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.concurrency = concurrency
        self._slots = threading.BoundedSemaphore(concurrency)

    def start(self, work: Callable[[], None], name: str, timeout_s: float) -> Callable[[], None]:
        """Runs `work` in a thread as soon as a slot is free. Returns what gives the slot back early, for a thread that
        hangs.

        Raises:
            TimeoutError: no slot was free for `timeout_s` seconds.
        """
        if not self._slots.acquire(timeout=timeout_s):
            raise TimeoutError(f"no free thread after {timeout_s:g} s: all {self.concurrency} are playing episodes")
        given_back = threading.Lock()

        def give_back() -> None:
            if given_back.acquire(blocking=False):
                self._slots.release()

        def run() -> None:
            try:
                work()
            finally:
                give_back()

        threading.Thread(target=run, daemon=True, name=name).start()
        return give_back


@dataclass(frozen=True, slots=True)
class Players:
    """What a worker plays episodes with."""

    make_env: Callable[[], Env]
    """Called once per rollout, in its own thread."""
    player: Player


def run_group(
    assignment: GroupAssignment,
    players: Players,
    host: SessionHost,
    limits: Limits,
    threads: EpisodeThreads,
) -> list[Episode]:
    """Plays the group, or the rollouts of it that the assignment names; all have the same task and seed. Blocks until each has
    ended, or is given up after its deadline.

    Returns:
        One episode per rollout, in the order of `assignment.rollouts`.
    """
    first_reply = threading.Event()
    rollouts = [
        _Rollout(assignment, index, players, host, limits, first_reply, assignment.task)
        for index in assignment.rollouts
    ]
    leader, followers = rollouts[0], rollouts[1:]
    if not followers:
        first_reply.set()  # nobody waits for it
    _start(leader, threads)
    if followers:
        patience = limits.deadline_s + GRACE_S
        if not first_reply.wait(patience):
            logger.warning("group %s: the leader gave no sign in %g s; the others start", assignment.group_id, patience)
    for rollout in followers:
        _start(rollout, threads)
    return [rollout.wait() for rollout in rollouts]


def _start(rollout: _Rollout, threads: EpisodeThreads) -> None:
    name = f"episode-{rollout.assignment.group_id}-{rollout.index}"
    # Episodes of other groups may go first; each of them is bounded.
    queue_s = QUEUE_ROUNDS * (rollout.limits.deadline_s + GRACE_S)
    try:
        rollout.give_back = threads.start(rollout.run, name, queue_s)
    except TimeoutError as error:
        logger.exception("rollout %d of group %s never started", rollout.index, rollout.assignment.group_id)
        rollout.refuse(error)


@dataclass(slots=True)
class _Rollout:
    """One rollout of a group: its session, and its episode when that has ended."""

    assignment: GroupAssignment
    index: int
    players: Players
    host: SessionHost
    limits: Limits
    first_reply: threading.Event
    task: Task | int
    give_back: Callable[[], None] = lambda: None
    began: float = field(default_factory=time.monotonic)
    handle: SessionHandle | None = None
    episode: Episode | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def task_id(self) -> str:
        """Until an environment has looked an index up, the index stands for the id."""
        task = self.task
        return task.id if isinstance(task, Task) else f"#{task}"

    def run(self) -> None:
        """The whole rollout, in its own thread; it raises nothing."""
        self.began = time.monotonic()
        env: Env | None = None
        try:
            try:
                env = self.players.make_env()
                self.task = task = message_env(env).task_of(self.task)
            finally:  # a session is opened for every rollout: a group is complete when each of them was closed
                handle = self._adopt(self.host.open_session(self.assignment, self.index, self.task_id))
            episode = self.players.player.play(
                env, self.host, handle, self.limits, task, self.assignment.seed, self.first_reply
            )
        except Exception as error:
            logger.exception("rollout %d of group %s could not be played", self.index, self.assignment.group_id)
            episode = infra_episode(self.task_id, error)
        finally:
            self.first_reply.set()
        self._close(episode)
        _close_env(env)

    def wait(self) -> Episode:
        """The episode; one that has not ended a while after its deadline is given up, and its session is closed."""
        if not self.ended.wait(max(0.0, self.began + self.limits.deadline_s + GRACE_S - time.monotonic())):
            fault = TimeoutError(f"the episode's thread did not end within {GRACE_S:g} s after its deadline")
            self._close(infra_episode(self.task_id, fault))
            self.give_back()
            self.ended.wait(GRACE_S)  # its thread may be about to close the session
        assert self.episode is not None, "an ended rollout has its episode"
        return self.episode

    def refuse(self, error: BaseException) -> None:
        """Ends a rollout that got no thread. Its session is opened and closed all the same, so that the group
        completes.
        """
        try:
            self._adopt(self.host.open_session(self.assignment, self.index, self.task_id))
        except Exception:
            logger.exception(
                "the session of rollout %d of group %s was not opened", self.index, self.assignment.group_id
            )
        self._close(infra_episode(self.task_id, error))

    def _adopt(self, handle: SessionHandle) -> SessionHandle:
        with self.lock:
            given_up = self.episode
            if given_up is None:
                self.handle = handle
                return handle
        self.host.close_session(handle, given_up)
        raise TimeoutError("the session was opened after the rollout had been given up")

    def _close(self, episode: Episode) -> None:
        with self.lock:
            if self.episode is not None:
                return  # given up meanwhile, or ended just before that: the first one counts
            self.episode = episode
        try:
            if self.handle is not None:
                self.host.close_session(self.handle, episode)
        except Exception as error:
            logger.exception(
                "the session of rollout %d of group %s was not closed", self.index, self.assignment.group_id
            )
            self.episode = infra_episode(self.task_id, error, like=episode)
        finally:
            self.ended.set()


def _close_env(env: Env | None) -> None:
    try:
        if env is not None:
            env.close()
    except Exception:
        logger.exception("an environment could not be closed")
