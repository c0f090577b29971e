"""Replies that a former process of the service recorded and may not have sent: a caller that repeats its request gets them.

In: a session that was found again after a restart, and the place of a request. Out: the recorded turn that answers this very request, or
nothing. The log is read for it; nothing else is waited for.
"""

from __future__ import annotations

from palestra.server.gateway.prompts import Place
from palestra.server.gateway.session import Session
from palestra.server.gateway.tree import Node, same_message
from palestra.server.gateway.types import ModelCall
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import Completion, Turn


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


def recorded(log: TurnLog, session: Session, node: Node) -> tuple[Turn, Completion]:
    """The turn as it is on record, and its completion."""
    trajectory = log.reader.read_trajectory(session.record.rollout_id, session.record.attempt)
    turn = next(turn for turn in trajectory.turns if turn.index == node.index)
    # Stop texts that an engine matched are not on record: the reply was stored without them, so none is left to cut.
    completion = Completion(
        tuple(turn.completion_ids.tolist()),
        tuple(turn.logprobs.tolist()),
        turn.finish_reason,
        turn.spans,
        turn.cached_tokens,
    )
    return turn, completion
