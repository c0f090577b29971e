"""docs/first-environment.md is true: its commands and its code are run, in order, as a newcomer would; its excerpts stand in the files."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from palestra.cli.config import load_config
from palestra.cli.envs.new import names_of, write

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first-environment.md"
PORT = "8799"
COMMANDS = ("palestra", "pip", "pytest", "python")
SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A block of code in the page."""

    how: str
    """What the comment above it says, such as `run` or `file: PATH`; "" without one."""
    language: str
    text: str


def blocks() -> list[Block]:
    pattern = r"(?:<!-- (?P<how>[^\n]*) -->\n)?```(?P<language>[a-z]*)\n(?P<text>.*?)^```$"
    return [
        Block(found["how"] or "", found["language"], found["text"])
        for found in re.finditer(pattern, PAGE.read_text(), re.S | re.M)
    ]


def test_every_command_is_run_or_says_why_not() -> None:
    kinds = {(block.language, block.how.partition(":")[0]) for block in blocks() if block.language}
    assert kinds <= {("sh", "run"), ("sh", "not run"), ("python", "run"), ("python", "file"), ("toml", "file")}
    assert sum(block.how.startswith("run") for block in blocks()) >= 6


def test_excerpts_stand_in_the_files_that_are_written(tmp_path: Path) -> None:
    write(tmp_path, names_of("letter-count"), "tool")
    excerpts = [block for block in blocks() if block.how.startswith("file: ")]
    assert len(excerpts) >= 2
    for block in excerpts:
        assert block.text in (tmp_path / block.how.removeprefix("file: ")).read_text()


class Newcomer:
    """A Python environment of its own, in which Palestra is installed, and a folder to work in."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder / "work", port
        self.folder.mkdir()
        (self.folder / "examples").symlink_to(ROOT / "examples")
        venv.create(folder / "venv", with_pip=False)
        bin_folder = folder / "venv" / "bin"
        for command, words in (("palestra", "-m palestra.cli.main"), ("pip", "-m pip"), ("pytest", "-m pytest")):
            shim = bin_folder / command
            shim.write_text(f'#!/bin/sh\nexec "{bin_folder / "python"}" {words} "$@"\n')
            shim.chmod(0o755)
        paths = [str(ROOT / ".dev"), sysconfig.get_path("purelib")]
        self.env = os.environ | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(paths),
            "PYTHONSAFEPATH": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.env.pop("VIRTUAL_ENV", None)
        self.background: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> str:
        """Runs a block, as the comment above it says; its output."""
        text = block.text.replace(PORT, str(self.port))
        if block.how == "run: background":
            self.background.append(subprocess.Popen(["sh", "-ec", f"exec {text}"], cwd=self.folder, env=self.env))
            self._await_port()
            return ""
        command = ["python", "-c", text] if block.how == "run: python" else ["sh", "-ec", text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _await_port(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.background[-1].poll() is None, "what was started in the background has ended"
            time.sleep(0.05)
        raise AssertionError("nothing listens after a minute")

    def leave(self) -> None:
        """Ends what was started."""
        for process in self.background:
            process.terminate()
            process.wait(30)


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    somebody = Newcomer(tmp_path, port)
    yield somebody
    somebody.leave()


@pytest.mark.walk
@pytest.mark.timeout(900)
def test_a_newcomer_gets_through_the_page(newcomer: Newcomer) -> None:
    told = [(block, newcomer.run(block)) for block in blocks() if block.how.startswith("run")]
    output = "\n".join(text for _, text in told)
    assert "0 failed" in output
    assert "2 passed" in output
    (shown,) = (block for block in blocks() if not block.language)
    assert shown.text in output, "the episode that is shown is the one that is played"
    readme = (newcomer.folder / "letter-count" / "README.md").read_text()
    assert "| `letter-count/LetterCount-v0` | 20 of 20 | 0.000 | 0.000 | 1.000 |" in readme
    assert load_config(newcomer.folder / "letter-count" / "run.toml").env.id == "letter-count/LetterCount-v0"
    assert (newcomer.folder / "results" / "episodes.jsonl").read_text().count("\n") == 40
    assert sys.prefix not in readme
