"""The peers: libraries of environments from the Python index, each in a virtual environment of its own.

In: a folder. Out: installed peers, and how a script is run among their packages. It waits for pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway_peers import PEERS as GATEWAYS

ROLES = Path(__file__).with_name("env_step_roles.py")


@dataclass(frozen=True, slots=True)
class StepPeer:
    """One distribution of the index, at the version that was looked at."""

    name: str
    version: str
    few: tuple[str, ...] = ()
    """What its measured parts need, where all that it asks for cannot be had: without dependencies, by the index's names."""

    def install(self, folder: Path) -> None:
        """Makes its environment, unless there is one for this version.

        Raises:
            RuntimeError: pip failed; the message holds its last words.
        """
        where = folder / self.name
        mark = where / "installed"
        if mark.exists() and mark.read_text() == self.version:
            return
        _run([sys.executable, "-m", "venv", "--clear", str(where)])
        pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        try:
            _run([*pip, f"{self.name}=={self.version}"])
        except RuntimeError:
            if not self.few:
                raise
            _run([*pip, "--no-deps", f"{self.name}=={self.version}"])
            _run([*pip, *self.few])
        mark.write_text(self.version)

    def command(self, folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
        """What runs a role among its packages: the words and the variables. The interpreter is the one that we run on, since an
        environment's own link to it breaks when the folder is moved.
        """
        (site,) = (folder / self.name / "lib").glob("python3*/site-packages")
        environ = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        interpreter = str(getattr(sys, "_base_executable", sys.executable))
        return [interpreter, "-s", "-P", str(ROLES), *words], environ


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")


GEM = StepPeer("gem-llm", "0.1.0", ("reasoning-gym", "msgspec"))
SKYRL = StepPeer("skyrl-gym", "0.4.0", ("numpy", "pandas", "requests"))
OPENENV = StepPeer("openenv", next(peer.version for peer in GATEWAYS if peer.name == "openenv"))
ALL = (GEM, SKYRL, OPENENV)
