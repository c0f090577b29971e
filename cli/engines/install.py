"""`palestra engine install`: makes the Python environment that engines and their router run in.

In: a device and a folder. Out: a virtual environment with SGLang, its router and (on a CPU) our stand-ins for what a CPU lacks, and in
it what was installed and which options it has. Waits for pip, an hour at most for each step. Run again it does nothing where all is
there, without a network too, and finishes what was left half made.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.cli.engines.environment import (
    FIELDS,
    RECORD,
    STANDINS,
    VARIABLE,
    Part,
    home_folder,
    machine_device,
    pinned,
    python_env,
    read_record,
    stamp,
)
from palestra.cli.engines.interpreter import ask, run_step, runs
from palestra.cli.engines.options import read_fields
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError

BEGUN = "palestra-engine.begun"
"""In a folder that is ours to fill: the device that it is made for. A folder with other things and without this is never touched."""
NEEDS = {"cpu": 4, "cuda": 30}
"""Free disk that an installation must find, downloads included, GB. On a CPU 2.7 GB of it stay."""
WHOLE = "import sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server, sglang_router.router"
"""Loads what an engine's processes and the router load: what is missing shows itself here."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be installed, and where."""

    folder: Path
    part: Part
    """cpu or cuda."""
    smg: bool = False
    """The router smg too."""
    python: str = sys.executable
    """Interpreter that the environment is made from."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The engine's, then the other router's."""
        return (self.part, "smg") if self.smg else (self.part,)


def main(argv: Sequence[str]) -> int:
    """Installs; the exit status."""
    parser = argparse.ArgumentParser(
        prog="palestra engine install",
        description="Makes the engines' own Python environment: SGLang and its router, apart from palestra's. Run again it is quick.",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", dest="device", action="store_const", const="cpu", help="for machines without a GPU")
    device.add_argument("--cuda", dest="device", action="store_const", const="cuda", help="for NVIDIA GPUs")
    parser.add_argument("--smg", action="store_true", help="also the router smg")
    parser.add_argument(
        "--into", metavar="DIR", help=f"the folder; otherwise ${VARIABLE}, or ~/.local/share/palestra/engine"
    )
    parser.add_argument("--python", metavar="P", default=sys.executable, help="make it from this interpreter")
    asked = parser.parse_args(argv)
    folder = Path(asked.into or os.environ.get(VARIABLE) or home_folder()).expanduser()
    wanted = Wanted(Path(os.path.abspath(folder)), asked.device or machine_device(), asked.smg, asked.python)
    try:
        install(wanted, lambda line: print(line, flush=True))
    except EngineSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the same command to go on", file=sys.stderr)
        return 130
    return 0


def install(wanted: Wanted, say: Callable[[str], None]) -> EngineEnvironment:
    """Makes the environment, or what it lacks; returns it when it is whole.

    Raises:
        EngineSetupError: the folder is somebody else's, the disk or the interpreter does not do, or a step failed.
    """
    with _claimed(wanted):
        record = read_record(wanted.folder) or {"device": wanted.part, "versions": {}, "parts": {}}
        missing = _missing(wanted, record)
        environment = _environment(wanted, record)
        if not missing:
            say(f"{wanted.folder} is complete: {_summary(record)}")
            return environment
        started = time.monotonic()
        _check_disk(wanted)
        steps = _steps(wanted, environment, missing, say)
        if wanted.part in missing:
            (wanted.folder / RECORD).unlink(missing_ok=True)
        for number, (title, step) in enumerate(steps, 1):
            say(f"[{number}/{len(steps)}] {title}")
            step()
        record = _record(wanted, environment)
        _write(wanted.folder / RECORD, record)
        say(f"done in {time.monotonic() - started:.0f} s: {_summary(record)}, in {wanted.folder}")
        return _environment(wanted, record)


@contextlib.contextmanager
def _claimed(wanted: Wanted) -> Iterator[None]:
    """Holds the folder, alone, after making sure that it is ours to write in."""
    folder = wanted.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = (folder / BEGUN).exists() or (folder / RECORD).exists()
        if not ours and any(folder.iterdir()):
            raise EngineSetupError(f"{folder} holds something else already; give a new folder with --into")
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise EngineSetupError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise EngineSetupError(f"another palestra engine install is at work in {folder}; wait for it") from None
    try:
        yield
    finally:
        os.close(lock)


def _missing(wanted: Wanted, record: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parts that are not there as they should be. All of them where the interpreter itself no longer runs."""
    same = record["device"] == wanted.part and runs(wanted.folder / "bin" / "python")
    # What was installed before stays, though it is not asked for this time.
    kept: tuple[Part, ...] = ("smg",) if "smg" in record["parts"] and not wanted.smg and same else ()
    return tuple(part for part in (*wanted.parts, *kept) if not same or record["parts"].get(part) != stamp(part))


def _steps(
    wanted: Wanted, environment: EngineEnvironment, missing: Sequence[Part], say: Callable[[str], None]
) -> list[tuple[str, Callable[[], None]]]:
    """What has to be done, each with a line for the user."""
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--progress-bar", "off"]

    def packages(what: str, *arguments: str) -> Callable[[], None]:
        return lambda: run_step([*pip, *arguments], what, wanted.folder, say)

    def listed(name: str) -> str:
        return str(STANDINS / "requirements" / name)

    steps: list[tuple[str, Callable[[], None]]] = [("an empty environment", lambda: _make_venv(wanted, say))]
    if "cpu" in missing:
        torch = f"torch=={pinned('cpu', 'torch')}"
        index = os.environ.get("PALESTRA_TORCH_INDEX")
        where = () if index is None else ("--index-url", index)
        size = "about 200 MB" if index else "about 200 MB; a CUDA build of it 2.5 GB, see PALESTRA_TORCH_INDEX"
        steps += [
            (f"{torch} ({size})", packages(f"installing {torch}", *where, torch)),
            ("what SGLang needs (about 150 MB)", packages("installing SGLang's needs", "-r", listed("cpu.txt"))),
            (
                f"sglang {pinned('cpu', 'sglang')} (about 250 MB)",
                packages("installing SGLang", "--no-deps", "-r", listed("cpu-alone.txt")),
            ),
            ("stand-ins for what a CPU lacks", lambda: _copy_standins(environment)),
        ]
    if "cuda" in missing:
        version = pinned("cuda", "sglang")
        steps.append(
            (
                f"sglang {version} and its CUDA packages (about 8 GB)",
                packages("installing SGLang", "-r", listed("cuda.txt")),
            )
        )
    if "smg" in missing:
        steps.append((f"smg {pinned('smg', 'smg')}", packages("installing smg", "-r", listed("smg.txt"))))
    steps.append(("a look at what was installed (half a minute)", lambda: _look(wanted, environment, say)))
    return steps


def _make_venv(wanted: Wanted, say: Callable[[str], None]) -> None:
    folder = wanted.folder
    python, begun = folder / "bin" / "python", folder / BEGUN
    usable = begun.exists() and begun.read_text() == wanted.part and runs(python)
    if usable:
        return
    _check_python(wanted.python)
    begun.write_text(wanted.part)
    for path in folder.iterdir():  # one for another device, or one whose interpreter is gone: nothing of it can stay
        if path.name != BEGUN:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    run_step(
        [wanted.python, "-m", "venv", str(folder)], f"making a virtual environment with {wanted.python}", folder, say
    )


def _check_python(python: str) -> None:
    code = "import ensurepip, sys, venv; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else 3)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineSetupError(f"{python} does not run: {error}") from None
    if done.returncode == 3:
        raise EngineSetupError(f"{python} is no Python 3.11, 3.12 or 3.13, which SGLang needs; give one with --python")
    if done.returncode:
        raise EngineSetupError(f"{python} has no venv module; on Debian or Ubuntu: apt-get install python3-venv")


def _check_disk(wanted: Wanted) -> None:
    needed = NEEDS[wanted.part]
    free = shutil.disk_usage(wanted.folder).free / 1e9
    if free < needed:
        raise EngineSetupError(
            f"{wanted.folder} has {free:.1f} GB free, and {needed} GB are needed; give another disk with --into"
        )


def _copy_standins(environment: EngineEnvironment) -> None:
    """Copies our modules beside SGLang's, unless real kernels are there."""
    code = (
        "import importlib.metadata as m, sysconfig; "
        "print(sysconfig.get_path('purelib')); "
        "print(any((d.metadata['Name'] or '').lower() in ('sgl-kernel', 'sglang-kernel', 'sglang-kernel-cpu') for d in m.distributions()))"
    )
    target, real = ask(environment, ["-c", code], 60).split()
    for source in (STANDINS / "site").iterdir():
        if source.name == "__pycache__" or (source.name == "sgl_kernel" and real == "True"):
            continue
        if source.is_dir():
            shutil.copytree(
                source, Path(target) / source.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copyfile(source, Path(target) / source.name)


def _look(wanted: Wanted, environment: EngineEnvironment, say: Callable[[str], None]) -> None:
    """Loads all of it once, and keeps which options it has."""
    told = python_env(environment)
    run_step([str(environment.python), "-c", WHOLE], "loading SGLang and its router", wanted.folder, say, told)
    fields = read_fields(environment, "engine")
    if wanted.smg or "smg" in _installed(environment):
        fields |= read_fields(environment, "smg")
    _write(wanted.folder / FIELDS, fields)


def _installed(environment: EngineEnvironment) -> dict[str, str]:
    """Package -> version, of those that the record names."""
    names = ["sglang", "sglang-router", "torch", "transformers", "smg"]
    code = (
        "import importlib.metadata as m, json, sys; have = {d.metadata['Name']: d.version for d in m.distributions()}; "
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have} | {'python': sys.version.split()[0]}))"
    )
    versions: dict[str, str] = json.loads(ask(environment, ["-c", code, *names], 60))
    return versions


def _record(wanted: Wanted, environment: EngineEnvironment) -> dict[str, Any]:
    versions = _installed(environment)
    parts: list[Part] = [wanted.part]
    if versions.get("smg") == pinned("smg", "smg"):
        parts.append("smg")
    return {"device": wanted.part, "versions": versions, "parts": {part: stamp(part) for part in parts}}


def _environment(wanted: Wanted, record: Mapping[str, Any]) -> EngineEnvironment:
    device: Literal["cpu", "cuda"] = "cuda" if wanted.part == "cuda" else "cpu"
    return EngineEnvironment(wanted.folder, wanted.folder / "bin" / "python", device, record["versions"])


def _write(path: Path, content: Mapping[str, Any]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=1, sort_keys=True))
    aside.replace(path)


def _summary(record: Mapping[str, Any]) -> str:
    versions = record["versions"]
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("sglang", "sglang-router", "smg", "torch") if name in versions
    )
    return f"{named}, for {record['device']}"
