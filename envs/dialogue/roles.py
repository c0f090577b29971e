"""Environments that several roles play, each with its own conversation and its own reward.

`agents/roles.py` plays all roles with a policy each. As an ordinary gymnasium environment, one role is played and the
others are scripted partners inside the environment, so that everything else (training, evaluation, checks) works as
usual. Nothing here waits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv, Response
from palestra.envs.spaces import Observation, fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.types import EnvError, Message, Reward, StopReason, Task


@dataclass(frozen=True, slots=True)
class Turn:
    """What comes of one role's message."""

    heard: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    """New messages by the role that gets them; who is left out hears nothing."""
    stop: StopReason | None = None
    """Set where this ends the episode for all."""


class RolesEnv(MessageEnv):
    """A `MessageEnv` of several roles. Subclasses give `roles` and `tasks`, and the methods below.

    Whose turn it is, is the environment's to say; a role that is not asked again simply waits.
    """

    roles: ClassVar[tuple[str, ...]]
    """Their names; the first one is played where nothing else is asked for."""

    def __init__(
        self,
        role: str | None = None,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`role`: the one that is played when this is used as an ordinary environment.

        Raises:
            ValueError: there is no such role.
        """
        self.role = self.roles[0] if role is None else role
        if self.role not in self.roles:
            raise ValueError(f"role must be one of {self.roles}, got {role!r}")
        super().__init__(render_mode, tasks)

    # What subclasses give.

    @abstractmethod
    def begin(self, task: Task) -> None:
        """Sets the episode up."""

    @abstractmethod
    def briefing(self, role: str) -> list[Message]:
        """What a role is told at the start; nobody else sees it."""

    @abstractmethod
    def turn_of(self) -> str:
        """The role that speaks next."""

    @abstractmethod
    def say(self, role: str, action: Message) -> Turn:
        """Takes a role's assistant message."""

    @abstractmethod
    def partner(self, role: str) -> Message:
        """What the scripted partner says in a role whose turn it is: by its task and what was said, nothing else."""

    @abstractmethod
    def role_score(self, role: str) -> Reward:
        """A role's reward; also where a limit cut the episode."""

    # As an environment of all roles.

    def reset_roles(self, task: Task | int, seed: int) -> dict[str, Observation]:
        """Starts an episode without partners: what each role is told.

        Raises:
            ValueError: there is no such task.
            EnvError: `begin` failed.
        """
        super().reset(seed=seed, options={"task": task})
        return {role: tuple(fresh(self.briefing(role))) for role in self.roles}

    def step_role(self, role: str, action: Message) -> Turn:
        """Takes the message of the role whose turn it is.

        Raises:
            EnvError: it is not its turn, or the environment has a fault; the episode has no reward.
        """
        with self._hook("say"):
            if role != self.turn_of():
                raise EnvError(f"it is {self.turn_of()}'s turn, not {role}'s")
            turn = self.say(role, action)
        self.done = turn.stop is not None
        return turn

    def finish_roles(self) -> dict[str, Reward]:
        """Ends the episode and scores every role. A grader's fault leaves the reward of its role unknown."""
        self.done = True
        return {role: self._role_reward(role) for role in self.roles}

    # As an ordinary environment of one role.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `MessageEnv.reset`. Partners whose turn it is have spoken already."""
        _, info = super().reset(seed=seed, options=options)
        with self._hook("partner"):
            heard, stop = self._partners()
        if stop is not None:
            raise EnvError(f"the partners ended the episode before {self.role} could speak")
        self._prompt = [*self.briefing(self.role), *heard]
        return tuple(fresh(self._prompt)), info

    def setup(self, task: Task) -> None:
        self.begin(task)

    def respond(self, action: Message) -> Response:
        turn = self.say(self.role, action)
        heard, stop = list(turn.heard.get(self.role, ())), turn.stop
        if stop is None:
            more, stop = self._partners()
            heard += more
        return Response(heard if stop is None else (), stop)

    def replay(self, transcript: Sequence[Message]) -> None:
        """A player by itself: its messages are said to the partners, in their order."""
        assert self.task is not None, "an episode has its task"
        self.begin(self.task)
        self._partners()
        for message in transcript:
            if message.get("role") == "assistant" and self.respond(message).stop is not None:
                return

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        return self.role_score(self.role)

    def _partners(self) -> tuple[list[Message], StopReason | None]:
        """Lets the partners speak until it is the played role's turn, or the end."""
        heard: list[Message] = []
        while (speaker := self.turn_of()) != self.role:
            turn = self.say(speaker, self.partner(speaker))
            heard += turn.heard.get(self.role, ())
            if turn.stop is not None:
                return heard, turn.stop
        return heard, None

    def _role_reward(self, role: str) -> Reward:
        try:
            return self.role_score(role)
        except Exception as error:  # noqa: BLE001 - a grader's fault is an unknown reward, not an exception
            return Reward(None, note=f"grader: {type(error).__name__}: {error}"[:500])
