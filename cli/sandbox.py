"""`palestra sandbox serve` lends boxes of this machine to clients elsewhere; `palestra sandbox reap` removes what dead processes left.

In: a file and overrides, or nothing. Out: a listener until SIGTERM or SIGINT; counts on the console. Exit status: 0; 1 it could not go on;
2 what was asked for is wrong or cannot be had here. Waits for backends to start.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from palestra.cli.config import ConfigError, load_as
from palestra.envs.sandboxes import make_backend, make_pool, read_token
from palestra.sandbox.choose import make
from palestra.sandbox.types import Backend, SandboxError
from palestra.server.listen import bind, is_loopback, url_of
from palestra.server.sandbox_host.config import HostConfig

LOCAL = ("bubblewrap", "docker", "landlock")
"""Backends whose boxes can outlive the process that made them."""
OPTIONS = {
    "listen": ("host.listen", "HOST:PORT; 127.0.0.1:8070 unless given, port 0: a free one"),
    "token-file": ("host.token_file", "holds what clients must bear; needed where others can reach the listener"),
}


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(
        prog="palestra sandbox", description="Boxes for code that models write.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    about = "lend boxes of this machine over HTTP. Any field of [sandbox] and [host] can be given as --table.key=value"
    serving = verbs.add_parser("serve", help=about, description=about, allow_abbrev=False)
    serving.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with [sandbox] and [host]")
    for name, (field, told) in OPTIONS.items():
        serving.add_argument(f"--{name}", dest=field, help=told)
    verbs.add_parser("reap", help="remove boxes of processes that are dead", allow_abbrev=False)
    options, overrides = parser.parse_known_args(argv)
    bad = [word for word in overrides if not word.startswith("--") or "=" not in word or options.verb == "reap"]
    if bad:
        parser.error(f"unexpected {bad[0]!r}; overrides look like --table.key=value")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if options.verb == "reap":
        return asyncio.run(reap())
    said = [f"--{field}={value}" for field, _ in OPTIONS.values() if (value := getattr(options, field)) is not None]
    return serve(options.config, [*said, *overrides])


def serve(file: Path | None, overrides: Sequence[str]) -> int:
    """Serves until told to stop."""
    try:
        config = load_as(HostConfig, file, overrides)
        token = _token(config)
        host, port = config.host.address
        try:
            sock = bind(host, port)
        except OSError as error:
            raise ConfigError(f"host.listen: cannot listen on {host}:{port}: {error.strerror or error}") from None
        with sock:
            return asyncio.run(_serve(config, token, sock))
    except (ConfigError, SandboxError) as error:
        print(f"palestra sandbox serve: {error}", file=sys.stderr)
        return 2


async def _serve(config: HostConfig, token: str | None, sock: socket.socket) -> int:
    from palestra.server.sandbox_host.app import build_app
    from palestra.server.sandbox_host.app import serve as listen
    from palestra.server.sandbox_host.desk import BoxDesk
    from palestra.server.sandbox_host.types import HostSettings

    backend = await make_backend(config.sandbox)
    try:
        if left := await backend.reap():
            print(f"removed {left} boxes that a former process left", flush=True)
        host = config.host
        settings = HostSettings(config.sandbox.boxes, queue=host.queue, lease_s=host.lease_s, share=host.share)
        desk = BoxDesk(make_pool(config.sandbox, backend), settings)
        app = build_app(desk, backend, token)
        started = await listen(app, sock, lambda: print(_banner(backend, config, url_of(sock)), flush=True))
    finally:
        await backend.close()
    return 0 if started else 1


def _banner(backend: Backend, config: HostConfig, url: str) -> str:
    weaker = backend.enforced().weaker()
    held = "everything by the kernel" if not weaker else ", ".join(f"{name}: {how}" for name, how in weaker.items())
    lines = [
        f"sandbox host  {url}",
        f"backend       {backend.name}, {config.sandbox.boxes} boxes",
        f"enforced      {held}",
        *(f"              {note}" for note in backend.enforced().notes),
    ]
    return "\n".join(lines)


def _token(config: HostConfig) -> str | None:
    """What clients must bear.

    Raises:
        ConfigError: the listener can be reached from elsewhere, and nothing guards it.
        SandboxUnavailableError: the file holds none.
    """
    if config.host.token_file is not None:
        return read_token(config.host.token_file, "host.token_file")
    host = config.host.address[0]
    if not is_loopback(host):
        raise ConfigError(
            f"host.listen: {host} can be reached from elsewhere, and whoever reaches it runs code: give --token-file FILE too"
        )
    return None  # fmt: skip


async def reap() -> int:
    """Removes leftovers of every local backend that works here, and says how many."""
    worked = False
    for name in LOCAL:
        try:
            backend = make(name)
            try:
                await backend.start()
                print(f"{name:12} {await backend.reap()} removed", flush=True)
                worked = True
            finally:
                await backend.close()
        except SandboxError as error:
            print(f"{name:12} not looked at: {error}", flush=True)
    if not worked:
        print(
            "palestra sandbox reap: no backend works here, so none can have left anything that it could find",
            file=sys.stderr,
        )
    return 0 if worked else 2  # fmt: skip
