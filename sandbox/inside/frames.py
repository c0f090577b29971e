"""Messages between a box's agent and its supervisor: a length, then names and values. Both sides load this module.

In and out: bytes. The supervisor reads what comes from untrusted ground, so everything is bounded: a frame's length, its number of values,
and how deep they nest. Nothing but `struct` is imported: a box starts the quicker for it. Waits for nothing.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs a box a tenth of its start
    from typing import Any

MAX_FRAME = 12 << 20
"""Longest body, bytes."""
MAX_ITEMS = 20_000
"""Values in one frame."""
HEAD = struct.Struct(">I")
_INT = struct.Struct(">q")
_FLOAT = struct.Struct(">d")


class FrameError(ValueError):
    """What came is no frame of ours."""


def pack(message: dict[str, Any]) -> bytes:
    """A frame, its length in front. Values: None, int, float, str, bytes, lists of those, and dicts with str names.

    Raises:
        FrameError: a value of another type, one that has no room in 64 bits or is no text, or too long a frame.
    """
    parts: list[bytes] = []
    try:
        _put(message, parts)
    except (struct.error, UnicodeEncodeError) as error:
        raise FrameError(f"a value cannot travel: {error}") from None
    body = b"".join(parts)
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes; at most {MAX_FRAME} are allowed")
    return HEAD.pack(len(body)) + body


def _put(value: Any, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"n")
    elif isinstance(value, bytes):
        parts.append(b"b" + HEAD.pack(len(value)))
        parts.append(value)
    elif isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        parts.append(b"s" + HEAD.pack(len(raw)))
        parts.append(raw)
    elif isinstance(value, int):
        parts.append(b"i" + _INT.pack(value))
    elif isinstance(value, float):
        parts.append(b"f" + _FLOAT.pack(value))
    elif isinstance(value, (list, tuple)):
        parts.append(b"l" + HEAD.pack(len(value)))
        for item in value:
            _put(item, parts)
    elif isinstance(value, dict):
        parts.append(b"d" + HEAD.pack(len(value)))
        for name, item in value.items():
            _put(str(name), parts)
            _put(item, parts)
    else:
        raise FrameError(f"a {type(value).__name__} cannot travel")


def length(head: bytes) -> int:
    """How long the body behind these four bytes is.

    Raises:
        FrameError: longer than is allowed.
    """
    (size,) = HEAD.unpack(head)
    if size > MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes is announced; at most {MAX_FRAME} are allowed")
    return int(size)


def unpack(body: bytes) -> dict[str, Any]:
    """The message of a frame's body.

    Raises:
        FrameError: it is none.
    """
    reader = _Reader(body)
    try:
        message = reader.value(0)
    except (struct.error, IndexError, OverflowError) as error:
        raise FrameError(f"a broken frame: {error}") from None
    if not isinstance(message, dict):
        raise FrameError("a frame holds no message")
    if reader.at != len(body):
        raise FrameError(f"{len(body) - reader.at} bytes behind a message")
    return message


class _Reader:
    """Reads values from a body, each once."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0
        self.left = MAX_ITEMS

    def raw(self) -> bytes:
        (size,) = HEAD.unpack_from(self.body, self.at)
        start = self.at + 4
        if size > len(self.body) - start:
            raise FrameError("a value is longer than its frame")
        self.at = start + size
        return self.body[start : self.at]

    def count(self) -> int:
        (size,) = HEAD.unpack_from(self.body, self.at)
        self.at += 4
        if size > self.left:
            raise FrameError(f"more than {MAX_ITEMS} values in a frame")
        return int(size)

    def value(self, depth: int) -> Any:
        self.left -= 1
        if self.left < 0 or depth > 4:
            raise FrameError("too many values in a frame, or too deep ones")
        tag = self.body[self.at]
        self.at += 1
        if tag == 0x62:  # b
            return self.raw()
        if tag == 0x73:  # s
            return self.raw().decode("utf-8", "surrogateescape")
        if tag == 0x69:  # i
            self.at += 8
            return _INT.unpack_from(self.body, self.at - 8)[0]
        if tag == 0x66:  # f
            self.at += 8
            return _FLOAT.unpack_from(self.body, self.at - 8)[0]
        if tag == 0x6E:  # n
            return None
        if tag == 0x6C:  # l
            return [self.value(depth + 1) for _ in range(self.count())]
        if tag == 0x64:  # d
            found: dict[str, Any] = {}
            for _ in range(self.count()):
                name = self.value(depth + 1)
                if not isinstance(name, str):
                    raise FrameError("a name is no text")
                found[name] = self.value(depth + 1)
            return found
        raise FrameError(f"an unknown kind of value: {tag:#x}")


class Inbox:
    """Bytes as they come, frames as they are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that became whole.

        Raises:
            FrameError: these are no frames of ours; nothing more can be read.
        """
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            size = length(bytes(self._buffer[:4]))
            if len(self._buffer) < 4 + size:
                break
            found.append(unpack(bytes(self._buffer[4 : 4 + size])))
            del self._buffer[: 4 + size]
        return found
