"""The server's half of a WebSocket (RFC 6455), in bytes: the handshake's answer, a client's frames to messages, messages to frames.

Extensions are declined: compression would cost more than it saves on messages of a few hundred bytes. Waits for nothing.
"""

from __future__ import annotations

import base64
import hashlib
import struct

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
NORMAL, GOING_AWAY, PROTOCOL_ERROR, NOT_ACCEPTED, TOO_BIG, FAULT = 1000, 1001, 1002, 1003, 1009, 1011
"""Codes of a close frame."""
MOST_BYTES = 16 << 20
"""Longest message of a client."""
_KNOWN = frozenset((0, TEXT, BINARY, CLOSE, PING, PONG))
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class BrokenSocketError(Exception):
    """The client's bytes are no WebSocket's; `code` is for the close frame."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def accepted(key: bytes) -> bytes:
    """The whole answer to a handshake with this key."""
    digest = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: " + digest + b"\r\n\r\n"
    )


def frame(opcode: int, payload: bytes) -> bytes:
    """One whole frame of the server's, which is not masked."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    if size < 1 << 16:
        return struct.pack(">BBH", 0x80 | opcode, 126, size) + payload
    return struct.pack(">BBQ", 0x80 | opcode, 127, size) + payload


def closing(code: int, reason: str = "") -> bytes:
    """A close frame."""
    return frame(CLOSE, struct.pack(">H", code) + reason.encode()[:120].decode("utf-8", "ignore").encode())


class Frames:
    """Puts a client's bytes together to messages."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._held = bytearray()
        self._parts: list[bytes] = []
        """Of a message that comes in several frames."""
        self._opcode = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The messages that are whole with `data`: opcode and payload.

        Raises:
            BrokenSocketError: nothing more can be read from this client.
        """
        self._held += data
        found = []
        while (taken := self._take()) is not None:
            opcode, last, payload = taken
            if opcode >= CLOSE:
                found.append((opcode, payload))
                continue
            if (opcode == 0) != bool(self._opcode):
                raise BrokenSocketError(PROTOCOL_ERROR, "a message's frames are out of order")
            self._opcode = self._opcode or opcode
            if last and not self._parts:
                found.append((self._opcode, payload))
                self._opcode = 0
                continue
            self._parts.append(payload)
            if sum(map(len, self._parts)) > self._most:
                raise BrokenSocketError(TOO_BIG, f"a message of more than {self._most} bytes")
            if last:
                found.append((self._opcode, b"".join(self._parts)))
                self._parts, self._opcode = [], 0
        return found

    def _take(self) -> tuple[int, bool, bytes] | None:
        """The next frame: opcode, whether it is its message's last, payload. None: it is not whole."""
        held = self._held
        if len(held) < 2:
            return None
        opcode, last, size, start = held[0] & 15, bool(held[0] & 0x80), held[1] & 0x7F, 2
        if held[0] & 0x70 or opcode not in _KNOWN or not held[1] & 0x80:
            raise BrokenSocketError(PROTOCOL_ERROR, "a frame with reserved bits, an unknown opcode, or without a mask")
        if opcode >= CLOSE and (size > 125 or not last):
            raise BrokenSocketError(PROTOCOL_ERROR, "a control frame that is long or in parts")
        if size > 125:
            start = 4 if size == 126 else 10
            if len(held) < start:
                return None
            size = int.from_bytes(held[2:start], "big")
        if size > self._most:
            raise BrokenSocketError(TOO_BIG, f"a message of more than {self._most} bytes")
        end = start + 4 + size
        if len(held) < end:
            return None
        payload = _unmasked(bytes(held[start : start + 4]), bytes(held[start + 4 : end]))
        del held[:end]
        return opcode, last, payload


def _unmasked(mask: bytes, data: bytes) -> bytes:
    # One exclusive or of two long numbers: a loop over the bytes would take a hundred times as long.
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")
