"""What a sandbox host and its clients say to each other over HTTP, beside the agent's own frames. Both sides load this module.

In and out: the words of `types` and frames. A body is one frame, and so is an answer of 200; other answers are JSON:
`{"error": {"message", "code"}}`. Waits for nothing.

    POST   /boxes       a specification  -> {"box", "host"}
    POST   /boxes/BOX   an agent's request, or nothing: asks again for the answer to the same number -> the agent's answer
    DELETE /boxes/BOX   -> 204 when its processes are gone
    POST   /alive       {"boxes": [BOX]} -> {"gone": [BOX]}; a box not heard of for a lease is destroyed
    GET    /health /boxes /metrics       for people and for clients that start

`Idempotency-Key` is what makes a repeated request join the first one instead of running code twice: any text for POST /boxes, and for a
box a whole number that grows with each request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from palestra.sandbox.inside.frames import HEAD, FrameError, length, unpack
from palestra.sandbox.types import PROMISES, BoxSpec, Enforced, Level, Limits, Mount

CONTENT_TYPE = "application/x-palestra-frame"
"""Of every body. No web page can send it to a listener on loopback without being asked first."""
KEY = "Idempotency-Key"
TIMEOUT = "Palestra-Timeout"
"""Seconds that the agent may take for a request, from when it begins."""
WAIT = "Palestra-Wait"
"""Seconds that POST /boxes may wait for a box."""
ROOM = "Palestra-Room"
"""How many more boxes a host could give now; less than 0: so many wait."""
STATE = "Palestra-State"
"""`running` or `waiting` for its turn, of an answer 202; `lost` where the box was destroyed with this answer."""
POLL_S = 20.0
"""After so long a host answers 202 to a request that is not over, seconds; its client asks again. So a vanished host is noticed."""
LEVELS: tuple[Level, ...] = get_args(Level)


def read_frame(body: bytes) -> dict[str, Any]:
    """The message of a body that is one frame.

    Raises:
        FrameError: it is none.
    """
    if len(body) < HEAD.size or length(body[: HEAD.size]) != len(body) - HEAD.size:
        raise FrameError("the body is not one whole frame")
    return unpack(body[HEAD.size :])


def spec_to_message(spec: BoxSpec) -> dict[str, Any]:
    """A specification as plain values."""
    return dataclasses.asdict(spec)


def spec_from_message(message: Mapping[str, Any]) -> BoxSpec:
    """A specification from plain values.

    Raises:
        ValueError: it is none, or one that cannot be; the text says which part.
    """
    try:
        numbers: dict[str, Any] = {name: _number(name, value) for name, value in dict(message["limits"]).items()}
        return BoxSpec(
            limits=Limits(**numbers),
            image=_text("image", message.get("image")),
            mounts=tuple(Mount(str(one["source"]), str(one["target"])) for one in message.get("mounts", ())),
            preload=tuple(str(name) for name in message.get("preload", ())),
            packages=_text("packages", message.get("packages")),
            env=tuple((str(name), str(value)) for name, value in message.get("env", ())),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no specification of a box: {error}") from None


def _number(name: str, value: Any) -> int | float:
    if not isinstance(value, (int, float) if name == "cpus" else int):
        raise ValueError(f"limits.{name} is {value!r}; it must be a number")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a text")
    return value


def enforced_to_json(enforced: Enforced) -> dict[str, Any]:
    """What a backend holds, as plain values."""
    return {**{name: getattr(enforced, name) for name in PROMISES}, "notes": list(enforced.notes)}


def enforced_from_json(said: Mapping[str, Any]) -> Enforced:
    """What a host says that it holds; a promise that it does not name, or in words of its own, counts as not held."""
    levels: dict[str, Any] = {name: said.get(name) if said.get(name) in LEVELS else "none" for name in PROMISES}
    return Enforced(**levels, notes=tuple(str(note) for note in said.get("notes", ())))


def weakest(all_of_them: Mapping[str, Enforced]) -> Enforced:
    """What holds whichever of these hosts a box is on; notes are told with their host."""
    levels: dict[str, Any] = {
        name: max((getattr(one, name) for one in all_of_them.values()), key=LEVELS.index, default="none")
        for name in PROMISES
    }
    notes = [f"{url}: {note}" for url, one in all_of_them.items() for note in one.notes]
    return Enforced(**levels, notes=tuple(notes))


def falls_short(found: Enforced, promised: Enforced) -> Sequence[str]:
    """Promises that `found` holds less well than was promised."""
    rank = LEVELS.index
    return [name for name in PROMISES if rank(getattr(found, name)) > rank(getattr(promised, name))]
