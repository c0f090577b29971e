"""The engine agent over HTTP: answers, errors and their codes, one pull for many callers, bounds, and the process itself."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from palestra.cli.engines.agent import FolderPuller, main
from palestra.server.weights_agent import MOST_BODY, MOST_REQUESTS, PullRefused, WeightsListener
from palestra.trainer.weights.delta import DeltaFolder
from palestra.trainer.weights.deltaapply import LocalFolder
from tests.test_delta import Tensors, check_equal, damage, export_of, in_memory, model, nudge, write_two_files


def ask(url: str, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    """One request; status and parsed body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read() or b"null")
    finally:
        connection.close()


@pytest.fixture
def root() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture
def local(root: Path) -> Iterator[LocalFolder]:
    folder = LocalFolder(root / "local")
    yield folder
    folder.close()


def publish(shared: Path, versions: int) -> list[Tensors]:
    folder, tensors, history = DeltaFolder(shared, write_two_files), model(), []
    for version in range(versions):
        nudge(tensors, ["a.weight"], version)
        folder.write(export_of(tensors), version)
        history.append(dict(tensors))
    return history


def test_a_service_pulls_versions_and_learns_what_is_wrong(root: Path, local: LocalFolder) -> None:
    shared = root / "shared"
    history = publish(shared, 3)
    with WeightsListener(FolderPuller(shared, local)) as listener:
        assert ask(listener.url, "GET", "/health") == (200, {"status": "ok"})
        status, first = ask(listener.url, "POST", "/pull", {"version": 1, "shared": str(shared)})
        assert (status, sorted(first)) == (200, ["bytes", "from", "path", "seconds"])
        assert (first["path"], first["from"]) == (str(root / "local" / "v1"), "full")
        assert first["bytes"] > 10_000
        status, second = ask(listener.url, "POST", "/pull", {"version": 2})
        assert (status, second["from"]) == (200, "delta")
        check_equal(Path(second["path"]), history[2])
        assert ask(listener.url, "POST", "/pull", {"version": 2})[1]["bytes"] == 0

        status, said = ask(listener.url, "POST", "/pull", {"version": 3})
        assert (status, said["error"]["code"]) == (409, "not_there_yet")
        damage(shared / "delta-v1.pal", 30)
        shutil.rmtree(local.root / "v1")
        status, said = ask(listener.url, "POST", "/pull", {"version": 1})
        assert (status, said["error"]["code"]) == (422, "damaged")
        assert "delta-v1.pal" in said["error"]["message"]
        assert "The next full folder mends it" in said["error"]["message"]
        status, said = ask(listener.url, "POST", "/pull", {"version": 1, "shared": f"{shared}/../elsewhere"})
        assert (status, said["error"]["code"]) == (403, "forbidden")
        status, said = ask(listener.url, "GET", "/status")
        assert (status, said["versions"], said["pulling"]) == (200, [2], [])
        assert said["last"]["version"] == 1


def test_a_full_disk_is_507(root: Path, local: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    publish(root / "shared", 1)
    monkeypatch.setattr(shutil, "copyfile", full)
    with WeightsListener(FolderPuller(root / "shared", local)) as listener:
        status, said = ask(listener.url, "POST", "/pull", {"version": 0})
    assert (status, said["error"]["code"]) == (507, "disk_full")
    assert local.versions() == []


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"shared": "x"}',
    b'{"version": "1"}',
    b'{"version": -1}',
    b'{"version": true}',
    b'{"version": 1e3}',
]


@pytest.mark.parametrize("body", [*BODIES, b'{"version": 1, "shared": 5}', b"\xff"])
def test_bad_bodies_are_400(root: Path, local: LocalFolder, body: bytes) -> None:
    with WeightsListener(FolderPuller(root, local)) as listener:
        status, said = ask(listener.url, "POST", "/pull", body)
    assert (status, said["error"]["code"]) == (400, "invalid_request")


def test_large_bodies_other_routes_and_missing_tokens_are_refused(root: Path, local: LocalFolder) -> None:
    with WeightsListener(FolderPuller(root, local), token="secret") as listener:
        assert ask(listener.url, "POST", "/pull", b" " * (MOST_BODY + 1), "secret")[0] == 413
        assert ask(listener.url, "GET", "/else", token="secret")[0] == 404
        assert ask(listener.url, "GET", "/status")[0] == 401
        assert ask(listener.url, "POST", "/pull", {"version": 1}, "wrong")[0] == 401
        assert ask(listener.url, "POST", "/pull", {"version": 1}, "secret")[0] == 409
        assert ask(listener.url, "GET", "/health")[0] == 200


class Slow:
    """Pulls only when it is let."""

    def __init__(self) -> None:
        self.go, self.began, self.pulled = threading.Event(), threading.Event(), list[int]()

    def pull(self, version: int, shared: str | None) -> Mapping[str, Any]:
        self.pulled.append(version)
        self.began.set()
        assert self.go.wait(30)
        if version == 7:
            raise PullRefused("no", 422, "damaged")
        return {"path": f"v{version}"}

    def status(self) -> Mapping[str, Any]:
        return {}


@pytest.mark.parametrize("version", [3, 7])
def test_callers_of_one_version_share_one_pull(version: int) -> None:
    slow = Slow()
    with WeightsListener(slow) as listener, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, listener.url, "POST", "/pull", {"version": version})]
        assert slow.began.wait(30)
        asked += [pool.submit(ask, listener.url, "POST", "/pull", {"version": version}) for _ in range(4)]
        while ask(listener.url, "GET", "/status")[1]["pulling"] != [version]:
            pass
        other = pool.submit(ask, listener.url, "POST", "/pull", {"version": 4})
        while ask(listener.url, "GET", "/status")[1]["pulling"] != sorted([version, 4]):
            pass
        slow.go.set()
        statuses = {one.result()[0] for one in asked}
        assert statuses == ({200} if version == 3 else {422})
        assert other.result() == (200, {"path": "v4"})
    # A caller whose connection came after the end of the first pull has one of its own.
    assert slow.pulled[0] == version
    assert slow.pulled.count(4) == 1


def test_a_wait_has_an_end_and_a_fault_of_ours_is_told() -> None:
    slow = Slow()
    with WeightsListener(slow, wait_s=0.05) as listener, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, listener.url, "POST", "/pull", {"version": 1})
        assert slow.began.wait(30)
        status, said = ask(listener.url, "POST", "/pull", {"version": 1})
        assert (status, said["error"]["code"]) == (503, "busy")
        assert ask(listener.url, "POST", "/pull", {"version": 2})[0] == 503
        slow.go.set()
        assert first.result()[0] == 200
    slow.pulled = None  # type: ignore[assignment]
    with WeightsListener(slow) as listener:
        status, said = ask(listener.url, "POST", "/pull", {"version": 1})
    assert (status, said["error"]["code"]) == (500, "internal")
    assert "AttributeError" in said["error"]["message"]


def test_more_connections_than_allowed_are_sent_away() -> None:
    slow = Slow()
    with WeightsListener(slow) as listener:
        place = urlsplit(listener.url)
        idle = [socket.create_connection((place.hostname, place.port), 30) for _ in range(MOST_REQUESTS)]
        # All of them are accepted before this one, in their order.
        with socket.create_connection((place.hostname, place.port), 30) as late:
            assert late.makefile("rb").readline().startswith(b"HTTP/1.0 503")
        for one in idle:
            one.close()


def test_bad_options_are_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared, folder = ["--shared", str(root)], ["--local", str(root / "l"), "--port", "0"]
    assert main([*shared, *folder, "--host", "0.0.0.0"]) == 2
    assert "give --token-file" in capsys.readouterr().err
    (root / "token").write_text("\n")
    assert main([*shared, *folder, "--token-file", str(root / "token")]) == 2
    assert "is empty" in capsys.readouterr().err
    held = LocalFolder(root / "l")
    assert main([*shared, *folder]) == 2
    assert "another engine agent" in capsys.readouterr().err
    held.close()
    with pytest.raises(SystemExit):
        main([*shared, *folder, "--keep", "0"])


def test_the_agent_loads_no_torch() -> None:
    code = "import sys, palestra.cli.engines.agent; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "safetensors", "transformers", "fastapi", "pydantic"} & set(done.stdout.split())


@pytest.mark.walk
def test_the_process_serves_dies_and_begins_again(root: Path) -> None:
    shared = root / "shared"
    history = publish(shared, 2)
    command = [sys.executable, "-m", "palestra.cli.main", "engine", "agent", "--port", "0"]
    command += ["--shared", str(shared), "--local", str(root / "local")]
    for kill in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2].rstrip(",")
            for version in (0, 1):
                status, said = ask(url, "POST", "/pull", {"version": version})
                assert status == 200
                check_equal(Path(said["path"]), history[version])
            process.send_signal(kill)
            assert process.wait(30) == (0 if kill == signal.SIGTERM else -signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
