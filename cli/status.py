"""`palestra status RUN`: what a running job does, and who waits for whom."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx2 as httpx


def main(argv: Sequence[str]) -> int:
    """Prints one line a role; 1 where the run is not running."""
    parser = argparse.ArgumentParser(prog="palestra status")
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args(argv)
    roles = sorted((options.run / "roles").glob("*.json"))
    if not roles:
        print(f"{options.run}: no run here, or none of its roles ever started", file=sys.stderr)
        return 1
    alive = 0
    for path in roles:
        about = json.loads(path.read_text())
        text = role_status(path.stem, about["url"])
        alive += text is not None
        print(f"{path.stem:8} pid {about['pid']:<8} {text or 'gone'}")
    return 0 if alive else 1


def role_status(name: str, url: str) -> str | None:
    """What a role says of itself; None where nobody answers."""
    try:
        answer = httpx.get(f"{url}/{'status' if name == 'service' else 'health'}", timeout=5.0)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return f"HTTP {answer.status_code}"
    try:
        value = answer.json()
    except ValueError:
        return "ok"
    return str(value.get("waits") or value.get("doing") or value.get("status") or "ok")
