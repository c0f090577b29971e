"""Free ports for engines and routers, which take theirs only when their model is loaded.

In: an address and how many. Out: ports that nobody listens on. They lie below the range that the kernel gives to outgoing connections: a
port out of that range could be taken by any connection of this machine while the engine still loads.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path

from palestra.cli.engines.types import EngineSetupError

LOWEST, HIGHEST = 20_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(host: str, count: int, taken: Collection[int] = ()) -> list[int]:
    """`count` different ports that can be listened on at `host`, none of `taken`.

    Raises:
        EngineSetupError: there are not as many, or the address is not this machine's.
    """
    usual = [port for port in range(LOWEST, _lowest_outgoing()) if port not in taken]
    found: list[int] = []
    for port in random.sample(usual, len(usual)):
        if len(found) == count:
            break
        if is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise EngineSetupError(f"only {len(found)} free ports at {host} below {usual[-1] + 1}, {count} are needed")
    return found


def is_free(host: str, port: int) -> bool:
    """Whether a listener could be made there.

    Raises:
        EngineSetupError: the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port whose last connections are still being forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if isinstance(error, socket.gaierror) or not _ours(host):
                raise EngineSetupError(f"{host} is no address of this machine: {error.strerror or error}") from None
            return False
    return True


def _ours(host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _lowest_outgoing() -> int:
    """The lowest port of outgoing connections; where that leaves too few below it, all ports are used."""
    try:
        lowest = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32_768
    return lowest if lowest > LOWEST + 1000 else HIGHEST
