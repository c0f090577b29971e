"""Which database a run's groups lie in: `buffer.json` in the run's store folder, and what may be said of a database's URL.

In: the store folder, the URL of the configuration and the run's name. Out: a `Place` that readers find by the folder alone. It holds no
password: readers take it from PGPASSFILE or PGPASSWORD, as every PostgreSQL client does. Waits for the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from palestra.server.buffer.schema import buffer_path
from palestra.server.store.database import sync_folder
from palestra.server.types import StoreError

_SECRET = ("password", "sslpassword", "passwd", "oauth_client_secret")
_SLUG = 40
"""Characters of a run's name that its schema's name keeps; PostgreSQL cuts names after 63 bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the groups of one run lie."""

    url: str
    """Of the database, without a password."""
    run: str
    """The run's name among those that share the database."""
    id: str
    """Drawn when the folder got this file. The database keeps it too, so that two folders never write one run."""

    @property
    def schema(self) -> str:
        """The run's schema in the database: what is left of its name in the letters of an identifier, and a digest of the whole."""
        slug = re.sub(r"[^a-z0-9]+", "_", self.run.lower()).strip("_")[:_SLUG]
        return "_".join(part for part in ("palestra", slug, _digest(self.run).hex()[:8]) if part)

    @property
    def lock(self) -> int:
        """The key of the advisory lock that the run's one service holds: a signed number of 64 bits."""
        return int.from_bytes(_digest(self.schema)[:8], "big", signed=True)


def place_path(folder: Path) -> Path:
    """The file in a run's store folder."""
    return folder / "buffer.json"


def read_place(folder: Path) -> Place | None:
    """The place that was noted; None where the run's groups lie in its own folder.

    Raises:
        StoreError: the file cannot be read or says something else.
    """
    path = place_path(folder)
    try:
        return Place(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def note_place(folder: Path, url: str, run: str) -> Place:
    """Notes durably that the groups of `folder`'s run lie in a database, before the database knows of it.

    Raises:
        StoreError: the run has its groups elsewhere, the URL is none, or the file cannot be written.
    """
    shown = without_password(url)
    found = read_place(folder)
    if found is None and buffer_path(folder).exists():
        raise StoreError(
            f"{buffer_path(folder)}: this run's groups lie here; a run keeps its buffer: remove buffer.url, or begin a new run"
        )
    if found is not None and found.run != run:
        raise StoreError(f"{place_path(folder)}: this run is called {found.run} in the database, not {run}")
    place = Place(shown, run, found.id if found else secrets.token_hex(8))
    if place != found:
        _write(place_path(folder), json.dumps(asdict(place)).encode())
    return place


def without_password(url: str) -> str:
    """The same URL as it may be shown and kept.

    Raises:
        StoreError: it is ambiguous where its password ends; the message does not quote it.
    """
    before, _, query = url.partition("?")
    try:
        parts = urlsplit(before)
    except ValueError:
        parts = None
    if parts is None or before.count("@") > 1 or "@" in parts.path + query or "#" in url:
        raise StoreError(
            "buffer.url: cannot be read: in a user's name or password write @ / : ? # as %40 %2F %3A %3F %23, "
            "or keep the password out of it, in PGPASSFILE"
        )
    user, at, host = parts.netloc.rpartition("@")
    kept = "&".join(part for part in query.split("&") if part.partition("=")[0] not in _SECRET)
    shown = f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"
    return f"{shown}?{kept}" if kept else shown


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"palestra-buffer").digest()


def _write(path: Path, data: bytes) -> None:
    """Written aside and renamed, so that a reader sees all of it or none."""
    aside = path.with_suffix(".json.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error}") from error
