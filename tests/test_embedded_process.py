"""How the embedded engine's process ends, and how it refuses to start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.conformance.engine_kit import DEADLINE_S, wait_until
from tests.embedded import process
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.walk


def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with process(folder, tmp_path / "log") as (child, url):
            body = {"input_ids": [10], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
            httpx2.post(f"{url}/pause_generation", json={})
            client = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
            text = json.dumps(body)
            client.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            wait_until(lambda url=url: "sglang:num_queue_reqs 1" in httpx2.get(f"{url}/metrics").text, "the request")
            assert children(child.pid) == []
            child.send_signal(sign)
            child.wait(DEADLINE_S)
            client.settimeout(DEADLINE_S)
            answer = client.recv(1 << 16) if sign == signal.SIGTERM else b""
            client.close()
            assert sign == signal.SIGKILL or b" 500 " in answer.splitlines()[0]
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url}/health")


@pytest.mark.parametrize(
    ("flags", "word"), [(["--model-path", "/nowhere"], "config.json"), (["--dtype", "int3"], "int3")]
)
def test_a_start_that_cannot_succeed_says_why(flags: list[str], word: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    command = [sys.executable, "-m", "palestra.server.embedded", "--model-path", str(folder), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr


def children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
