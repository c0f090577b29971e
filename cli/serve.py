"""`palestra serve --model M` or `palestra serve CONFIG.toml`: an engine and the rollout service, for agents and trainers of others.

In: a model and addresses, or a file. Out: a run folder, the URLs and keys on the console, and an exit status: 0 stopped by the user, 1 it
cannot go on, 2 what was asked for is wrong. It runs until SIGINT or SIGTERM. Started again on the same folder it goes on with the same
port, store, keys and sessions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from palestra.cli.config import ConfigError, ServeConfig, load_as
from palestra.cli.keeper import Keeper
from palestra.cli.launch.local import LocalLauncher
from palestra.cli.launch.types import LaunchError
from palestra.cli.progress import Progress, summary
from palestra.cli.roles.context import write_atomically
from palestra.cli.runfolder import owned, prepare_service, resolve_model
from palestra.server.listen import bind, url_of

ADDRESSES = "serve.json"
"""File in the run folder: where the service is reached. Its ports are taken again at the next start."""
OPTIONS = {
    "model": ("model.path", "a folder in Hugging Face form, a hub id, or a packaged model"),
    "host": ("serve.host", "address of the model routes; 127.0.0.1 unless given"),
    "port": ("serve.port", "their port; 0: the one of the last start, at the first one a free one"),
    "admin-port": (
        "serve.admin_port",
        "a port for the control routes alone; without it they are on the model routes' address",
    ),
    "name": ("run.name", "the run's folder below runs/; serve unless given"),
}


def main(argv: Sequence[str]) -> int:
    """Serves."""
    console = Console(stderr=False, soft_wrap=True)
    config, overrides = _arguments(argv)
    try:
        loaded = load_as(ServeConfig, config, overrides)
        model = resolve_model(loaded.model, console)
        folder = loaded.folder.resolve()
        with owned(folder, "serve.lock"):
            prepare_service(loaded, model)
            with _listening(loaded, folder) as sockets:
                return run(folder, loaded, sockets, console)
    except ConfigError as error:
        print(f"palestra serve: {error}", file=sys.stderr)
        return 2


def run(folder: Path, config: ServeConfig, sockets: Sequence[socket.socket], console: Console) -> int:
    """Runs a prepared folder until it is stopped; then shows where its tokens went."""
    model, control = sockets[0], sockets[-1]
    public = config.serve.url or url_of(model)
    console.print(f"run {folder}", highlight=False)
    try:
        with Progress(folder, 0, console) as progress:
            descriptors = tuple(sock.fileno() for sock in sockets)
            told = banner(folder, config, public, url_of(control))
            keeper = Keeper(folder, config, LocalLauncher(), progress, descriptors, lambda: progress.say(told))
            status = keeper.run()
    except LaunchError as error:
        print(f"palestra serve: {error}", file=sys.stderr)
        return 1
    if (folder / "store" / "turns.db").is_file():
        summary(folder, 0, console, over=False)
    return status


def banner(folder: Path, config: ServeConfig, public: str, control: str) -> str:
    """What a person needs to begin: addresses, keys, and commands that can be copied as they are."""
    token = shlex.quote(str(folder / "roles" / "admin.token"))
    lines = [
        "",
        f"router URL    {public}/v1",
        f"control URL   {control}",
        f"admin token   in {folder / 'roles' / 'admin.token'}",
    ]
    if config.serve.agent_key:
        lines.append(f"agent key     in {folder / 'roles' / 'agent.key'} (with X-Session-Id: ROLLOUT_ID)")
    lines += [
        "",
        "Open a session; its reply holds the key and the URLs for an agent:",
        f'  curl -s -X POST {control}/v1/sessions -H "Authorization: Bearer $(cat {token})" -d "{{}}"',
        "",
        "Or in Python:",
        "  from openai import OpenAI",
        "  from palestra.server.client import ServiceClient",
        f"  service = ServiceClient({control!r}, open({str(folder / 'roles' / 'admin.token')!r}).read().strip())",
        "  session = service.open()",
        "  agent = OpenAI(base_url=session.base_url, api_key=session.api_key)",
        "",
        "Ctrl-C ends it; the same command goes on with the same port, store, keys and sessions.",
    ]
    return "\n".join(lines)


def _arguments(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file, and what is given beside it, as overrides."""
    parser = argparse.ArgumentParser(
        prog="palestra serve",
        description="Serves a model to agents, and keeps their tokens. Any field of the file can be given as --table.key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, nargs="?", help="a TOML file; not needed where --model is given")
    for name, (field, about) in OPTIONS.items():
        parser.add_argument(f"--{name}", dest=field, help=about)
    options, overrides = parser.parse_known_args(argv)
    if bad := [word for word in overrides if not word.startswith("--") or "=" not in word]:
        parser.error(f"unexpected {bad[0]!r}; overrides look like --table.key=value")
    said = {field: getattr(options, field) for field, _ in OPTIONS.values()}
    if (
        options.config is None
        and said["model.path"] is None
        and not any(o.startswith("--model.path=") for o in overrides)
    ):
        parser.error("give --model M, or a configuration file")
    return options.config, [f"--{field}={value}" for field, value in said.items() if value is not None] + overrides


@contextlib.contextmanager
def _listening(config: ServeConfig, folder: Path) -> Iterator[list[socket.socket]]:
    """The listeners, of the model routes and, where they are apart, of the control routes. Which ones is remembered.

    Raises:
        ConfigError: an address is taken, or not this machine's.
    """
    path, serve = folder / ADDRESSES, config.serve
    before = json.loads(path.read_text()) if path.is_file() else {}
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound("serve.port", serve.host, serve.port or int(before.get("port", 0))))]
        if serve.admin_port is not None:
            port = serve.admin_port or int(before.get("admin_port", 0))
            sockets.append(stack.enter_context(_bound("serve.admin_port", serve.admin_host, port)))
        addresses = {**before, "url": f"{serve.url or url_of(sockets[0])}/v1", "control_url": url_of(sockets[-1])}
        for name, sock in zip(("port", "admin_port"), sockets, strict=False):
            addresses[name] = sock.getsockname()[1]
        write_atomically(path, json.dumps(addresses))
        yield sockets


def _bound(field: str, host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"{field}: cannot listen on {host}:{port}: {error.strerror or error}; choose another"
        ) from None
