"""`palestra serve` on a tiny model, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from palestra.cli.status import get, role_url
from palestra.server.client import ServiceClient
from tests.jobs import start
from tests.live import wait_for


class Served:
    """`palestra serve` on the tiny MoE, as a process that can be stopped and started again."""

    def __init__(self, base: Path, model: Path) -> None:
        self.base, self.model, self.folder = base, model, base / "runs" / "served"
        self.process: subprocess.Popen[str] | None = None
        self.started: tuple[str, ...] = ()

    def arguments(self, *more: str) -> list[str]:
        settings = ("run.save_dir=" + str(self.base / "runs"), "rollout.context_len=512", "rollout.threads=1")
        fields = [*settings, "serve.agent_key=true", "serve.max_response=64"]
        return ["serve", "--model", str(self.model), "--name", "served", *(f"--{field}" for field in fields), *more]

    def up(self, *more: str) -> ServiceClient:
        """Running with these arguments; a client of its control routes."""
        if self.process is None or self.started != more:
            self.down()
            self.process, self.started = start(*self.arguments(*more)), more
            wait_for(lambda: self.ready() or self.process.poll() is not None, "the service", 200)
            assert self.process.poll() is None, self.process.communicate()
        return self.client()

    def ready(self) -> bool:
        url = role_url(self.folder, "service")
        return url is not None and get(f"{url}/health") is not None

    def address(self, name: str) -> str:
        return str(json.loads((self.folder / "serve.json").read_text())[name])

    def key(self, name: str = "admin.token") -> str:
        return (self.folder / "roles" / name).read_text().strip()

    def client(self) -> ServiceClient:
        return ServiceClient(self.address("control_url"), self.key())

    def pid(self, role: str) -> int:
        return int(json.loads((self.folder / "roles" / f"{role}.json").read_text())["pid"])

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)

    def down(self) -> tuple[int, str, str]:
        """SIGTERM; exit status and what it printed."""
        if self.process is None:
            return 0, "", ""
        process, self.process = self.process, None
        process.terminate()
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, out, err
