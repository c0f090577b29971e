"""Where a run's groups lie: what may be shown of a URL, and that a run keeps its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.opening import has_buffer, open_buffer, open_buffer_reader
from palestra.server.buffer.pg_place import note_place, read_place, without_password
from palestra.server.buffer.reader import BufferReader
from palestra.server.types import StoreError

URL = "postgresql://me@db.example:5432/runs"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, URL),
        ("postgresql://me:s3cret@db.example:5432/runs", URL),
        ("postgresql://me:s3%40%2Fcret@db.example:5432/runs?sslmode=require", f"{URL}?sslmode=require"),
        (f"{URL}?password=s3cret", URL),
        (f"{URL}?sslmode=require&sslpassword=s3cret&options=-c%20a%3Db+c", f"{URL}?sslmode=require&options=-c%20a%3Db+c"),
        ("postgresql://me@/runs?host=/run/postgresql", "postgresql://me@/runs?host=/run/postgresql"),
        ("postgresql://a:s3cret@h1:1,h2:2/runs?target_session_attrs=read-write",
         "postgresql://a@h1:1,h2:2/runs?target_session_attrs=read-write"),
        ("postgresql:///runs", "postgresql:///runs"),
    ],
)  # fmt: skip
def test_a_url_is_shown_and_kept_without_its_password(url: str, shown: str, tmp_path: Path) -> None:
    assert without_password(url) == shown
    assert note_place(tmp_path, url, "r").url == shown
    assert "s3" not in (tmp_path / "buffer.json").read_text()


@pytest.mark.parametrize(
    "password",
    ["p@ss", "p/ss@x", "p?ss", "p#ss", "p@ss/word@x", "[p@ss"],
    ids=["at", "slash", "question", "hash", "all", "bracket"],
)
def test_a_url_whose_password_cannot_be_told_apart_is_refused_unquoted(password: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="%40") as caught:
        note_place(tmp_path, f"postgresql://me:{password}@db/runs", "r")
    assert "ss" not in str(caught.value).replace("PGPASSFILE", "").replace("password", "")
    assert caught.value.__context__ is None
    assert not (tmp_path / "buffer.json").exists()


def test_the_place_is_drawn_once_and_a_database_may_move(tmp_path: Path) -> None:
    first = note_place(tmp_path, URL, "r")
    moved = note_place(tmp_path, URL.replace("db.", "new."), "r")
    assert (moved.id, moved.url) == (first.id, "postgresql://me@new.example:5432/runs")
    assert read_place(tmp_path) == moved
    assert note_place(tmp_path / "other", URL, "r").id != first.id


@pytest.mark.parametrize("run", ["countdown-7", "A B", "a_b", "Zoë/1", "x" * 200, "'; drop", "-"])
def test_schemas_have_names_of_a_fixed_form(run: str, tmp_path: Path) -> None:
    place = note_place(tmp_path, URL, run)
    assert place.schema.startswith("palestra_")
    assert place.schema.replace("_", "").isalnum()
    assert place.schema.isascii()
    assert len(place.schema) < 64
    assert -(2**63) <= place.lock < 2**63


def test_a_run_keeps_its_buffer(tmp_path: Path) -> None:
    assert not has_buffer(tmp_path)
    open_buffer(tmp_path, None, "r").close()
    assert has_buffer(tmp_path)
    with pytest.raises(StoreError, match="this run's groups lie here; a run keeps its buffer"):
        open_buffer(tmp_path, URL, "r")
    reader = open_buffer_reader(tmp_path)
    assert isinstance(reader, BufferReader)
    reader.close()


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"url": "x"}'):
        (tmp_path / "buffer.json").write_text(text)
        with pytest.raises(StoreError, match=r"buffer\.json: cannot be read"):
            open_buffer_reader(tmp_path)


def test_an_embedded_buffer_is_what_comes_without_a_url(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, None, "r")
    assert isinstance(buffer, EmbeddedBuffer)
    buffer.close()
