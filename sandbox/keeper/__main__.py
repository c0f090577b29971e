"""`python -P -m palestra.sandbox.keeper FD SERVICE`: keeps the boxes of the process SERVICE, which speaks on socket FD."""

from __future__ import annotations

import gc
import resource
import socket
import sys

from palestra.sandbox.keeper.loop import Keeper


def main() -> None:
    """Greets, serves until the service is gone, and clears up."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    keeper = Keeper(sock, int(sys.argv[2]))
    keeper.greet()
    gc.freeze()
    try:
        keeper.serve()
    finally:
        keeper.leave()


main()
