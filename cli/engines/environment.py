"""The engines' own Python environment: what it is made of, where it lies, and what its processes are told.

In: a folder, or none. Out: an `EngineEnvironment`, or an error that names the command that makes one. Reads two small files and starts
nothing. Engines never share our environment: their pins clash with it, and nothing of ours imports them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from palestra.cli.engines.types import EngineEnvironment, EngineSetupError

VARIABLE = "PALESTRA_ENGINE_ENV"
"""Environment variable with the folder."""
RECORD = "palestra-engine.json"
"""In the folder, written last: what was installed. Where it is missing the environment is not whole."""
FIELDS = "palestra-fields.json"
"""Beside it: the options that the installed SGLang and routers have."""
STANDINS = Path(__file__).with_name("standins")
"""Requirement lists, scripts that run in the environment, and modules that are copied into it."""
PARTS = {"cpu": ("cpu.txt", "cpu-alone.txt"), "cuda": ("cuda.txt",), "smg": ("smg.txt",)}
"""What can be installed, and the lists that say of what: an engine on a device, and the other router."""

Part = Literal["cpu", "cuda", "smg"]


def requirements(listed: str) -> tuple[str, ...]:
    """The lines of one requirement list, without its comments."""
    lines = (STANDINS / "requirements" / listed).read_text().splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def pinned(part: Part, package: str) -> str:
    """The version that a part has of a package.

    Raises:
        KeyError: it does not pin one.
    """
    for listed in PARTS[part]:
        for line in requirements(listed):
            name, _, version = line.partition("==")
            if name == package and version:
                return version
    raise KeyError(f"{part} pins no {package}")


def stamp(part: Part) -> str:
    """A digest of all that makes a part: equal where a new installation would change nothing."""
    digest = hashlib.sha256()
    for listed in PARTS[part]:
        digest.update("\n".join(requirements(listed)).encode())
    if part == "cpu":
        for path in sorted((STANDINS / "site").rglob("*")):
            if path.is_file() and path.suffix in (".py", ".pth"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine_device() -> Literal["cpu", "cuda"]:
    """cuda where this machine has an NVIDIA driver."""
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    return "cuda" if driver else "cpu"


def home_folder() -> Path:
    """Where an environment is made for all of a user's projects."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "palestra" / "engine"


def read_record(folder: Path) -> dict[str, Any] | None:
    """What an installation wrote of itself; None where there is no whole one."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and {"device", "versions", "parts"} <= record.keys()
    return record if whole else None


def find(folder: str | None = None, device: Literal["auto", "cpu", "cuda"] = "auto") -> EngineEnvironment:
    """The environment in `folder`; without one, the first of $PALESTRA_ENGINE_ENV, ./.engine and ~/.local/share/palestra/engine.

    Raises:
        EngineSetupError: there is none, it is not whole, it is of other versions than this palestra's, or not for `device`.
    """
    named = folder or os.environ.get(VARIABLE)
    if named:
        place = Path(named).expanduser()
    else:
        place = next((path for path in (Path(".engine"), home_folder()) if (path / RECORD).is_file()), home_folder())
    # Not resolved: python in a venv is a link, and finds its packages by the name that it is called by.
    place = Path(os.path.abspath(place))
    record = read_record(place)
    command = _install_command(place, device, named is not None)
    if record is None:
        missing = "is not whole" if (place / "pyvenv.cfg").exists() else "does not exist"
        raise EngineSetupError(f"the engines' Python environment {place} {missing}; make it with: {command}")
    here = record["device"]
    if device not in ("auto", here):
        raise EngineSetupError(
            f"the engines' environment {place} computes on {here}, and {device} is asked for; make another beside it with: "
            f"palestra engine install --{device} --into {place}-{device}"
        )
    if record["parts"].get(here) != stamp(here):
        raise EngineSetupError(
            f"the engines' environment {place} has SGLang {record['versions'].get('sglang')} as another palestra installed it, and this "
            f"one needs {pinned(here, 'sglang')}; bring it up to date with: {_install_command(place, here, True)}"
        )
    return EngineEnvironment(place, place / "bin" / "python", here, record["versions"])


def has_smg(environment: EngineEnvironment) -> bool:
    """Whether the router smg was installed, as this palestra wants it."""
    record = read_record(environment.folder)
    return record is not None and record["parts"].get("smg") == stamp("smg")


def python_env(environment: EngineEnvironment) -> dict[str, str]:
    """What every process of the environment is told, beside what ours were: added to theirs."""
    told = {
        # Models are folders here. A look at the hub would only add a wait where there is no network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Nothing of ours, of the present folder or of the user's own packages may come before the environment's.
        "PYTHONPATH": "",
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
    }
    if environment.device == "cpu":
        told |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Threads that spin while they wait make a neighbour on the same cores tens of times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
            # The first request with a penalty would wait a minute while a kernel is compiled that is no faster on a CPU.
            "TORCHDYNAMO_DISABLE": "1",
        }
    else:
        # Kernels that are compiled when they are first needed are compiled by the environment's own tools.
        told["PATH"] = f"{environment.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    return told


def _install_command(place: Path, device: str, named: bool) -> str:
    kind = machine_device() if device == "auto" else device
    into = f" --into {place}" if named or place != home_folder() else ""
    return f"palestra engine install --{kind}{into}"
