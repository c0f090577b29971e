"""Death between any two changes of the disk, of the trainer that publishes and of the agent that pulls, and a disk that is full."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.trainer.types import TrainerError
from palestra.trainer.weights.delta import DeltaFolder
from palestra.trainer.weights.deltaapply import LocalFolder
from palestra.trainer.weights.deltaformat import read_manifest
from palestra.trainer.weights.weightfiles import Checker, NoRoom, read_record
from tests.test_delta import Tensors, check_equal, damage, export_of, in_memory, model, nudge, write_two_files

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "pwrite", "fsync", "utime")


@pytest.fixture
def room() -> Iterator[Path]:
    with in_memory() as root:
        yield root


class Killed(BaseException):
    """The process is gone: nothing catches this, and nothing is changed after it."""


def limited(monkeypatch: pytest.MonkeyPatch, allowed: int) -> list[int]:
    """Lets so many changes of the disk happen; returns a list whose length says how many did."""
    done: list[int] = []

    def guard(change: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= allowed:
                raise Killed
            done.append(1)
            return change(*args, **kwargs)

        return guarded

    for name in CHANGES:
        monkeypatch.setattr(os, name, guard(getattr(os, name)))
    monkeypatch.setattr(shutil, "copyfile", guard(shutil.copyfile))
    return done


def dies_at(act: Callable[[], object], allowed: int) -> bool:
    """Whether `act` was killed after so many changes."""
    with pytest.MonkeyPatch.context() as patch:
        limited(patch, allowed)
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("base_every", [1, 20])
def test_a_trainer_that_dies_anywhere_leaves_whole_versions(room: Path, base_every: int) -> None:
    for allowed in range(200):
        shared = room / f"shared{allowed}"
        history: dict[int, Tensors] = {}
        tensors = model()
        folder = DeltaFolder(shared, write_two_files, base_every=base_every)
        for version in (1, 2):
            nudge(tensors, ["a.weight"], version)
            history[version] = dict(tensors)
            folder.write(export_of(tensors), version)
        nudge(tensors, ["a.weight", "b.weight"], 3)
        history[3] = dict(tensors)

        def publish(folder: DeltaFolder = folder, tensors: Tensors = tensors) -> None:
            folder.write(export_of(tensors), 3)
            folder.collect()

        killed = dies_at(publish, allowed)
        local = LocalFolder(room / f"local{allowed}")
        newest = read_manifest(shared)[-1].version
        assert newest == 3 or killed
        check_equal(local.pull(newest, shared).path, history[newest])
        nudge(tensors, ["c.bias"], 4)
        again = DeltaFolder(shared, write_two_files)
        assert again.write(export_of(tensors), 4).kind == "base"
        again.collect()
        check_equal(local.pull(4, shared).path, tensors)
        assert {path.name for path in shared.iterdir()} == {"MANIFEST.json", *(e.name for e in read_manifest(shared))}
        local.close()
        shutil.rmtree(shared)
        shutil.rmtree(local.root)
        if not killed:
            assert allowed > 5
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("broken", [False, True])
def test_an_agent_that_dies_anywhere_has_whole_versions_alone(room: Path, broken: bool) -> None:
    shared = room / "shared"
    folder, tensors, history = DeltaFolder(shared, write_two_files), model(), []
    for version in range(5):
        nudge(tensors, ["a.weight"], version)
        folder.write(export_of(tensors), version)
        history.append(dict(tensors))
    for allowed in range(200):
        local = LocalFolder(room / f"local{allowed}")
        for version in (1, 2):
            local.pull(version, shared)
        if broken:
            damage(local.root / "v2" / "model-00001.safetensors", -1)
        killed = dies_at(lambda local=local: local.pull(4, shared), allowed)
        local.close()
        restarted = LocalFolder(local.root)
        for version in restarted.versions():
            if not (broken and version == 2):
                check_equal(restarted.root / f"v{version}", history[version])
                assert read_record(restarted.root / f"v{version}")[0] == version
        assert not list(local.root.glob(".tmp-*"))
        pulled = restarted.pull(4, shared)
        check_equal(pulled.path, history[4])
        Checker().check(pulled.path, read_record(pulled.path)[1])
        restarted.close()
        shutil.rmtree(local.root)
        if not killed:
            assert allowed > 5
            return
    raise AssertionError("it never came to its end")


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_local_disk_is_said_and_leaves_nothing(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, local = room / "shared", LocalFolder(room / "local")
    folder, tensors = DeltaFolder(shared, write_two_files), model()
    folder.write(export_of(tensors), 1)
    local.pull(1, shared)
    before = dict(tensors)
    nudge(tensors, ["a.weight"], 1)
    folder.write(export_of(tensors), 2)
    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full_disk)
            with pytest.raises(NoRoom, match=r"no room for version 2 .* GiB free.*Make room"):
                local.pull(2, shared)
        assert sorted(path.name for path in local.root.iterdir()) == [".lock", "v1"]
        check_equal(local.root / "v1", before)
    check_equal(local.pull(2, shared).path, tensors)
    local.close()


def test_a_local_copy_that_cannot_be_read_is_left_out(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, folder, tensors = room / "shared", DeltaFolder(room / "shared", write_two_files), model()
    folder.write(export_of(tensors), 1)
    local = LocalFolder(room / "local")
    local.pull(1, shared)
    local.close()
    nudge(tensors, ["a.weight"], 1)
    folder.write(export_of(tensors), 2)
    local = LocalFolder(room / "local")
    read, tries, failed = os.pread, itertools.count(), list[int]()

    def broken(handle: int, *args: Any) -> bytes:
        # Several threads read at once: the counter, whose step is one instruction, lets one of them alone fail.
        if "/local/v1/" in os.readlink(f"/proc/self/fd/{handle}") and next(tries) == 0:
            failed.append(handle)
            raise OSError(errno.EIO, "Input/output error")
        return read(handle, *args)

    monkeypatch.setattr(os, "pread", broken)
    pulled = local.pull(2, shared)
    assert (len(failed), pulled.source) == (1, "full")
    check_equal(pulled.path, tensors)
    local.close()


def test_a_full_shared_disk_is_said_and_the_next_publish_is_whole(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, local = room / "shared", LocalFolder(room / "local")
    folder, tensors = DeltaFolder(shared, write_two_files), model()
    folder.write(export_of(tensors), 1)
    nudge(tensors, ["a.weight"], 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(TrainerError, match=r"version 2 could not be written .*No space left.*Make room"):
            folder.write(export_of(tensors), 2)
    assert [entry.version for entry in read_manifest(shared)] == [1]
    nudge(tensors, ["b.weight"], 2)
    assert folder.write(export_of(tensors), 3).kind == "base"
    check_equal(local.pull(3, shared).path, tensors)
    local.close()
