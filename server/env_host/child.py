"""The process of one environment, from the zygote's fork to its end.

In: messages of its client. Out: answers to it, and marks in its slot, by which the host sees what it does. Waits for its client and its
environment; it has no deadline of its own, since the host ends what takes too long.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from palestra.envs.registry import make_env
from palestra.sandbox.inside.kernel import PR_SET_PDEATHSIG, prctl
from palestra.server.env_host import wire
from palestra.server.env_host.channels import Channel, PipeChannel, WebSocketChannel
from palestra.server.env_host.session import Session
from palestra.server.env_host.slots import Slot
from palestra.server.env_host.types import FACTORY_ERROR, EnvRefusal, Phase, Served

logger = logging.getLogger(__name__)

OVER, NOT_MADE, NO_MEMORY, BROKEN = 0, 3, 4, 5
"""Exit statuses: its client closed it; its environment could not be made; it reached its limit of memory; a fault of the host's own."""
PULSE_S = 5.0
"""How often a connection is looked at while a step takes long, seconds; clients take one for dead after 20 s."""


def live(sock: socket.socket, is_websocket: bool, slot: Slot, served: Served, memory_bytes: int) -> NoReturn:
    """Is the environment's process until its client is gone. `memory_bytes`: what it may allocate from here on; 0: no limit."""
    status = BROKEN
    try:
        status = _live(sock, is_websocket, slot, served, memory_bytes)
    except MemoryError:
        status = NO_MEMORY
    except OSError as error:  # its client went in the middle of an answer
        logger.info("a client is gone: %s", error)
        status = OVER
    except BaseException:  # this is a copy of the zygote, which must not go on as one
        logger.exception("the process of an environment failed")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _live(sock: socket.socket, is_websocket: bool, slot: Slot, served: Served, memory_bytes: int) -> int:
    parent = os.getppid()
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return OVER
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    limit_memory(memory_bytes)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()
    # Each collection walks through memory that 64 other processes have driven out of the cache. A step leaves few cycles.
    gc.set_threshold(10_000, 20, 50)
    sock.setblocking(True)
    channel: Channel = WebSocketChannel(sock) if is_websocket else PipeChannel(sock)
    threading.Thread(target=_attend, args=(channel,), daemon=True, name="attend").start()
    status = _serve(channel, slot, served)
    channel.close()  # where something was raised the host has the last word
    return status


def _attend(channel: Channel) -> None:
    never = threading.Event()
    while not never.wait(PULSE_S):
        channel.attend()


def _serve(channel: Channel, slot: Slot, served: Served) -> int:
    try:
        session = Session(make_env(served.env_id, served.args), served)
    except Exception as error:
        logger.exception("%s cannot be made", served.env_id)
        said = EnvRefusal(f"{type(error).__name__}: {error}"[:2000], 500, FACTORY_ERROR)
        channel.send(wire.write_json(wire.failed(said)))
        return NOT_MADE
    steps = 0
    try:
        while True:
            slot.mark(Phase.WAITING, steps)
            raw = channel.receive()
            if raw is None:
                return OVER
            slot.mark(Phase.WORKING, steps)
            answer = session.answer(raw)
            steps = session.steps
            if answer is None:
                return OVER
            slot.mark(Phase.SENDING, steps)
            channel.send(answer)
    finally:
        # Closing an environment can take as long as a step, and is ended like one.
        slot.mark(Phase.WORKING, steps)
        session.close()


def limit_memory(memory_bytes: int) -> None:
    """From here on this process may allocate so much (0: no limit). Allocations beyond it fail: Python raises MemoryError.

    RLIMIT_DATA counts private memory that can be written, also what is never touched; unlike the address space it leaves out files and
    libraries. What the zygote had is not counted: it is shared.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not memory_bytes:
        return
    fields = Path("/proc/self/statm").read_text().split()
    had = int(fields[5]) * resource.getpagesize()  # data and stack
    resource.setrlimit(resource.RLIMIT_DATA, (had + memory_bytes, had + memory_bytes))
    # glibc gives each thread an arena of 64 MiB of reserved address space, which would count.
    ctypes.CDLL(None).mallopt(-8, 1)
