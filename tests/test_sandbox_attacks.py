"""Escape probes: they contain nothing by accident (judges can fail), and no backend lets one out."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.sandbox.attacks.judges import bounded, fails, refused, stopped
from palestra.sandbox.attacks.prelude import told
from palestra.sandbox.attacks.run import ATTACKS, run_attacks
from palestra.sandbox.attacks.scene import Scene
from palestra.sandbox.attacks.table import markdown, spliced
from palestra.sandbox.attacks.types import BOUNDS, Attack, Judged, Outcome, Seen, weigh
from palestra.sandbox.box import AgentBox
from palestra.sandbox.channel import StreamChannel
from palestra.sandbox.inside.frames import HEAD, MAX_FRAME, pack
from palestra.sandbox.types import BoxFileError, BoxSpec, Enforced, ExecResult
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests.sandbox_backends import ALL, started

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "sandbox.md"
RAN: dict[str, list[Outcome]] = {}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene() as scene:
        yield scene


def seen(result: ExecResult, scene: Scene, **more: object) -> Seen:
    return Seen(result, told(result), scene, BOUNDS, **more)  # type: ignore[arg-type]


def test_names_are_unique_and_every_promise_is_attacked() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) > 40
    assert {attack.promise for attack in ATTACKS} == {
        "files", "network", "processes", "memory", "pids", "disk", "syscalls", "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_probe_that_did_not_run_is_never_contained(attack: Attack, scene: Scene) -> None:
    broken = ExecResult("nonzero", 1, stderr=b"ImportError: no ctypes")
    assert attack.judge(seen(broken, scene)).verdict in ("untried", "ESCAPED")


def test_judges_of_attempts(scene: Scene) -> None:
    good = ExecResult("ok", 0, stdout=b"\n@bpf=EPERM\n\n@perf=EINVAL\n\n@END=DONE\n")
    assert fails(seen(good, scene)).verdict == "contained"
    assert refused(seen(good, scene)) == Judged("ESCAPED", "got through: perf", "bpf=EPERM perf=EINVAL")
    through = ExecResult("ok", 0, stdout=b"\n@bpf=DONE\n\n@END=DONE\n")
    assert fails(seen(through, scene)).verdict == "ESCAPED"
    half = ExecResult("timeout", stdout=b"\n@bpf=EPERM\n")
    assert fails(seen(half, scene)).verdict == "untried"
    killed = ExecResult("nonzero", signal=31, stdout=b"\n@bpf=EPERM\n")
    assert fails(seen(killed, scene)).verdict == "contained"
    assert fails(seen(good, scene, usable=False)).verdict == "ESCAPED"


def test_judges_of_bounds(scene: Scene) -> None:
    judge = bounded("made", "pids")
    assert judge(seen(ExecResult("ok", 0, stdout=b"@made=31"), scene)).verdict == "contained"
    assert judge(seen(ExecResult("ok", 0, stdout=b"@made=33"), scene)).verdict == "ESCAPED"
    assert judge(seen(ExecResult("ok", 0, stdout=b"@made=31"), scene, survivors=1)).verdict == "ESCAPED"
    assert judge(seen(ExecResult("ok", 0), scene)).verdict == "untried"
    assert judge(seen(ExecResult("oom"), scene)).verdict == "contained"
    late = stopped("timeout")
    assert late(seen(ExecResult("timeout"), scene)).verdict == "contained"
    assert late(seen(ExecResult("ok", 0), scene)).verdict == "ESCAPED"
    assert late(seen(ExecResult("timeout"), scene, survivors=2)).verdict == "ESCAPED"


def test_an_admitted_weakness_is_weaker_but_files_network_and_processes_are_what_a_sandbox_is() -> None:
    escaped = Judged("ESCAPED", "more than disk_bytes")
    disk = next(attack for attack in ATTACKS if attack.promise == "disk")
    assert weigh(disk, escaped, Enforced()).verdict == "ESCAPED"
    assert weigh(disk, escaped, Enforced(disk="none")) == Judged("weaker", "disk is not held", "more than disk_bytes; ")
    network = next(attack for attack in ATTACKS if attack.promise == "network")
    assert weigh(network, escaped, Enforced(network="none")).verdict == "ESCAPED"


def test_the_table_has_its_place_in_the_document() -> None:
    outcome = Outcome(ATTACKS[0], Judged("contained", "not to be seen", "volatile"), 1.0)
    table = markdown({"one": [outcome], "two": [outcome]})
    assert table.splitlines()[0] == "| attack | tries | one | two |"
    assert "volatile" not in table
    document = DOCUMENT.read_text()
    assert spliced(spliced(document, table), "x") == spliced(document, "x")
    with pytest.raises(ValueError, match="lacks"):
        spliced("no place", table)


@pytest.mark.parametrize(
    "said",
    [
        HEAD.pack(MAX_FRAME + 1),
        HEAD.pack(0xFFFFFFFF) + b"x" * 1000,
        b"\n@END=DONE\n" * 10,
        pack({"id": 999, "why": "", "exit": 0}),
        pack({"id": "1", "why": "", "exit": 0}),
        pack({"id": 1}),
        pack({"id": 1, "why": "", "exit": "x", "wall_s": None}),
        pack({"id": 1, "why": "", "exit": 0, "wall_s": 0.0, "cpu_s": 0.0, "stdout": 1 << 40, "stderr": b""}),
        HEAD.pack(5) + b"l\xff\xff\xff\xff",
        HEAD.pack(20) + b"l\0\0\0\1" * 4,
    ],
    ids=[
        "long",
        "longest",
        "text",
        "unasked",
        "odd number",
        "half",
        "odd values",
        "a number for bytes",
        "many values",
        "deep",
    ],
)
async def test_an_agent_that_was_taken_over_loses_its_box_and_harms_nobody(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = await StreamChannel.over(ours)
    ended = asyncio.Event()

    async def destroy() -> None:
        ended.set()

    box = AgentBox("taken", BoxSpec(), channel, UnsafeSubprocess(i_understand=True), destroy)
    run = asyncio.create_task(box.exec("true", timeout=20))
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_recv(theirs, 65536)
    await loop.sock_sendall(theirs, said)
    result = await asyncio.wait_for(run, 20)
    assert result.status == "session_lost"
    assert "agent sent" in result.message
    assert ended.is_set()
    assert not box.alive
    theirs.close()


@pytest.mark.walk
async def test_where_nothing_confines_them_the_probes_get_out_and_the_judges_say_so() -> None:
    harmless = [attack for attack in ATTACKS if attack.harmless]
    with Scene() as scene:
        backend = UnsafeSubprocess(i_understand=True)
        await backend.start()
        try:
            outcomes = await run_attacks(backend, scene, harmless)
        finally:
            await backend.close()
        assert not scene.sentinel_lives()
    verdicts = {outcome.attack.name: outcome.judged.verdict for outcome in outcomes}
    assert verdicts == dict.fromkeys(verdicts, "ESCAPED")
    assert len(verdicts) >= 10


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ALL)
async def test_no_attack_gets_out(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    dockerd = str(request.getfixturevalue("dockerd")) if name == "docker" else ""
    with Scene() as scene:
        async with started(name, dockerd, tmp_path) as backend:
            outcomes = await run_attacks(backend, scene)
            promised = backend.enforced()
        assert scene.sentinel_lives()
        assert scene.ipc_left() == []
    bad = {
        outcome.attack.name: f"{outcome.judged.verdict}: {outcome.judged.how}: {outcome.judged.detail}"
        for outcome in outcomes
        if outcome.judged.verdict in ("ESCAPED", "untried")
    }
    assert bad == {}
    weaker = {outcome.attack.promise for outcome in outcomes if outcome.judged.verdict == "weaker"}
    assert weaker <= set(promised.weaker())
    RAN[name] = outcomes


@pytest.mark.ci
def test_the_table_in_the_document_is_what_ran() -> None:
    """After the tests above; PALESTRA_WRITE_DOCS=1 writes it instead."""
    assert list(RAN) == list(ALL), "the attacks on every backend come first"
    document = DOCUMENT.read_text()
    made = spliced(document, markdown(RAN))
    if os.environ.get("PALESTRA_WRITE_DOCS"):
        DOCUMENT.write_text(made)
    else:
        assert made == document, "docs/sandbox.md is not what ran: PALESTRA_WRITE_DOCS=1 writes it"


@pytest.mark.walk
async def test_a_folder_that_holds_too_much_is_refused_and_the_box_goes_on() -> None:
    backend = UnsafeSubprocess(i_understand=True)
    await backend.start()
    try:
        box = await backend.create(BoxSpec())
        made = await box.run_python("import os\nfor n in range(5000): os.symlink('x' * 4000, 'n' * 200 + str(n))")
        assert made.status == "ok"
        with pytest.raises(BoxFileError):
            await box.list()
        assert (await box.exec("true")).status == "ok"
    finally:
        await backend.close()


@pytest.mark.ci
def test_the_documents_example_prints_what_it_says() -> None:
    example = DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0]
    expected = [line.partition("  # ")[2] for line in example.splitlines() if "  # " in line and "print(" in line]
    done = subprocess.run([sys.executable, "-P", "-c", example], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == expected, done.stderr
    assert len(expected) == 3
