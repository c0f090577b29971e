"""Engines and their router as processes: ready, watched, started again, and gone. The processes are stand-ins that answer within 0.1 s."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.engines.child import Child, shell_line, stop_all
from palestra.cli.engines.fleet import EngineFleet
from palestra.cli.engines.part import FleetError, Looks, Part, Patience
from palestra.cli.engines.ports import free_ports, is_free
from palestra.cli.engines.probes import PoolSizes, engine_ready, pool_sizes, router_lacks
from palestra.cli.engines.types import EngineCommand, EngineSetupError
from palestra.cli.engines.words import exception, failure, phase
from palestra.cli.keeper import Restarts
from tests.fakes import standin_engine
from tests.live import wait_for

QUICK = Patience(
    start_s=30, grace_s=1.0, poll_s=0.02, look_s=0.05, watch_s=0.1, answer_s=1.0, frozen_s=1.0, pause_s=0.05
)
MARK = "PALESTRA_TEST_FLEET"


def standin(name: str, port: int, mark: str, *words: str) -> EngineCommand:
    """A stand-in's command; `mark` is in its environment, so that what is left of it can be found."""
    argv = (sys.executable, "-I", "-S", str(standin_engine.__file__), str(port), *words)
    kind = "router" if name == "router" else "regular"
    return EngineCommand(name, argv, {MARK: mark}, f"http://127.0.0.1:{port}", kind=kind)  # type: ignore[arg-type]


def marked(mark: str) -> list[int]:
    """Every process whose environment has the mark, zombies left out."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@dataclass
class Watched:
    """A fleet with its watch in a thread."""

    fleet: EngineFleet
    lines: list[str]
    folder: Path
    stop: threading.Event = field(default_factory=threading.Event)
    fault: list[FleetError] = field(default_factory=list)

    def watch(self) -> None:
        try:
            self.fleet.watch(self.stop)
        except FleetError as error:
            self.fault.append(error)

    def events(self, name: str) -> list[str]:
        entries = [json.loads(line) for line in (self.folder / "engines.jsonl").read_text().splitlines()]
        return [entry["event"] for entry in entries if entry["engine"] == name]


@contextmanager
def running(folder: Path, mark: str, patience: Patience = QUICK, words: tuple[str, ...] = ()) -> Iterator[Watched]:
    """Two engines and a router, ready and watched."""
    a, b, r = free_ports("127.0.0.1", 3)
    engines = [standin("engine-0", a, mark, *words), standin("engine-1", b, mark, *words)]
    router = standin("router", r, mark, "--worker", engines[0].url, "--worker", engines[1].url)
    lines: list[str] = []
    fleet = EngineFleet(engines, router, folder, start_deadline_s=30, say=lines.append, patience=patience)
    with fleet:
        watched = Watched(fleet, lines, folder)
        assert fleet.start(watched.stop)
        thread = threading.Thread(target=watched.watch)
        thread.start()
        try:
            yield watched
        finally:
            watched.stop.set()
            thread.join(20)
    assert marked(mark) == []


def pid_of(url: str) -> int | None:
    """The process that answers there now."""
    with suppress(OSError, ValueError), standin_engine.OPENER.open(f"{url}/", timeout=1) as answer:
        return int(json.loads(answer.read())["pid"])
    return None


def other_than(url: str, pid: int) -> Callable[[], bool]:
    return lambda: pid_of(url) not in (None, pid)


# What a log says


SGLANG_LOG = """\
[2026-01-01 10:00:00] Ignore import error when loading sglang.srt.models.x: failed
/venv/x.py:71: UserWarning: old
  warnings.warn(
[2026-01-01 10:00:03] Load weight begin. avail mem=20.57 GB
Loading shards:   0% Completed | 0/2\rLoading shards:  50% Completed | 1/2
"""
SCHEDULER_FAULT = """\
[2026-01-01 10:00:04] Scheduler hit an exception: Traceback (most recent call last):
  File "/venv/scheduler.py", line 10, in run
    self.load()
  File "/venv/loader.py", line 20, in load
    raise ValueError(
ValueError: no lm_head in model.safetensors
the second line of it

[2026-01-01 10:00:04] SIGQUIT received. signum=None
Traceback (most recent call last):
  File "/venv/launch.py", line 5, in <module>
    recv()
EOFError
[2026-01-01 10:00:09] kill_process_tree called
"""


def test_a_log_says_what_an_engine_does_and_why_it_ended() -> None:
    assert phase("") == "starts"
    assert phase(SGLANG_LOG) == "loads weights (50%)"
    assert phase(SGLANG_LOG + "[x] Load weight end. elapsed=1\n") == "makes its cache"
    assert failure(SGLANG_LOG + SCHEDULER_FAULT).splitlines() == [
        'File "/venv/loader.py", line 20, in load',
        "ValueError: no lm_head in model.safetensors",
        "the second line of it",
    ]
    assert exception(SGLANG_LOG + SCHEDULER_FAULT) == "ValueError: no lm_head in model.safetensors"
    assert exception(SGLANG_LOG) is None


def test_a_log_without_an_exception_gives_what_sounds_like_a_fault() -> None:
    usage = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --no-such\n"
    assert failure(SGLANG_LOG + usage) == "launch_server.py: error: unrecognized arguments: --no-such"
    assert failure("a\nb\n") == "a\nb"
    assert failure("") == "(it printed nothing)"
    only = 'Traceback (most recent call last):\n  File "x", line 1, in f\n    g()\nEOFError\n'
    assert failure(only).splitlines()[-1] == "EOFError"


def test_a_log_that_is_one_long_line_is_cut() -> None:
    assert len(failure("fatal " + "x" * 100_000)) < 1000


# Ports and answers


def test_ports_are_free_different_and_out_of_the_range_of_outgoing_connections() -> None:
    ports = free_ports("127.0.0.1", 5)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 5
    assert all(20_000 <= port < lowest and is_free("127.0.0.1", port) for port in ports)


def test_a_port_somebody_listens_on_is_not_free_and_a_foreign_address_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("127.0.0.1", server.getsockname()[1])
    with pytest.raises(EngineSetupError, match="no address of this machine"):
        free_ports("203.0.113.7", 1)


def test_pools_are_read_from_what_the_engine_says() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    server = standin_engine.start(port)
    try:
        url = f"http://127.0.0.1:{port}"
        assert engine_ready(url, 2) == PoolSizes(16_384, 64, 2048)
        assert str(pool_sizes(url, 2)) == "16,384 tokens of cache, 64 requests at a time, 2,048 tokens a request"
        assert router_lacks(url, [url], 2) == [url]
    finally:
        server.shutdown()
        server.server_close()
    assert engine_ready(url, 2) is None
    assert router_lacks(url, [url], 2) is None


# One process and its watch, on a clock of the test's


class Now(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class FakeChild:
    """A process that ends when the test says so."""

    log = Path("engine-0.out")

    def __init__(self) -> None:
        self.how: str | None = None
        self.traced = False

    def poll(self) -> str | None:
        return self.how

    def debugged(self) -> bool:
        return self.traced

    def kill(self) -> None:
        self.how = "was ended by signal 9"

    def wait(self) -> str:
        return str(self.how)

    def log_end(self) -> str:
        return "ValueError: boom"


class Scene:
    """A part, all that it started, and what it tells."""

    def __init__(self) -> None:
        self.answers = True
        self.children: list[FakeChild] = []
        self.told: list[tuple[str, str]] = []
        self.part = Part(
            EngineCommand("engine-0", ("serve", "a b"), {"X": "1"}, "http://e"),
            Path("."),
            Looks(lambda _: self.answers, lambda _: self.answers, lambda _: self.answers),
            Patience(start_s=300),
            lambda name, event, line, more: self.told.append((event, line)),
            Now(),
            Restarts(5, 600.0, 1.0),
            spawn=self.spawn,
        )

    def spawn(self, *_: Any) -> Any:
        self.children.append(FakeChild())
        return self.children[-1]

    def go(self, start: float, end: float, every: float = 0.5) -> None:
        """Steps from one time to another."""
        while start <= end:
            self.part.step(start)
            start += every

    def up(self) -> None:
        self.part.launch(0.0)
        self.go(0.0, 2.0)
        assert self.part.ready


def test_a_silent_engine_is_killed_only_after_two_minutes_of_several_missed_answers() -> None:
    scene = Scene()
    scene.up()
    scene.answers = False
    scene.go(2.5, 119.0)
    assert scene.part.ready
    scene.go(119.5, 140.0)
    assert [event for event, _ in scene.told].count("ended") == 1
    assert len(scene.children) == 2
    (line,) = [line for event, line in scene.told if event == "restarts"]
    assert line.startswith("engine-0 gave no answer for 12")


def test_one_missed_answer_after_we_stood_still_ourselves_kills_nothing() -> None:
    scene = Scene()
    scene.up()
    scene.go(2.5, 10.0)
    scene.answers = False
    scene.go(1000.0, 1001.0)  # this process was stopped for a quarter of an hour
    scene.answers = True
    scene.go(1002.0, 1100.0)
    assert scene.part.ready
    assert len(scene.children) == 1


def test_an_engine_under_a_debugger_may_be_silent() -> None:
    scene = Scene()
    scene.up()
    scene.answers, scene.children[0].traced = False, True
    scene.go(2.5, 600.0)
    assert len(scene.children) == 1
    assert "debugged" in [event for event, _ in scene.told]


def test_restarts_back_off_and_the_sixth_end_within_ten_minutes_ends_the_fleet() -> None:
    scene = Scene()
    scene.up()
    now = 10.0
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0):
        scene.part.child.kill()  # type: ignore[union-attr]
        scene.part.step(now)
        scene.part.step(now + pause - 0.1)
        assert scene.part.child is None
        scene.go(now + pause, now + pause + 2.0)
        assert scene.part.ready
        now += 40.0
    scene.part.child.kill()  # type: ignore[union-attr]
    with pytest.raises(FleetError) as caught:
        scene.part.step(now)
    assert "engine-0 ended 6 times within 10 min, the last time it was ended by signal 9" in str(caught.value)
    assert "X=1 serve 'a b'" in str(caught.value)


def test_an_engine_that_is_not_ready_in_time_is_an_error_at_the_start_and_a_restart_later() -> None:
    scene = Scene()
    scene.answers = False
    scene.part.launch(0.0)
    with pytest.raises(FleetError, match="was not ready within 300 s"):
        scene.go(0.0, 301.0)
    later = Scene()
    later.up()
    later.part.child.kill()  # type: ignore[union-attr]
    later.answers = False
    later.go(3.0, 310.0)
    assert len(later.children) == 3
    assert not later.part.ready


# Real processes


@pytest.mark.walk
def test_a_fleet_is_ready_as_a_whole_and_says_what_it_does_and_has(tmp_path: Path) -> None:
    with running(tmp_path, "whole", words=("--after", "3")) as scene:
        fleet = scene.fleet
        assert fleet.url == fleet.router.command.url  # type: ignore[union-attr]
        assert set(fleet.pools) == set(fleet.workers) == {part.command.url for part in fleet.engines}
        told = "\n".join(scene.lines)
        assert "engine-0 loads weights; engine-1 loads weights" in told
        assert "engine-1 ready in" in told
        assert "16,384 tokens of cache, 64 requests at a time" in told
        assert len(scene.lines) < 10
        assert scene.events("router") == ["started", "ready"]
        assert router_lacks(fleet.url, fleet.workers, 2) == []
        asked = standin_engine.OPENER.open(f"{fleet.workers[0]}/asked", timeout=2).read()
        assert json.loads(asked)["paths"].count("/health") == 1  # it makes an engine generate: at the start only
    assert scene.events("engine-0")[-1] == "stopped"


@pytest.mark.walk
def test_an_engine_that_ends_while_it_starts_is_one_clear_error(tmp_path: Path) -> None:
    good, bad = free_ports("127.0.0.1", 2)
    commands = [
        standin("engine-0", good, "bad start"),
        standin("engine-1", bad, "bad start", "--dies", "no such tensor"),
    ]
    fleet = EngineFleet(commands, None, tmp_path, start_deadline_s=30, say=lambda _: None, patience=QUICK)
    with pytest.raises(FleetError) as caught, fleet:
        fleet.start(threading.Event())
    lines = str(caught.value).splitlines()
    assert lines[0] == "engine-1 ended with status 1 while it started:"
    assert lines[2] == "RuntimeError: no such tensor"
    assert lines[-1] == shell_line(commands[1])
    assert "Ignore import error" not in str(caught.value)
    assert marked("bad start") == []


@pytest.mark.walk
def test_a_program_that_does_not_exist_and_an_interrupt_while_starting(tmp_path: Path) -> None:
    missing = EngineCommand("engine-0", ("/no/such/python",), {}, "http://127.0.0.1:1")
    fleet = EngineFleet([missing], None, tmp_path, start_deadline_s=30, say=print, patience=QUICK)
    with pytest.raises(FleetError, match="could not be started: FileNotFoundError"), fleet:
        fleet.start(threading.Event())
    (port,) = free_ports("127.0.0.1", 1)
    stop = threading.Event()
    slow = standin("engine-0", port, "interrupt", "--after", "600")
    with EngineFleet([slow], None, tmp_path, start_deadline_s=60, say=print, patience=QUICK) as fleet:
        threading.Timer(0.3, stop.set).start()
        assert not fleet.start(stop)
    assert marked("interrupt") == []


@pytest.mark.walk
def test_what_dies_is_started_again_on_its_port_and_the_router_finds_it(tmp_path: Path) -> None:
    with running(tmp_path, "again") as scene:
        fleet = scene.fleet
        for url, name in ((fleet.workers[0], "engine-0"), (fleet.url, "router")):
            before = pid_of(url)
            assert before is not None
            os.kill(before, signal.SIGKILL)
            wait_for(other_than(url, before), f"{name} is back")
            wait_for(lambda name=name: scene.events(name)[-2:] == ["started", "ready"], f"{name} is ready")
        wait_for(lambda: router_lacks(fleet.url, fleet.workers, 1) == [], "the router has both engines")
        told = "\n".join(scene.lines)
        assert "engine-0 was ended by signal 9: it is started again in 0.05 s (restart 1 of 5 within 10 min)" in told
        assert "router ready again in" in told
        assert scene.fault == []


@pytest.mark.walk
def test_a_frozen_engine_is_killed_and_started_again(tmp_path: Path) -> None:
    with running(tmp_path, "frozen", replace(QUICK, answer_s=0.3)) as scene:
        url = scene.fleet.workers[1]
        before = pid_of(url)
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        wait_for(other_than(url, before), "the frozen engine is replaced")
        assert any("engine-1 gave no answer for" in line for line in scene.lines)
        assert not Path(f"/proc/{before}").exists()


@pytest.mark.walk
def test_an_engine_that_ends_again_and_again_ends_the_fleet(tmp_path: Path) -> None:
    with running(tmp_path, "gives up", replace(QUICK, restarts=1)) as scene:
        url = scene.fleet.workers[0]
        first = pid_of(url)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_for(other_than(url, first), "the first restart")
        wait_for(lambda: scene.events("engine-0")[-1] == "ready", "it is ready again")
        os.kill(int(pid_of(url) or 0), signal.SIGKILL)
        (fault,) = wait_for(lambda: scene.fault, "the fleet gives up")
        assert "engine-0 ended 2 times within 10 min" in str(fault)


@pytest.mark.walk
def test_one_that_ignores_sigterm_and_what_left_its_group_are_gone_too(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    child = Child(standin("engine-0", port, "deaf", "--deaf", "--leave"), tmp_path, grace_s=0.5)
    wait_for(lambda: pid_of(f"http://127.0.0.1:{port}"), "it answers")
    assert len(marked("deaf")) == 3  # leash, engine, daemon
    assert pid_of(f"http://127.0.0.1:{port}") == child.pids()[0]
    stop_all([child])
    assert marked("deaf") == []
    assert child.poll() == "was ended by signal 9"


@pytest.mark.walk
def test_a_fleet_that_is_killed_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    patience = replace(QUICK, grace_s=100.0)  # the test's own deadline is shorter
    engine = standin("engine-0", port, "kill", "--deaf")
    with EngineFleet([engine], None, tmp_path, start_deadline_s=30, say=print, patience=patience) as fleet:
        assert fleet.start(threading.Event())
        assert (fleet.url, list(fleet.pids)) == (engine.url, ["engine-0"])
        fleet.kill()
    assert marked("kill") == []


@pytest.mark.walk
def test_an_engine_of_another_host_is_not_started_here_but_the_router_has_it(tmp_path: Path) -> None:
    here, there, port = free_ports("127.0.0.1", 3)
    away = replace(standin("engine-1", there, "away"), node=1)
    engine = standin("engine-0", here, "away")
    router = standin("router", port, "away", "--worker", engine.url, "--worker", away.url)
    lines: list[str] = []
    stop = threading.Event()
    with EngineFleet([engine, away], router, tmp_path, start_deadline_s=60, say=lines.append, patience=QUICK) as fleet:
        started = threading.Thread(target=fleet.start, args=(stop,))
        started.start()
        wait_for(lambda: any(f"router looks for {away.url}" in line for line in lines), "the router lacks it", 30)
        server = standin_engine.start(there)  # as somebody does on that host
        started.join(30)
        server.shutdown()
        server.server_close()
        assert fleet.router is not None
        assert fleet.router.ready
        assert lines[0] == f"engine-1 belongs on host 1; start it there:\n{shell_line(away)}"
    assert marked("away") == []


@pytest.mark.walk
def test_a_leash_that_is_killed_takes_its_engine_along(tmp_path: Path) -> None:
    with running(tmp_path, "leash") as scene:
        url = scene.fleet.workers[0]
        before = pid_of(url)
        leash = int(Path(f"/proc/{before}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(leash, signal.SIGKILL)
        assert before is not None
        wait_for(other_than(url, before), "the engine is back")
        assert any("lost the process that holds it" in line for line in scene.lines)


OWNER = """
import sys, threading
from pathlib import Path
from tests.test_engines_fleet import QUICK, standin
from palestra.cli.engines.fleet import EngineFleet
from palestra.cli.engines.ports import free_ports
(port,) = free_ports("127.0.0.1", 1)
fleet = EngineFleet([standin("engine-0", port, "owner", "--deaf", "--leave")], None, Path(sys.argv[1]), start_deadline_s=30, say=print,
                    patience=QUICK)
fleet.start(threading.Event())
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.walk
def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{OWNER}", str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        for line in owner.stdout:
            if line == "up\n":
                break
        assert len(marked("owner")) == 3
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: marked("owner") == [], "nothing is left")
