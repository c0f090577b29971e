"""The peer, atroposlib's API server: installed in an environment of its own, started there, and spoken to.

In: groups. Out: what it takes and gives for them, in its own words; it keeps them in memory. As a script, run by the peer's interpreter
with a file to write the URL into, it is that server. It waits for pip and for the server.
"""

from __future__ import annotations

import gzip
import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.buffer_stores import Wire
    from palestra.server.types import TrajectoryGroup

NAME, VERSION = "atroposlib", "0.4.0"
NEEDS = ("fastapi", "uvicorn[standard]", "pydantic")
"""What its server imports. All that the package asks for is a gigabyte more, and does not serve."""
MASKED = -100
"""Its mark for a token that is not trained."""


def install(folder: Path) -> None:
    """Makes its environment, unless there is one for this version.

    Raises:
        RuntimeError: pip failed; the message holds its last words.
    """
    where = folder / NAME
    mark = where / "installed"
    if mark.exists() and mark.read_text() == VERSION:
        return
    pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(where)],
        [*pip, "--no-deps", f"{NAME}=={VERSION}"],
        [*pip, *NEEDS],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    mark.write_text(VERSION)


def command(folder: Path, ready: Path) -> list[str]:
    """What starts the server; it writes its URL into `ready`."""
    return [str(folder / NAME / "bin" / "python"), "-s", "-P", __file__, str(ready)]


class Atropos:
    """A client of one server. `plain`: as its own clients are, with the standard library's JSON and with gzip both ways; else both sides
    are spared the compression, and JSON is written and read by orjson."""

    def __init__(self, wire: Wire, *, plain: bool) -> None:
        self._wire, self._plain = wire, plain
        self._batch = 0

    def prepare(self, groups: int, tokens: int, size: int) -> None:
        """Empties it, and has its batches hold so many groups from here on."""
        self._wire.ask("GET", "/reset_data")
        self._batch = groups * size
        about = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": 0}
        steps = {"starting_step": 0, "num_steps": 1 << 30}
        self._wire.json("POST", "/register", {**about, **steps, "batch_size": self._batch, "max_token_len": tokens})

    def put(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Sends groups, several as a list.

        Raises:
            RuntimeError: it did not take them.
        """
        bodies = [_body(group) for group in groups]
        path, body = ("/scored_data", bodies[0]) if len(bodies) == 1 else ("/scored_data_list", bodies)
        if self._plain:
            packed = gzip.compress(json.dumps(body, default=_listed).encode())
            said = json.loads(self._wire.ask("POST", path, packed, {"content-encoding": "gzip"}))
        else:
            said = self._wire.json("POST", path, body)
        if said["status"] != "received":
            raise RuntimeError(f"{NAME} said {said}")

    def take(self) -> list[dict[str, Any]]:
        """A batch, its lists as arrays.

        Raises:
            RuntimeError: it had none, or a short one.
        """
        import numpy as np

        if self._plain:
            said = json.loads(gzip.decompress(self._wire.ask("GET", "/batch", None, {"accept-encoding": "gzip"})))
        else:
            said = self._wire.json("GET", "/batch")
        kinds = {"tokens": np.int32, "masks": np.int32, "inference_logprobs": np.float32}
        batch = said["batch"] or []
        if sum(len(group["tokens"]) for group in batch) != self._batch:
            raise RuntimeError(f"{NAME} gave {len(batch)} groups instead of {self._batch} rows")
        return [
            {**group, **{name: [np.array(row, kind) for row in group[name]] for name, kind in kinds.items()}}
            for group in batch
        ]


def _listed(array: Any) -> Any:
    return array.tolist()


def _body(group: TrajectoryGroup) -> dict[str, Any]:
    """A group in its words: ids, ids or MASKED, rewards, and logprobs with 1 where there is none."""
    import numpy as np

    rows = group.samples
    return {
        "tokens": [row.token_ids for row in rows],
        "masks": [np.where(row.loss_mask, row.token_ids, np.int32(MASKED)) for row in rows],
        "scores": [row.reward for row in rows],
        "inference_logprobs": [np.where(np.isnan(row.logprobs), np.float32(1), row.logprobs) for row in rows],
    }


def serve(ready: Path) -> None:
    """Serves the peer's application as its `run-api` does, but without an access log."""
    import uvicorn

    app = importlib.import_module(f"{NAME}.api").app
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    aside = ready.with_suffix(".new")
    aside.write_text(f"http://127.0.0.1:{sock.getsockname()[1]}")
    aside.replace(ready)  # who connects now is served once uvicorn is up
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
