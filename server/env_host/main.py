"""`palestra env serve ID`: serves an environment over HTTP until SIGTERM or SIGINT.

In: the words after `serve`. Out: a line with the URL once it answers. Exit status: 0; 1 it could not go on; 2 what was asked for is
wrong or cannot be served. Waits for the environment to be made once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from palestra.envs.overrides import read_settings
from palestra.envs.types import EnvError
from palestra.server.env_host.app import build_app
from palestra.server.env_host.app import serve as listen
from palestra.server.env_host.desk import EnvDesk
from palestra.server.env_host.guard import Guard
from palestra.server.env_host.nursery import Nursery
from palestra.server.env_host.types import EnvHostSettings, Served
from palestra.server.listen import bind, is_loopback, url_of


def main(argv: Sequence[str]) -> int:
    """Runs the verb; its exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        served = Served(options.env_id, read_settings(options.set)["args"])
        token = _token(options.token_file, options.host)
        settings = EnvHostSettings(
            options.max_envs, options.idle_s, options.step_s, options.start_s, options.memory_bytes
        )
        sock = bind(options.host, options.port)
    except (ValueError, OSError) as error:
        return _wrong(error)
    if ":" in served.env_id and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # behind all else: a module of the user's is found where the command is given
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_serve(served, settings, token, sock))
        except EnvError as error:
            return _wrong(error)


def _wrong(error: Exception) -> int:
    print(f"palestra env serve: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    usual = EnvHostSettings()
    about = "Serve an environment over HTTP and WebSockets, a process per session."
    parser = argparse.ArgumentParser(prog="palestra env serve", description=about, allow_abbrev=False)
    parser.add_argument("env_id", metavar="ID", help="its id; package.module:ID imports the module first")
    told = "an argument of its constructor; VALUE is JSON, or a text"
    parser.add_argument("--set", action="append", default=[], metavar="args.NAME=VALUE", help=told)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (%(default)s)")
    told = "a file with what clients must bear; needed where others can reach the listener"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=told)
    limits: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
        ("--max-envs", _count, usual.max_envs, "most sessions at a time"),
        ("--idle-s", _seconds, usual.idle_s, "a session that is asked nothing for so long is ended"),
        ("--step-s", _seconds, usual.step_s, "longest reset or step"),
        ("--start-s", _seconds, usual.start_s, "longest construction of an environment"),
        ("--memory-bytes", int, usual.memory_bytes, "what a session may allocate beyond what it starts with; 0: no limit"),
    )  # fmt: skip
    for name, kind, default, about in limits:
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{about} (%(default)s)")
    return parser


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 4096:
        raise argparse.ArgumentTypeError(f"from 1 to 4096, got {text}")
    return count


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return seconds


def _token(file: Path | None, host: str) -> str | None:
    """What clients must bear.

    Raises:
        ValueError: the file holds none, or the listener can be reached from elsewhere and nothing guards it.
        OSError: the file cannot be read.
    """
    if file is not None:
        if token := file.read_text().strip():
            return token
        raise ValueError(f"--token-file {file}: there is no token in it")
    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from elsewhere, and whoever reaches it runs code here: give --token-file FILE too"
        )
    return None  # fmt: skip


async def _serve(served: Served, settings: EnvHostSettings, token: str | None, sock: socket.socket) -> int:
    nursery = Nursery(served, settings)
    desk = EnvDesk(nursery, settings)
    try:
        await nursery.start()
        url = url_of(sock)
        lines = f"environment host  {url}\nenvironment       {served.env_id}, at most {settings.max_envs} sessions\n"
        started = await listen(build_app(desk, Guard(token)), sock, lambda: print(lines, end="", flush=True))
    finally:
        await desk.close()
    return 0 if started else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
