"""`palestra engine agent`: keeps the published weights on an engine's host, made of the deltas in a shared folder.

In: requests for versions, from the service. Out: folders `LOCAL/vN` that an engine on this host loads by their path. No torch. It serves
until SIGTERM or SIGINT; killed at any time, it begins again with whole versions.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.server.listen import LOOPBACK
from palestra.server.weights_agent import PullRefused, WeightsListener
from palestra.trainer.weights.deltaapply import LocalFolder
from palestra.trainer.weights.weightfiles import Damaged, NoRoom, NotThereYet, WeightFilesError

STATUSES: Mapping[type[WeightFilesError], tuple[int, str]] = {
    NotThereYet: (409, "not_there_yet"),
    Damaged: (422, "damaged"),
    NoRoom: (507, "disk_full"),
}
"""HTTP status and code of what can go wrong; 500 otherwise."""


class FolderPuller:
    """Pulls from one shared folder, or folders below it, into a local one."""

    def __init__(self, shared: Path, local: LocalFolder) -> None:
        self._shared, self._local = shared, local
        self._last: dict[str, Any] = {}

    def pull(self, version: int, shared: str | None) -> Mapping[str, Any]:
        """See `server.weights_agent.Puller`."""
        source = self._shared if shared is None else Path(shared)
        if not source.resolve().is_relative_to(self._shared.resolve()):
            raise PullRefused(f"{shared} is not within --shared {self._shared} of this agent", 403, "forbidden")
        try:
            pulled = self._local.pull(version, source)
        except WeightFilesError as error:
            self._last = {"version": version, "error": str(error)}
            status, code = STATUSES.get(type(error), (500, "failed"))
            raise PullRefused(str(error), status, code) from error
        said = {"path": str(pulled.path), "bytes": pulled.bytes, "seconds": pulled.seconds, "from": pulled.source}
        self._last = {"version": version, **said}
        return said

    def status(self) -> Mapping[str, Any]:
        """See `server.weights_agent.Puller`."""
        versions = self._local.versions()
        return {"shared": str(self._shared), "local": str(self._local.root), "versions": versions, "last": self._last}


def main(argv: Sequence[str]) -> int:
    """Serves; 0 when told to stop, 2 for bad input."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        token = _token(options.token_file, options.host)
        local = LocalFolder(options.local.absolute(), options.keep)
        # Before any thread starts, so that they all leave these signals to sigwait.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        puller = FolderPuller(options.shared.absolute(), local)
        with WeightsListener(puller, options.host, options.port, token=token) as listener:
            print(f"engine agent: {listener.url}, weights from {options.shared} to {options.local}", flush=True)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
    except (OSError, ValueError, WeightFilesError) as error:
        print(f"engine agent: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palestra engine agent", description="Fetches published weights on this host."
    )
    parser.add_argument(
        "--shared", type=Path, required=True, metavar="DIR", help="weights.shared_dir of the run, or above it"
    )
    parser.add_argument(
        "--local", type=Path, required=True, metavar="DIR", help="where versions are put together; on a fast disk"
    )
    parser.add_argument("--port", type=int, required=True, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="other than loopback needs --token-file")
    parser.add_argument(
        "--keep", type=_count, default=2, help="versions that stay (2): the disk needs room for so many, at least 2"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds what callers must bear as their token")
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def _token(path: Path | None, host: str) -> str | None:
    if path is None:
        if host not in ("localhost", *LOOPBACK.values()):
            raise ValueError(f"--host {host} can be reached from outside: give --token-file FILE too")
        return None
    if not (token := path.read_text().strip()):
        raise ValueError(f"{path} is empty: write the token into it")
    return token
