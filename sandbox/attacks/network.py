"""Probes that reach for other machines' worlds, all of them listeners of our own on this one; and sockets of unusual kinds."""

from __future__ import annotations

from palestra.sandbox.attacks.judges import fails, unreached
from palestra.sandbox.attacks.types import Attack

_TCP = """
import socket
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as end:
        end.settimeout(1)
        end.connect(address)
attempt("tcp", lambda: connect(socket.AF_INET, ("127.0.0.1", SCENE["tcp"])))
if "tcp6" in SCENE:
    attempt("tcp6", lambda: connect(socket.AF_INET6, ("::1", SCENE["tcp6"])))
"""

_UDP = """
import socket
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.sendto(b"hello", ("127.0.0.1", SCENE["udp"]))
attempt("udp", send)
"""

_ABSTRACT = """
import socket
def connect():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect("\\0" + SCENE["abstract"])
attempt("abstract", connect)
"""

_UNIX = """
import socket
def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(path)
attempt("unix", lambda: connect(SCENE["unix"]))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket"):
    attempt(path, lambda: connect(path))
"""

_KINDS = """
import socket
def make(family, kind, protocol=0):
    socket.socket(family, kind, protocol).close()
attempt("raw", lambda: make(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: make(17, socket.SOCK_RAW, 0x300))
attempt("alg", lambda: make(38, socket.SOCK_SEQPACKET))
attempt("vsock", lambda: make(40, socket.SOCK_STREAM))
attempt("netlink", lambda: make(16, socket.SOCK_RAW))
attempt("bluetooth", lambda: make(31, socket.SOCK_RAW, 1))
attempt("xdp", lambda: make(44, socket.SOCK_RAW))
"""

ATTACKS = (
    Attack(
        "TCP to loopback",
        "connects to a port of the host's loopback",
        "network",
        _TCP,
        unreached("tcp", "tcp6"),
        harmless=True,
    ),
    Attack(
        "UDP to loopback", "sends a datagram to the host's loopback", "network", _UDP, unreached("udp"), harmless=True
    ),
    Attack(
        "abstract socket", "connects to an abstract socket", "network", _ABSTRACT, unreached("abstract"), harmless=True
    ),
    Attack(
        "socket file",
        "connects to sockets in files, a container engine's too",
        "network",
        _UNIX,
        unreached("unix"),
        harmless=True,
    ),
    Attack("kinds of socket", "raw, packet, alg, vsock, netlink, bluetooth, xdp", "syscalls", _KINDS, fails),
)
