"""Sessions that a former process of the service, or a lost worker, left open, and the replies on record that are given again.

In: what the log has of a session. Out: the session, with which its caller goes on (opened by somebody else than the plan), or which is
played again from its start (the plan's own): then each recorded reply goes to the request that it answered, and sampling begins where the
record ends. Nothing here waits, but for the end of a session whose requests are not those on record.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from palestra.server.gateway.prompts import Place
from palestra.server.gateway.session import Session, SessionLimits
from palestra.server.gateway.tree import RAW_TOOLS, Node, same_message
from palestra.server.gateway.types import ModelCall
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import StoredSession
from palestra.server.types import Completion, SessionError, Trajectory, Turn

DIVERGED = "replay_diverged"
"""Reason of a session whose environment or agent did something else when it was played again."""


def restored(stored: StoredSession, trajectory: Trajectory, codec: TokenCodec) -> Session:
    """A session of somebody else, as its caller left it: what was said can be continued, and branch ends can be asked for again."""
    meta = stored.record.meta
    session = Session(
        stored.record,
        msgspec.convert(meta["limits"], SessionLimits),
        bytes.fromhex(meta["key"]),
        date=meta["date"],
        turns=max((turn.index + 1 for turn in trajectory.turns), default=0),
        started=sum(bool(turn.messages) or turn.delivered for turn in trajectory.turns),
        sampled=stored.sampled_tokens,
        opened_at=time.monotonic() - max(time.time() - stored.opened_at, 0.0),
    )
    for turn in trajectory.turns:
        parent = None if turn.parent is None else session.tree.find(turn.parent)
        if turn.parent is not None and parent is None:
            continue  # extends what nobody got: nothing can continue it
        if not turn.messages:
            continue  # tokens past a stop text
        tools = turn.tools if parent is None else parent.tools
        node = Node(
            index=turn.index,
            parent=parent,
            messages=turn.messages[:-1],
            reply=turn.messages[-1],
            delta=array("i", turn.prompt_delta.tobytes()),
            completion=array("i", turn.completion_ids.tobytes()),
            opened=turn.opened,
            tools=tools,
            length=(parent.length if parent is not None else 0) + len(turn.prompt_delta) + len(turn.completion_ids),
            delivered=turn.delivered,
        )
        if tools == RAW_TOOLS:
            node.text = codec.decode(node.ids())
        session.tree.add(node)
        session.orphans.append(node)
    session.orphans = [node for node in session.orphans if not node.children]
    return session


def take_orphan(session: Session, call: ModelCall, place: Place) -> Node | None:
    """The turn that a request repeats, where it ends a branch and was recorded before the restart. Each is given out once: a second such
    request wants another sample."""
    if call.n != 1 or call.prompt is not None:
        return None
    for node in session.orphans:
        same = node.parent is place.base and node.tools == place.tools_key and len(node.messages) == len(place.new)
        if same and not node.children and all(map(same_message, node.messages, place.new)):
            session.orphans.remove(node)
            return node
    return None


def recorded(log: TurnLog, session: Session, node: Node) -> Turn:
    """The turn as it is on record."""
    trajectory = log.reader.read_trajectory(session.record.rollout_id, session.record.attempt)
    return next(turn for turn in trajectory.turns if turn.index == node.index)


def said_in(turn: Turn, stops: Sequence[str], codec: TokenCodec) -> Completion:
    """The completion of a recorded turn. `stops`: stop texts of its request; which of them ended it is not on record, but in the tokens."""
    ids = tuple(turn.completion_ids.tolist())
    text = codec.decode(ids) if stops and turn.finish_reason == "stop" else ""
    return Completion(
        ids,
        tuple(turn.logprobs.tolist()),
        turn.finish_reason,
        turn.spans,
        turn.cached_tokens,
        stop_text=next((stop for stop in stops if stop in text), None),
    )


class Replay:
    """What is on record of a session that is played again: every reply goes, once, to the request that it answered.

    Requests are compared by what the model saw of them: the ids of the prompt. Where a recorded request is awaited and another one comes,
    the session is another episode than the one on record.
    """

    def __init__(self, turns: Sequence[Turn], diverged: Callable[[], Awaitable[None]]) -> None:
        """`diverged` takes the session out; it is awaited before the request is refused."""
        # Tokens past a stop text answered nobody; what an abort cut short is no reply, unless somebody took it for one.
        self._turns = {
            turn.index: turn for turn in turns if turn.messages and (turn.delivered or turn.finish_reason != "abort")
        }
        self._due = {turn.index for turn in turns if turn.delivered}
        self._given: set[int] = set()
        self._diverged = diverged

    @property
    def unplayed(self) -> int:
        """Replies that somebody had got and nobody has asked for again: the record is not yet a part of what is played."""
        return len(self._due)

    async def lead(self, session: Session, call: ModelCall, place: Place) -> list[Turn]:
        """The recorded turns that answer a request, one per reply that it asks for; none where it goes on from the end of the record.

        Raises:
            SessionError: 410, a recorded request is awaited here and this is another one. The session is discarded by then.
        """
        here = None if place.base is None else place.base.index
        fitting = [turn for turn in self._turns.values() if turn.parent == here and self._free(turn, session)]
        fitting = [turn for turn in fitting if _same_prompt(turn, place)]
        # A reply that its caller never got is as good a sample as another, but the episode went on from the one that was got.
        fitting.sort(key=lambda turn: (not turn.delivered, turn.index))
        if len(fitting) >= call.n:
            taken = sorted(fitting[: call.n], key=lambda turn: turn.index)
            self._given.update(turn.index for turn in taken)
            self._due -= self._given
            return taken
        if all(self._turns[index].parent != here for index in self._due):
            return []
        if not session.closed:
            await self._diverged()
        name = f"{session.record.rollout_id} attempt {session.record.attempt}"
        raise SessionError(
            f"session {name} was played again and this request is none of those on record: its environment or agent is not deterministic; "
            "the rollout begins anew",
            410,
            DIVERGED,
        )

    def _free(self, turn: Turn, session: Session) -> bool:
        """Whether its reply may be given: it was not yet, or its caller was gone before it had it."""
        if turn.index not in self._given:
            return True
        node = session.tree.find(turn.index)
        return node is not None and not node.delivered and not node.followed


def _same_prompt(turn: Turn, place: Place) -> bool:
    if turn.opened != len(place.opened) or (turn.parent is None and turn.tools != place.tools_key):
        return False
    return np.array_equal(turn.prompt_delta, np.asarray(place.delta, np.int32))
