"""Listening sockets and their URLs. Light, so that a supervisor can hold the sockets of a service that it starts again."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean every address of this machine, and the one of them that is always there."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Connections of a former process that linger in the kernel must not keep its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it only where a socket names its protocol, and without it each answer waits 40 ms for an ACK.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(4096)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    """Where processes of this machine reach a listener."""
    host, port = sock.getsockname()[:2]
    host = LOOPBACK.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
