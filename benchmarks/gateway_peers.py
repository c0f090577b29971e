"""The peers: recording gateways from the Python index, each in a virtual environment of its own.

In: a folder. Out: installed peers, and the command that starts each one in front of an OpenAI-style engine. It waits for pip.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway_mock import MODEL


@dataclass(frozen=True, slots=True)
class Peer:
    """One distribution of the index, at the version that was looked at."""

    name: str
    version: str
    module: str
    flags: tuple[str, ...]
    """With {url} of the engine, {port} and the file {db} to be put in."""

    def python(self, folder: Path) -> Path:
        """The interpreter of its environment."""
        return folder / self.name / "bin" / "python"

    def installed(self, folder: Path) -> bool:
        """Whether `install` went through for this version."""
        mark = folder / self.name / "installed"
        return mark.exists() and mark.read_text() == self.version

    def install(self, folder: Path) -> None:
        """Makes its environment.

        Raises:
            RuntimeError: pip failed; the message holds its last words.
        """
        where = folder / self.name
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet", "--no-compile"]
        for command in ([sys.executable, "-m", "venv", "--clear", str(where)], [*pip, f"{self.name}=={self.version}"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
        (where / "installed").write_text(self.version)

    def command(self, folder: Path, engine: str, store: Path, port: int) -> Sequence[str]:
        """What starts it; `store` is the folder for its records."""
        filled = [flag.format(url=engine, port=port, db=store / f"{self.name}.db") for flag in self.flags]
        return [str(self.python(folder)), "-m", self.module, *filled]


PEERS = (
    Peer(
        "rllm-model-gateway",
        "0.1.0",
        "rllm_model_gateway",
        (
            *("--worker", "{url}/v1", "--host", "127.0.0.1", "--port", "{port}"),
            # Its default writes two lines a call, which would count against it.
            *("--store", "sqlite", "--db-path", "{db}", "--log-level", "warning"),
        ),
    ),
    Peer(
        "openenv",
        "0.10.0",
        "openenv.core.harness.capture.server",
        ("--llm-url", "{url}", "--model", MODEL, "--engine", "vllm", "--port", "{port}", "--capture-level", "tokens"),
    ),
)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
