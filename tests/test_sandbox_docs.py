"""The sandbox's examples in README and guide, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.ci


def example(page: str, mark: str) -> str:
    """The block of Python that has this in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (found,) = (block for block in blocks if mark in block)
    return str(found)


def run(code: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_s_example() -> None:
    assert run(example("docs/sandbox.md", "Pool(")).splitlines() == ["ok b'6\\n'", "timeout b'partial\\n'", "b'21\\n'"]


def test_the_readme_s_example() -> None:
    code = example("README.md", "async def try_it").replace("timeout=5", "timeout=1")
    snippets = ("print(6 * 7)", "while True: pass", "open('/root/x')")
    asked = f"import asyncio\nfor code in {snippets}:\n    print(asyncio.run(try_it(code)).split()[:2])"
    first, second, third = run(f"{code}\n{asked}").splitlines()
    assert first == "['ok:', '42']"
    assert second == "['timeout:']"
    assert third.startswith("['nonzero:'")
