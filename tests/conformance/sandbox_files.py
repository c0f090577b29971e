"""Files of a box: pieces, links, pipes, archives, snapshots."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.sandbox.types import MIB, Backend, Box, BoxFileError, BoxSpec, Limits, Mount


def members(archive: bytes) -> dict[str, bytes]:
    """Regular files of an archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        regular = [(member.name, opened.extractfile(member)) for member in opened if member.isreg()]
        return {name: content.read() for name, content in regular if content is not None}


class FileCases:
    async def test_files_of_any_size_come_back_as_they_were(self, box: Box) -> None:
        for size in (0, 1, MIB, 3 * MIB + 17):
            data = os.urandom(size)
            await box.put("a folder/deep/file.bin", data)
            assert await box.get("a folder/deep/file.bin") == data
        assert (await box.exec(["wc", "-c", "a folder/deep/file.bin"])).stdout.split()[0] == str(3 * MIB + 17).encode()

    async def test_modes_and_absolute_paths(self, box: Box) -> None:
        await box.put("script", b"#!/bin/sh\necho $1\n", mode=0o755)
        assert (await box.exec(["./script", "ran"])).stdout == b"ran\n"
        home = (await box.exec("pwd")).stdout.decode().strip()
        await box.put(f"{home}/absolute", b"here", mode=0o600)
        assert await box.get("absolute") == b"here"
        assert {entry.name: entry.mode for entry in await box.list()} == {"script": 0o755, "absolute": 0o600}

    async def test_what_code_wrote_can_be_read(self, box: Box) -> None:
        await box.run_python("open('made', 'w').write('by code')")
        assert await box.get("made") == b"by code"
        await box.put("made", b"anew")
        assert (await box.exec("cat made")).stdout == b"anew"

    async def test_what_cannot_be_read_says_so(self, box: Box) -> None:
        await box.exec(
            "mkdir folder; mkfifo pipe; ln -s /etc/passwd link; ln -s nowhere dangling; head -c 2000 /dev/zero > big"
        )
        for path in ("absent", "folder", "pipe", "link", "dangling", "big/under", "x" * 300):
            with pytest.raises(BoxFileError):
                await box.get(path)
        with pytest.raises(BoxFileError, match="2000 bytes"):
            await box.get("big", max_bytes=1999)
        assert len(await box.get("big", max_bytes=2000)) == 2000
        for path in ("folder", "pipe", "link", "big/under"):
            with pytest.raises(BoxFileError):
                await box.put(path, b"x")
        with pytest.raises(BoxFileError):
            await box.list("absent")
        assert (await box.exec("true")).status == "ok"

    async def test_listing(self, box: Box) -> None:
        await box.exec(
            "echo 12345 > file; chmod 640 file; mkdir folder; mkfifo pipe; ln -s file link; : > 'a b'; : > $(printf 'odd\\377')"
        )
        found = {entry.name: entry for entry in await box.list()}
        assert {name: entry.kind for name, entry in found.items()} == {
            "file": "file", "folder": "folder", "pipe": "other", "link": "link", "a b": "file", "odd\udcff": "file",
        }  # fmt: skip
        assert (found["file"].size, found["file"].mode, found["link"].target) == (6, 0o640, "file")
        assert await box.get("odd\udcff") == b""

    async def test_archives_hold_files_and_links_as_links(self, box: Box) -> None:
        await box.exec(
            "mkdir -p out/deep; echo one > out/one; echo two > out/deep/two; ln -s /etc/passwd out/link; mkfifo out/pipe"
        )
        archive = await box.export("out")
        assert members(archive) == {"out/one": b"one\n", "out/deep/two": b"two\n"}
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            assert opened.getmember("out/link").issym()
            assert {member.name for member in opened} == {"out/one", "out/deep", "out/deep/two", "out/link"}
        await box.exec("head -c 100000 /dev/zero > out/large")
        with pytest.raises(BoxFileError):
            await box.export("out", max_bytes=50_000)


class ConfinedFiles:
    async def test_a_fork_has_the_files_and_a_life_of_its_own(self, box: Box) -> None:
        await box.exec("mkdir kept; echo before > kept/file; ln -s kept/file link; chmod 700 kept/file; mkdir empty")
        before = await box.snapshot()
        other = await box.fork()
        try:
            await box.exec("echo after > kept/file")
            assert (
                await other.exec("cat link; stat -c %a kept/file; test -d empty && echo there")
            ).stdout == b"before\n700\nthere\n"
            await box.restore(before)
            assert await box.get("kept/file") == b"before\n"
        finally:
            await other.close()

    async def test_no_room(self, box: Box, backend: Backend) -> None:
        if backend.enforced().disk != "kernel":
            assert "disk" in backend.enforced().weaker()
            return
        with pytest.raises(BoxFileError):
            await box.put("large", b"x" * (box.spec.limits.disk_bytes + MIB))
        await box.exec("rm -f large")
        result = await box.exec("head -c 12M /dev/zero > one && head -c 12M /dev/zero > two")
        assert result.status == "nonzero"
        await box.exec("rm -f one two")
        await box.put("small", b"there is room again")
        assert await box.get("small") == b"there is room again"

    @pytest.fixture
    def shared(self) -> Iterator[Path]:
        """A folder that other users can reach."""
        with tempfile.TemporaryDirectory(prefix="palestra-shared-") as name:
            Path(name).chmod(0o755)
            yield Path(name)

    async def test_mounts_can_be_read_and_not_written(self, backend: Backend, shared: Path) -> None:
        data = shared / "data"
        data.mkdir()
        (data / "set.txt").write_text("rows")
        data.chmod(0o777)
        target = self.mount_target(str(data))
        box = await backend.create(BoxSpec(limits=Limits(), mounts=(Mount(str(data), target),)))
        try:
            assert (await box.exec(f"cat {target}/set.txt")).stdout == b"rows"
            assert (await box.exec(f"echo x > {target}/planted || echo x >> {target}/set.txt")).status == "nonzero"
            assert [path.name for path in data.iterdir()] == ["set.txt"]
        finally:
            await box.close()

    def mount_target(self, source: str) -> str:
        """Where a mount can be had in the box."""
        return "/data/set"
