"""`palestra status RUN`: what a running job or service does, and who waits for whom."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.cli.config import kind_of


def main(argv: Sequence[str]) -> int:
    """Prints one line a role; 1 where the run is not running."""
    parser = argparse.ArgumentParser(prog="palestra status")
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args(argv)
    roles = sorted((options.run / "roles").glob("*.json"))
    if not roles:
        print(f"{options.run}: no run here, or none of its roles ever started", file=sys.stderr)
        return 1
    alive, kind = 0, kind_of(options.run)
    for path in roles:
        about = json.loads(path.read_text())
        text = role_status(path.stem, about["url"], kind)
        alive += text is not None
        print(f"{path.stem:8} pid {about['pid']:<8} {text or 'gone'}")
    return 0 if alive else 1


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float = 5.0) -> bytes | None:
    """The body of a role's 200 answer; None where nobody answers, or with another status. Polled often, so without a client library: those
    make a TLS context per call."""
    try:
        with _opener.open(url, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except (OSError, ValueError):
        return None


def role_url(folder: Path, name: str) -> str | None:
    """Where a role of this run announced itself; None where it did not."""
    try:
        return str(json.loads((folder / "roles" / f"{name}.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        return None


def role_status(name: str, url: str, kind: str = "train") -> str | None:
    """What a role of a run of this kind says of itself; None where nobody answers."""
    raw = get(f"{url}/{'status' if name == 'service' else 'health'}")
    if raw is None:
        return None
    try:
        value = json.loads(raw)
    except ValueError:
        return "ok"
    if name == "service" and kind == "serve":
        said = service_line(value)
    else:
        said = str(value.get("waits") or value.get("doing") or value.get("status") or "ok")
    return "; ".join([said, *lost_engines(value.get("workers") or ())])


def lost_engines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The engines that have no requests, and why."""
    lost = [worker for worker in workers if worker["state"] != "serving"]
    if not lost:
        return []
    return [
        f"{len(workers) - len(lost)} of {len(workers)} engines serve",
        *(f"{worker['url']} does not: {worker['why']}" for worker in lost),
    ]


def service_line(status: Mapping[str, Any]) -> str:
    """A service without a plan of its own: nobody is waited for, so its load in one line."""
    groups = status["groups"]
    parts = [
        f"sessions {status['sessions']}",
        f"requests at the engine {status['engine_requests']}",
        f"groups ready {groups['ready']}, claimed {groups['claimed']}",
    ]
    if status["publishing"] is not None:
        parts.append(f"engines wait for the weights of version {status['publishing']}")
    return "; ".join(parts)
