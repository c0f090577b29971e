"""Groups are found, limited, read and cleared, on folders that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palestra.sandbox import cgroups
from palestra.sandbox.keeper import owners
from palestra.sandbox.meter import Meter


def _mount(point: Path, kind: str, options: str = "rw") -> str:
    return f"30 24 0:26 / {point} rw,nosuid - {kind} {kind} {options}\n"


def _folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".", 1)).write_text(text)
    return path


def _unified(path: Path, *, controllers: str = "cpu memory pids", handed: str = "") -> Path:
    return _folder(path, cgroup__controllers=controllers, cgroup__subtree_control=handed, cgroup__procs="")


def test_version_1_has_a_folder_per_controller(tmp_path: Path) -> None:
    lines = "".join(
        _mount(_folder(tmp_path / name), "cgroup", f"rw,{name}") for name in ("memory", "pids", "cpu,cpuacct")
    )
    found, why = cgroups.find(lines, "")
    assert found is not None
    assert (found.version, why, found.controllers) == (1, "", {"memory", "pids", "cpu"})
    assert found.folder("cpu", "owner", "7") == f"{tmp_path}/cpu,cpuacct/palestra-sandbox/owner/7"


def test_version_1_without_a_controller_says_so(tmp_path: Path) -> None:
    found, why = cgroups.find(_mount(_folder(tmp_path / "memory"), "cgroup", "rw,memory"), "")
    assert found is not None
    assert found.controllers == {"memory"}
    assert "pids controller is not mounted" in why


def test_nothing_mounted(tmp_path: Path) -> None:
    found, why = cgroups.find("22 1 0:20 / /proc rw - proc proc rw\n", "")
    assert found is None
    assert "no cgroup file system" in why


def test_version_2_takes_the_first_group_that_can_be_had(tmp_path: Path) -> None:
    # The root hands nothing on: its controllers file is not there, as on a mount of which we see a part.
    _folder(tmp_path, cgroup__procs="", cgroup__subtree_control="")
    user = _unified(tmp_path / "user.slice" / "user@1000.service", handed="cpu memory pids")
    # The kernel writes what it handed down; a plain folder has to have it already.
    _unified(user / cgroups.NAME, controllers="memory pids", handed="memory pids")
    own = "0::/user.slice/user@1000.service/app.slice/run.scope\n"
    found, why = cgroups.find(_mount(tmp_path, "cgroup2"), own)
    assert found is not None
    assert found.version == 2
    assert found.controllers == {"memory", "pids"}
    assert why == "not delegated: cpu"
    assert found.folders("owner", "7") == [f"{user}/{cgroups.NAME}/owner/7"]


def test_version_2_that_delegates_nothing(tmp_path: Path) -> None:
    _unified(tmp_path, controllers="")
    _unified(tmp_path / cgroups.NAME, controllers="")
    found, why = cgroups.find(_mount(tmp_path, "cgroup2"), "0::/\n")
    assert found is None
    assert "not delegated" in why


def _kernel_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[cgroups.Hierarchy, list[tuple[str, str]]]:
    """A hierarchy whose files take every write, and what was written."""
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(cgroups, "write", lambda path, text: written.append((os.path.basename(path), text)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    where = cgroups.Hierarchy(2, tuple((name, str(tmp_path)) for name in cgroups.WANTED))
    _unified(tmp_path / cgroups.NAME / "owner")
    return where, written


def test_version_2_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, written = _kernel_2(tmp_path, monkeypatch)
    folders = cgroups.make(where, "owner", "7", memory=1 << 28, pids=64, cpus=1.5)
    assert folders == [str(tmp_path / cgroups.NAME / "owner" / "7")]
    assert written == [("memory.max", str(1 << 28)), ("pids.max", "64"), ("cpu.max", "150000 100000")]
    with pytest.raises(FileExistsError):
        cgroups.make(where, "owner", "7", memory=1 << 28, pids=64, cpus=1.5)


def test_version_2_hands_controllers_down_to_a_new_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = _kernel_2(tmp_path, monkeypatch)
    cgroups._hand_down(f"{tmp_path}/{cgroups.NAME}/owner")
    assert written == [("cgroup.subtree_control", f"+{name}") for name in ("memory", "pids", "cpu")]


def test_version_2_counts(tmp_path: Path) -> None:
    where = cgroups.Hierarchy(2, tuple((name, str(tmp_path)) for name in cgroups.WANTED))
    box = _folder(
        tmp_path / cgroups.NAME / "owner" / "7",
        memory__events="low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
        memory__peak="4096\n",
        pids__events="max 5\n",
    )
    meter = Meter(where, "owner", "7")
    assert meter.read() == (2, 5, 4096)
    (box / "pids.events").write_text("max 6\n")
    assert meter.read() == (2, 6, 4096)
    meter.close()
    meter.close()


def test_version_1_counts_without_a_peak(tmp_path: Path) -> None:
    where = cgroups.Hierarchy(1, (("memory", str(tmp_path / "memory")),))
    _folder(
        tmp_path / "memory" / cgroups.NAME / "owner" / "7",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    )
    meter = Meter(where, "owner", "7")
    assert meter.read() == (1, 0, None)
    meter.close()


def test_a_group_is_killed_by_one_write_where_the_kernel_can(tmp_path: Path) -> None:
    group = _folder(tmp_path / "7", cgroup__kill="", cgroup__procs="0\n")
    assert not cgroups.kill([str(group)])
    assert (group / "cgroup.kill").read_text() == "1"
    assert not cgroups.kill([str(tmp_path / "gone")])


def test_clearing_removes_boxes_and_owner(tmp_path: Path) -> None:
    where = cgroups.Hierarchy(1, (("memory", str(tmp_path / "memory")), ("pids", str(tmp_path / "pids"))))
    mine, other = "1-2-3-4-5", "1-2-3-4-6"
    for folder in [*where.folders(mine, "1"), *where.folders(mine, "2"), *where.folders(other, "1")]:
        os.makedirs(folder)
    assert cgroups.clear(where, mine, lambda: None) == 2
    assert cgroups.owners(where) == {other}
    os.makedirs(where.folders(other, "1", "held")[0])
    with pytest.raises(OSError, match=f"{other} cannot be removed: 1"):
        cgroups.clear(where, other, lambda: None, tries=3)
    for name in ("", "..", "user.slice", "1-2-3-4"):
        with pytest.raises(ValueError, match="no owner of boxes"):
            cgroups.clear(where, name, lambda: None)


def test_a_group_that_cannot_be_limited_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, _ = _kernel_2(tmp_path, monkeypatch)

    def refuse(path: str, text: str) -> None:
        raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(cgroups, "write", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        cgroups.make(where, "owner", "8", memory=1, pids=1, cpus=1.0)
    assert cgroups.boxes(where, "owner") == set()


def test_owners_are_known_by_when_they_started() -> None:
    name = owners.name_of(os.getpid(), os.getppid())
    assert not owners.dead(name)
    parts = name.split("-")
    assert owners.dead("-".join([*parts[:2], str(int(parts[2]) + 1), *parts[3:]]))
    assert owners.dead("-".join([*parts[:4], "1"]))
    # Another namespace's numbers say nothing, nor does what we did not name.
    assert not owners.dead("-".join(["1", *parts[1:4], "1"]))
    assert not owners.dead("memory.limit_in_bytes")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert owners.start_of(pid) is None, "a zombie is dead"
    os.waitpid(pid, 0)
