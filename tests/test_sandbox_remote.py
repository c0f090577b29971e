"""Boxes on another machine: a real host process over loopback, and the ways in which it and its clients can lose each other."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.sandbox.box import AgentBox
from palestra.sandbox.inside.frames import FrameError, pack
from palestra.sandbox.remote import Remote
from palestra.sandbox.types import (
    MIB,
    BoxFileError,
    BoxLostError,
    BoxSpec,
    Enforced,
    Limits,
    Mount,
    SandboxBusyError,
    SandboxUnavailableError,
)
from palestra.sandbox.wire import (
    CONTENT_TYPE,
    KEY,
    enforced_from_json,
    enforced_to_json,
    falls_short,
    read_frame,
    spec_from_message,
    spec_to_message,
    weakest,
)
from palestra.server.sandbox_host.checks import OPERATIONS, check_spec, read_request
from palestra.server.sandbox_host.types import HostRefusal
from tests.live import until, wait_for
from tests.sandbox_hosts import HostProcess, breakable, host_process

walk = pytest.mark.walk
BOXES = 3
SPEC = BoxSpec(limits=Limits(output_bytes=1 << 20))
words = st.text(max_size=8)
specs = st.builds(
    BoxSpec,
    limits=st.builds(Limits, pids=st.integers(4, 99), cpus=st.one_of(st.just(2), st.floats(0.1, 4))),
    image=st.none() | words,
    mounts=st.lists(st.builds(Mount, st.just("/a"), st.just("/b")), max_size=2).map(tuple),
    preload=st.lists(words, max_size=2).map(tuple),
    packages=st.none() | words,
    env=st.lists(st.tuples(words, words), max_size=2).map(tuple),
)
levels = st.sampled_from(["kernel", "watched", "none"])
enforcements = st.builds(
    Enforced, files=levels, network=levels, cpu=levels, notes=st.lists(words, max_size=2).map(tuple)
)


# ---- words of the wire


@given(specs)
def test_a_specification_travels_whole(spec: BoxSpec) -> None:
    assert spec_from_message(read_frame(pack(spec_to_message(spec)))) == spec


@given(enforcements, enforcements)
def test_of_several_hosts_the_weakest_counts(one: Enforced, other: Enforced) -> None:
    assert enforced_from_json(enforced_to_json(one)) == one
    both = weakest({"a": one, "b": other})
    assert not falls_short(one, both)
    assert not falls_short(other, both)
    assert all(
        getattr(both, name) in (getattr(one, name), getattr(other, name)) for name in ("files", "network", "cpu")
    )
    assert both.notes == tuple([f"a: {note}" for note in one.notes] + [f"b: {note}" for note in other.notes])


def test_promises_in_words_that_nobody_knows_count_as_not_held() -> None:
    found = enforced_from_json({"files": "kernel", "network": "surely", "notes": [1]})
    assert (found.files, found.network, found.cpu, found.notes) == ("kernel", "none", "none", ("1",))
    assert weakest({}) == enforced_from_json({})


@given(st.binary(max_size=64) | st.dictionaries(words, st.none() | st.integers(0, 9) | words).map(pack))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_body_is_more_than_refused(body: bytes) -> None:
    try:
        message = read_frame(body)
    except FrameError:
        message = {}
    with pytest.raises(ValueError, match=r"limits|specification"):
        spec_from_message(message)
    with pytest.raises(HostRefusal) as caught:
        read_request(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "change",
    [
        {"op": "setup"}, {"op": ["exec"]}, {"op": None}, {"timeout": float("nan")}, {"timeout": -1.0}, {"timeout": 1e9},
        {"timeout": 3}, {"keep": -1}, {"keep": 5 * MIB}, {"keep": None}, {"most": 1}, {"most": "many"},
    ],
)  # fmt: skip
def test_runs_without_bounds_and_what_sets_boxes_up_are_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"op": "exec", "argv": "true", "timeout": 3.0, "keep": 10, "most": 10}
    assert read_request(pack(good)) == good
    with pytest.raises(HostRefusal):
        read_request(pack({**good, **change}))
    assert "setup" not in OPERATIONS


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (BoxSpec(limits=Limits(memory_bytes=512 * MIB)), "memory_bytes .* at most .*sandbox.memory_bytes there"),
        (BoxSpec(limits=Limits(cpus=1.5)), "cpus 1.5"),
        (BoxSpec(mounts=(Mount("/srv/database", "/data"),)), "a mount of /srv/database"),
        (BoxSpec(mounts=(Mount("/", "/data"),)), "a mount of /"),
        (BoxSpec(packages="/root"), "packages /root"),
        (BoxSpec(image="any"), "image any"),
    ],
)
def test_a_client_gets_no_more_than_the_host_s_owner_allows(spec: BoxSpec, said: str) -> None:
    own = BoxSpec(mounts=(Mount("/srv/data", "/x"),), packages="/opt/p", image="ours")
    with pytest.raises(HostRefusal, match=said):
        check_spec(spec, own, ("/shared",))
    mounts = (Mount("/srv/data/a", "/a"), Mount("/srv/data", "/b"), Mount("/shared/c", "/c"))
    wanted = BoxSpec(limits=Limits(pids=5), mounts=mounts, packages="/shared/site")
    assert check_spec(wanted, own, ("/shared",)) == BoxSpec(Limits(pids=5), "ours", mounts, (), "/shared/site")


def test_urls_that_are_none_are_refused() -> None:
    for urls in ([], ["localhost:8070"], ["http://"], ["ftp://h"]):
        with pytest.raises(ValueError, match="URL"):
            Remote(urls)


# ---- a real host


@pytest.fixture(scope="module")
def host() -> Iterator[HostProcess]:
    with host_process(f"--sandbox.boxes={BOXES}", "--host.queue=2", "--host.lease_s=3") as process:
        yield process


@contextlib.asynccontextmanager
async def client(*urls: str, **options: Any) -> AsyncIterator[Remote]:
    """A backend for as long as the block lasts."""
    backend = Remote(urls, **options)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def remote(host: HostProcess) -> AsyncIterator[Remote]:
    async with client(host.url, create_s=20.0) as backend:
        yield backend
    assert host.boxes() == []


@pytest.fixture
def doomed() -> Iterator[HostProcess]:
    """A host that the test may end."""
    with host_process("--sandbox.boxes=2", "--sandbox.warm=0") as process:
        yield process


@pytest.fixture
async def box(remote: Remote) -> AgentBox:
    return await remote.create(SPEC)


@walk
class TestBox:
    async def test_programs_and_files_are_as_in_a_local_box(self, box: AgentBox) -> None:
        done = await box.exec(["cat"], stdin=b"\0\xff" * 1000, env={"A": "1"})
        assert (done.status, done.stdout, done.exit_code) == ("ok", b"\0\xff" * 1000, 0)
        done = await box.exec("echo out; echo err >&2; exit 3")
        assert (done.status, done.stdout, done.stderr, done.exit_code) == ("nonzero", b"out\n", b"err\n", 3)
        assert (await box.run_python("import sys; print(sys.argv[0:0], 6 * 7)")).stdout == b"[] 42\n"
        done = await box.exec("echo begun; sleep 60", timeout=0.3)
        assert (done.status, done.stdout) == ("timeout", b"begun\n")
        await box.put("folder/file", b"x" * (2 * MIB + 5), mode=0o600)
        assert await box.get("folder/file") == b"x" * (2 * MIB + 5)
        assert [(entry.name, entry.size, entry.mode) for entry in await box.list("folder")] == [
            ("file", 2 * MIB + 5, 0o600)
        ]
        with pytest.raises(BoxFileError, match="none: No such file"):
            await box.get("none")
        assert box.alive

    async def test_sessions_keep_their_state_and_can_be_interrupted(self, box: AgentBox) -> None:
        session = await box.open_session("python")
        assert (await session.run("a = 20")).status == "ok"
        assert (await session.run("print(a + 1)")).stdout == b"21\n"
        cell = asyncio.create_task(session.run("import time\nprint('in', flush=True)\ntime.sleep(60)", timeout=50))
        await asyncio.sleep(0.5)  # into the sleep; an interrupt before it ends the cell as well
        await session.interrupt()
        done = await asyncio.wait_for(cell, 20)
        assert (done.status, done.stdout) == ("nonzero", b"in\n")
        assert (await session.run("print(a)")).stdout == b"20\n"
        await session.close()
        assert not session.alive

    async def test_runs_wait_for_their_turn_and_deadlines_begin_with_it(self, box: AgentBox) -> None:
        done = await asyncio.gather(*(box.exec("sleep 0.4; echo done", timeout=2.0) for _ in range(8)))
        assert [one.status for one in done] == ["ok"] * 8

    async def test_everything_in_a_box_can_be_killed(self, box: AgentBox) -> None:
        running = asyncio.create_task(box.exec("echo begun; sleep 60", timeout=50))
        await asyncio.sleep(0.3)
        await box.kill_processes()
        assert (await asyncio.wait_for(running, 20)).status in ("timeout", "nonzero")
        assert (await box.exec("true")).status == "ok"

    async def test_a_closed_box_is_gone_there_too(self, box: AgentBox, host: HostProcess) -> None:
        assert len(host.boxes()) == 1
        await box.close()
        await box.close()
        assert not box.alive
        assert host.boxes() == []
        assert (await box.exec("true")).status == "infra_error"
        with pytest.raises(BoxLostError):
            await box.list()

    async def test_a_box_lives_while_its_client_does_and_a_run_longer_than_a_lease_goes_on(self, box: AgentBox) -> None:
        assert (await box.exec("sleep 5")).status == "ok"
        await asyncio.sleep(4)
        assert (await box.exec("true")).status == "ok"


@walk
class TestBrokenWires:
    @pytest.mark.parametrize("way", ["lose_answers", "lose_requests"])
    @pytest.mark.parametrize("times", [1, 3])
    async def test_code_runs_once_however_often_the_connection_breaks(
        self, host: HostProcess, way: str, times: int
    ) -> None:
        async with breakable(host.url) as wire, client(wire.url) as remote:
            box = await remote.create(SPEC)
            for _ in range(3):
                setattr(wire, way, times)
                done = await box.exec("echo x >> runs; wc -l < runs")
                assert done.status == "ok", done
            assert done.stdout == b"3\n"
            assert wire.lost == 3 * times

    async def test_a_box_whose_giving_was_not_heard_is_found_again(self, host: HostProcess) -> None:
        async with breakable(host.url) as wire, client(wire.url) as remote:
            wire.lose_answers = 1
            box = await remote.create(SPEC)
            assert (await box.exec("true")).status == "ok"
            assert len(host.boxes()) == 1

    async def test_a_connection_that_breaks_during_a_run_costs_nothing(self, host: HostProcess) -> None:
        async with breakable(host.url) as wire, client(wire.url) as remote:
            box = await remote.create(SPEC)
            run = asyncio.create_task(box.exec("echo x >> runs; sleep 1; wc -l < runs"))
            await asyncio.sleep(0.3)
            wire.lose_answers = 1
            assert (await run).stdout == b"1\n"
            assert wire.lost == 1

    async def test_a_host_that_is_away_costs_the_box_and_is_no_fault_of_the_code(self, doomed: HostProcess) -> None:
        async with client(doomed.url, lost_s=0.5) as remote:
            box = await remote.create(SPEC)
            pid = int((await box.exec("echo $PPID")).stdout)
            run = asyncio.create_task(box.exec("sleep 60", timeout=100))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(doomed.down, signal.SIGKILL)
            done = await asyncio.wait_for(run, 30)
            assert (done.status, box.alive) == ("infra_error", False)
            assert "cannot be reached" in done.message
            await until(lambda: not _lives(pid), "the end of the dead host's box")

    async def test_a_host_that_started_again_knows_no_former_box(self, host: HostProcess, remote: Remote) -> None:
        box = await remote.create(SPEC)
        async with aiohttp.ClientSession() as http, http.delete(box.id) as answer:
            assert answer.status == 204
        done = await box.exec("true")
        assert (done.status, box.alive) == ("infra_error", False)
        assert "there is no box" in done.message

    async def test_the_heartbeat_tells_of_lost_boxes(self, host: HostProcess, remote: Remote) -> None:
        box = await remote.create(SPEC)
        async with aiohttp.ClientSession() as http:
            await http.delete(box.id)
        await until(lambda: not box.alive, "the heartbeat")

    async def test_sigterm_ends_runs_at_once_and_leaves_nothing(self, doomed: HostProcess) -> None:
        async with client(doomed.url, lost_s=0.5) as remote:
            box = await remote.create(SPEC)
            pid = int((await box.exec("echo $PPID")).stdout)
            run = asyncio.create_task(box.exec("sleep 60", timeout=100))
            await asyncio.sleep(0.3)
            assert await asyncio.to_thread(doomed.down) == 0
            assert (await asyncio.wait_for(run, 30)).status == "infra_error"
            assert not _lives(pid)


@walk
def test_a_client_that_was_killed_leaves_nothing(host: HostProcess) -> None:
    code = f"""
import asyncio
from palestra.sandbox.remote import Remote
from palestra.sandbox.types import BoxSpec
async def main():
    remote = Remote([{host.url!r}])
    await remote.start()
    box = await remote.create(BoxSpec())
    print((await box.exec("echo $PPID")).stdout.decode().strip(), flush=True)
    await box.exec("sleep 100", timeout=200)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert _lives(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: host.boxes() == [] and not _lives(pid), "the end of the lease", 20)
    assert _metric(host, "expired_total") >= 1


@walk
class TestRoom:
    async def test_full_hosts_are_waited_for_and_then_named(self, host: HostProcess, remote: Remote) -> None:
        held = [await remote.create(SPEC) for _ in range(BOXES)]
        async with client(host.url, create_s=0.5) as hasty:
            with pytest.raises(SandboxBusyError, match=re.escape(host.url)):
                await asyncio.wait_for(hasty.create(SPEC), 10)
        patient = asyncio.create_task(remote.create(SPEC))
        await asyncio.sleep(0.3)
        assert not patient.done()
        await held[0].close()
        box = await asyncio.wait_for(patient, 20)
        assert (await box.exec("true")).status == "ok"

    async def test_more_than_the_queue_holds_are_refused_at_once(self, host: HostProcess, remote: Remote) -> None:
        for _ in range(BOXES):
            await remote.create(SPEC)
        before = _metric(host, "queue_full_total")
        spec, headers = pack(spec_to_message(SPEC)), {"Content-Type": CONTENT_TYPE, "Palestra-Wait": "30"}
        async with aiohttp.ClientSession() as http:

            async def ask() -> tuple[int, str]:
                async with http.post(f"{host.url}/boxes", data=spec, headers=headers) as answer:
                    return answer.status, answer.headers.get("Retry-After", "")

            asked = [asyncio.create_task(ask()) for _ in range(5)]
            done, waiting = await asyncio.wait(asked, timeout=1.0)
            assert sorted(one.result() for one in done) == [(429, "5")] * 3
            assert len(waiting) == 2
            await remote.close()
            assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
            for lent in await asyncio.to_thread(host.boxes):
                await http.delete(f"{host.url}/boxes/{lent['box']}")
        assert await asyncio.to_thread(_metric, host, "queue_full_total") == before + 3

    async def test_boxes_go_to_the_host_with_most_room_and_past_one_that_is_away(
        self, host: HostProcess, doomed: HostProcess
    ) -> None:
        async with client(host.url, doomed.url, create_s=20.0) as remote:
            made = [await remote.create(SPEC) for _ in range(BOXES + 2)]
            assert [len(one.boxes()) for one in (host, doomed)] == [BOXES, 2]
            await asyncio.gather(*(one.close() for one in made))
            await asyncio.to_thread(doomed.down, signal.SIGKILL)
            assert [host.url in (await remote.create(SPEC)).id for _ in range(BOXES)] == [True] * BOXES

    async def test_what_no_host_can_give_is_told_as_such(self, remote: Remote) -> None:
        with pytest.raises(SandboxUnavailableError, match="memory_bytes 1073741824"):
            await remote.create(BoxSpec(limits=Limits(memory_bytes=1024 * MIB)))
        with pytest.raises(SandboxUnavailableError, match="a mount of /etc"):
            await remote.create(BoxSpec(mounts=(Mount("/etc", "/x"),)))

    async def test_hosts_that_are_not_there_are_named_at_the_start(self) -> None:
        with pytest.raises(SandboxUnavailableError, match=r"127\.0\.0\.1:9 .*127\.0\.0\.1:1 .*palestra sandbox serve"):
            await Remote(["http://127.0.0.1:9", "http://127.0.0.1:1"]).start()


@walk
async def test_a_host_wants_its_token(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("secret\n")
    with host_process("--token-file", str(file)) as host:
        for token in (None, "secre", "secret2"):
            with pytest.raises(SandboxUnavailableError, match="wants another token"):
                await Remote([host.url], token=token).start()
        async with client(host.url, token="secret") as remote:
            assert (await (await remote.create(SPEC)).exec("true")).status == "ok"
        async with aiohttp.ClientSession() as http:
            for method, path in (("GET", "/boxes"), ("GET", "/metrics"), ("DELETE", "/boxes/x"), ("POST", "/boxes/x")):
                async with http.request(method, host.url + path) as answer:
                    assert answer.status == 401


@walk
async def test_http_that_is_wrong_is_refused_and_never_a_fault(host: HostProcess, box: AgentBox) -> None:
    name = box.id.rpartition("/")[2]
    good = pack({"op": "list", "path": "."})
    frame = {"Content-Type": CONTENT_TYPE}
    cases: list[tuple[str, str, bytes, dict[str, str], int]] = [
        ("POST", f"/boxes/{name}", good, {"Content-Type": "text/plain"}, 415),
        ("POST", f"/boxes/{name}", good, {**frame, KEY: "-1"}, 400),
        ("POST", f"/boxes/{name}", good, {**frame, KEY: "9" * 30}, 400),
        ("POST", f"/boxes/{name}", good, {**frame, "Palestra-Timeout": "soon"}, 400),
        ("POST", f"/boxes/{name}", b"", {**frame, KEY: "7"}, 409),
        ("POST", f"/boxes/{name}", good[:-1], frame, 400),
        ("POST", f"/boxes/{name}", pack({"op": "setup"}), frame, 400),
        ("POST", f"/boxes/{name}", bytes(13 << 20), frame, 413),
        ("POST", "/boxes/none", good, frame, 404),
        ("POST", "/boxes", good, frame, 400),
        ("POST", "/boxes", pack({"limits": {"memory_bytes": 1}}), frame, 400),
        ("POST", "/alive", good, frame, 400),
        ("DELETE", "/boxes/none", b"", {}, 404),
        ("GET", "/nothing", b"", {}, 404),
        ("POST", f"/boxes/{name}", good, frame, 200),
    ]
    async with aiohttp.ClientSession() as http:
        for method, path, body, headers, status in cases:
            async with http.request(method, host.url + path, data=body, headers=headers) as answer:
                assert answer.status == status, (method, path, headers, await answer.text())
    assert (await box.exec("true")).status == "ok"


@walk
async def test_a_request_goes_on_without_its_client_and_its_answer_can_be_had_again(
    host: HostProcess, box: AgentBox
) -> None:
    url = f"{host.url}/boxes/{box.id.rpartition('/')[2]}"
    run = {"op": "exec", "argv": "sleep 0.5; echo x >> runs; cat runs", "timeout": 9.0, "keep": 99, "most": 99}
    body, headers = pack(run), {"Content-Type": CONTENT_TYPE, KEY: "70"}
    async with aiohttp.ClientSession() as http:
        with pytest.raises(TimeoutError):
            await http.post(url, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=0.2))

        async def again(body: bytes) -> bytes:
            async with http.post(url, data=body, headers=headers) as answer:
                assert answer.status == 200
                return bytes(read_frame(await answer.read())["stdout"])

        assert list(await asyncio.gather(again(body), again(b""), again(body))) == [b"x\n"] * 3
        assert await again(b"") == b"x\n"
    assert (await box.exec("cat runs")).stdout == b"x\n"


@walk
async def test_metrics_tell_what_happened(host: HostProcess, box: AgentBox) -> None:
    ok, failed = _metric(host, 'runs_total{status="ok"}'), _metric(host, 'runs_total{status="nonzero"}')
    await box.exec("true")
    await box.exec("false")
    assert _metric(host, 'runs_total{status="ok"}') == ok + 1
    assert _metric(host, 'runs_total{status="nonzero"}') == failed + 1
    assert (_metric(host, "leased"), _metric(host, "capacity")) == (1, BOXES)
    line = re.compile(r'(# (HELP|TYPE) .+|[a-z_]+(\{[a-z]+="[^"]+"\})? [-+.0-9e]+)')
    text = host.get("/metrics")
    assert [one for one in text.splitlines() if not line.fullmatch(one)] == []
    assert "palestra_sandbox_pool_warm" in text


def _metric(host: HostProcess, name: str) -> float:
    found = [line for line in host.get("/metrics").splitlines() if line.startswith(f"palestra_sandbox_{name} ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
