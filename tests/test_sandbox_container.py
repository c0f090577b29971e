"""The docker backend's parts that need no engine: what a box is, whose it is, the attach stream, and what the kernel counted."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palestra.sandbox import container_config
from palestra.sandbox.channel import Counts
from palestra.sandbox.container import Docker
from palestra.sandbox.container_attach import AttachedChannel, Endpoint
from palestra.sandbox.container_counts import ContainerCounts
from palestra.sandbox.container_labels import EXPIRES, OWNER, judge, left_behind, owner, place
from palestra.sandbox.inside.frames import Inbox, pack
from palestra.sandbox.inside.kernel import Cgroup
from palestra.sandbox.types import (
    MIB,
    BoxLostError,
    BoxProtocolError,
    BoxSpec,
    Limits,
    Mount,
    SandboxError,
    SandboxUnavailableError,
)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


def framed(kind: int, data: bytes) -> bytes:
    """A piece of a container's stream as the engine sends it."""
    return bytes((kind, 0, 0, 0)) + len(data).to_bytes(4, "big") + data


@asynccontextmanager
async def engine(path: Path, serve: Serve) -> AsyncIterator[AttachedChannel]:
    """A channel to an engine that answers an attach call by `serve`."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_unix_server(answer, path):
        channel = await Endpoint.of(f"unix://{path}").connect(lambda: AttachedChannel("abc", "1.41"))
        try:
            yield channel
        finally:
            await channel.close()
    assert asked[0].startswith(b"POST /v1.41/containers/abc/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n")


async def next_request(reader: asyncio.StreamReader, inbox: Inbox) -> dict[str, object]:
    """The next frame that the channel sends."""
    while not (found := inbox.feed(await reader.read(65536))):
        continue
    return found[0]


# --- what a box is asked to be


def test_a_box_has_nothing_that_was_not_given_to_it() -> None:
    limits = Limits(memory_bytes=100 * MIB, pids=20, disk_bytes=8 * MIB, file_bytes=4 * MIB, open_files=512, cpus=0.5)
    spec = BoxSpec(limits, mounts=(Mount("/data", "/sets"),), packages="/srv/site-packages")
    body = container_config.body(
        spec, image="i:1", python="python3", labels={OWNER: "o"}, seccomp={"defaultAction": "x"}, runtime=None
    )
    host = body["HostConfig"]
    assert body["Entrypoint"][0] == "python3"
    assert body["Entrypoint"][-2:] == ["0", "1"]
    assert (body["Cmd"], body["User"], body["Healthcheck"]) == ([], "1000:1000", {"Test": ["NONE"]})
    assert (body["OpenStdin"], body["StdinOnce"], body["Tty"], host["AutoRemove"]) == (True, True, False, True)
    assert (host["NetworkMode"], body["NetworkDisabled"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert (host["ReadonlyRootfs"], host["IpcMode"], host["CgroupnsMode"]) == (True, "private", "private")
    assert host["SecurityOpt"] == ["no-new-privileges", 'seccomp={"defaultAction": "x"}']
    assert (host["Memory"], host["MemorySwap"]) == (100 * MIB, 100 * MIB)
    assert (host["PidsLimit"], host["NanoCpus"], host["ShmSize"]) == (20, 500_000_000, 8 * MIB)
    assert host["LogConfig"]["Type"] == "none"
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {"nofile": 512, "fsize": 4 * MIB, "core": 0}
    assert set(host["Tmpfs"]) == {"/tmp", "/workspace"}
    assert all(f"size={8 * MIB}," in options and "nosuid,nodev" in options for options in host["Tmpfs"].values())
    binds = [(bind["Source"], bind["Target"], bind["ReadOnly"]) for bind in host["Mounts"]]
    assert binds == [("/data", "/sets", True), ("/srv/site-packages", "/opt/packages", True)]
    assert not {"Privileged", "Devices", "Binds", "PidMode", "CapAdd"} & set(host)
    json.dumps(body)


def test_what_an_engine_lacks_is_reported() -> None:
    whole = {"MemoryLimit": True, "SwapLimit": True, "PidsLimit": True, "CpuCfsQuota": True, "CpuCfsPeriod": True}
    assert container_config.enforced(whole, filtered=True).weaker() == {}
    bare = container_config.enforced({"CgroupVersion": "2"}, filtered=False)
    assert bare.weaker() == {"memory": "none", "pids": "none", "cpu": "none", "syscalls": "none"}
    assert len(bare.notes) == 4
    swaps = container_config.enforced({**whole, "SwapLimit": False, "CgroupVersion": "1"}, filtered=True)
    assert "swapaccount=1" in swaps.notes[0]


# --- whose it is


def test_an_owner_is_known_to_live_to_be_dead_or_not_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine = owner()
        assert judge(mine) == "alive"
        used_again = mine.rpartition("/")[0] + "/1"
        assert judge(used_again) == "dead"
        other_boot = "00000000-0000/1/" + "/".join(mine.split("/")[2:])
        assert judge(other_boot) == "unknown"
        assert [judge(label) for label in ("", "x", f"{place()}/abc/1", "a/b/c/d/e")] == ["unknown"] * 4
    finally:
        process.communicate(b"\n")
    assert judge(f"{place()}/{process.pid}/12345") == "dead"


@pytest.mark.parametrize(
    ("who", "expires", "left"),
    [
        ("alive", "1", False),
        ("dead", "99999999999", True),
        ("unknown", "99999999999", False),
        ("unknown", "1", True),
        ("unknown", "soon", False),
        ("unknown", "", False),
    ],
)
def test_only_what_nobody_comes_back_for_is_removed(who: str, expires: str, left: bool) -> None:
    label = {"alive": owner(), "dead": f"{place()}/1/0", "unknown": "elsewhere/1/2/3"}[who]
    assert left_behind({OWNER: label, EXPIRES: expires}, time.time()) is left


# --- the attach stream


@pytest.mark.parametrize("seed", range(5))
async def test_frames_survive_any_cut_of_the_stream(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(200_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        inbox = Inbox()
        for _ in range(2):
            request = await next_request(reader, inbox)
            left = pack({"id": request["id"], "data": content})
            stream = b""
            while left:
                size = draw.randint(1, 50_000)
                stream += framed(1, left[:size]) + framed(2, b"a word on stderr\n") + framed(1, b"")
                left = left[size:]
            while stream:
                size = draw.choice((1, 3, 7, 9, 1000, 30_000))
                writer.write(stream[:size])
                await writer.drain()
                stream = stream[size:]
        await reader.read()

    async with engine(tmp_path / "s", serve) as channel:
        await channel.opened(10)
        for _ in range(2):
            assert (await channel.call({"op": "list"}, 10))["data"] == content
        assert channel.stderr.endswith("a word on stderr")
        assert len(channel.stderr) <= 4000


async def test_a_refusal_is_told_in_the_engine_s_words(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 40\r\n\r\n")
        await writer.drain()
        writer.write(b'{"message":"No such container: abc"}\n')
        await reader.read()

    async with engine(tmp_path / "s", serve) as channel:
        with pytest.raises(SandboxError, match=r"404 .*No such container: abc"):
            await channel.opened(10)


async def test_an_engine_that_hangs_up_or_says_nothing_is_told(tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 5")

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with engine(tmp_path / "a", hang_up) as channel:
        with pytest.raises(SandboxError, match="hung up"):
            await channel.opened(10)
    async with engine(tmp_path / "b", nothing) as channel:
        with pytest.raises(SandboxError, match=r"within 0\.05 s"):
            await channel.opened(0.05)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\x07\0\0\0\0\0\0\x01x", BoxProtocolError),
        (b"\x01\0\0\1\0\0\0\x01x", BoxProtocolError),
        (framed(1, b"\xff\xff\xff\xff"), BoxProtocolError),
        (b"", BoxLostError),
    ],
)
async def test_nonsense_and_an_end_make_the_channel_dead(tmp_path: Path, sent: bytes, error: type[Exception]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        await next_request(reader, Inbox())
        writer.write(sent)

    async with engine(tmp_path / "s", serve) as channel:
        await channel.opened(10)
        with pytest.raises(error):
            await channel.call({"op": "list"}, 10)
        assert not channel.alive


async def test_closing_does_not_wait_for_a_box_that_reads_nothing(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        await release.wait()

    async with engine(tmp_path / "s", serve) as channel:
        await channel.opened(10)
        with pytest.raises(TimeoutError):
            await channel.call({"op": "write", "data": bytes(8 * MIB)}, 0.05)
        async with asyncio.timeout(10):
            await channel.close()
        release.set()


def test_addresses() -> None:
    assert Endpoint.of("unix:///var/run/docker.sock").path == "/var/run/docker.sock"
    assert Endpoint.of("tcp://box.host:2375") == Endpoint("", "box.host", 2375)
    assert Endpoint.of("https://box.host").tls is not None
    for url in ("ssh://me@host", "npipe:////./pipe/docker", "nonsense"):
        with pytest.raises(SandboxUnavailableError, match="unix:///path"):
            Endpoint.of(url)


# --- what the kernel counted


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V1 = {
    "memory/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory/docker/abc/memory.max_usage_in_bytes": "4096\n",
    "pids/docker/abc/pids.events": "max 7\n",
}
V2 = {
    "docker-abc.scope/memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 3\noom_group_kill 0\n",
    "docker-abc.scope/memory.peak": "4096\n",
    "docker-abc.scope/pids.events": "max 7\n",
}


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("5:pids:/docker/abc\n4:cpu,memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n", V1),
        ("0::/docker-abc.scope\n", V2),
    ],
)
def test_a_local_container_is_counted_out_here(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    write_files(tmp_path, {"proc/42/cgroup": cgroup, **{f"cg/{name}": text for name, text in files.items()}})
    files = {f"cg/{name}": text.replace("3\n", "4\n").replace("max 7", "max 8") for name, text in files.items()}
    counts = ContainerCounts.of("abc", 42, proc=tmp_path / "proc", root=tmp_path / "cg")
    assert counts is not None
    assert counts() == Counts(3, 7, 4096)
    write_files(tmp_path, files)
    assert counts() == Counts(4, 8, 4096)
    counts.close()
    counts.close()
    assert counts() == Counts(4, 8, 4096), "what was counted last stays known"
    assert ContainerCounts.of("other", 42, proc=tmp_path / "proc", root=tmp_path / "cg") is None
    assert ContainerCounts.of("abc", 43, proc=tmp_path / "proc", root=tmp_path / "cg") is None


@pytest.mark.parametrize("files", [V1, V2])
def test_the_agent_counts_where_nobody_else_can(tmp_path: Path, files: dict[str, str]) -> None:
    inside = {name.replace("docker/abc/", "").replace("docker-abc.scope/", ""): text for name, text in files.items()}
    write_files(tmp_path, inside)
    cgroup = Cgroup(str(tmp_path))
    cgroup.begin()
    write_files(tmp_path, {name: text.replace("oom_kill 3", "oom_kill 5") for name, text in inside.items()})
    assert cgroup.since() == {"oom": 2, "pids": 0, "peak": 4096}
    assert Cgroup(str(tmp_path / "nothing")).since() == {}


# --- what is told when it cannot work


async def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SandboxUnavailableError, match=r"pip install 'palestra\[sandbox\]'"):
        await Docker("unix:///nowhere").start()


async def test_without_an_engine_it_says_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"no container engine at unix://.*systemctl start docker"):
        await Docker(f"unix://{tmp_path}/none.sock").start()


async def test_before_the_start_and_after_the_end_it_makes_nothing() -> None:
    backend = Docker()
    for call in (backend.create(BoxSpec()), backend.reap()):
        with pytest.raises(SandboxError, match="not started"):
            await call
    with pytest.raises(SandboxError, match="not started"):
        backend.enforced()
    await backend.close()
    await backend.close()
    with pytest.raises(SandboxError, match="is closed"):
        await backend.create(BoxSpec())
