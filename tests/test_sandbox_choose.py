"""The choice of a backend: order, honesty, and reasons."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from palestra.sandbox import choose as choosing
from palestra.sandbox.choose import BACKENDS, choose, make
from palestra.sandbox.types import BoxSpec, Enforced, SandboxError, SandboxUnavailableError
from palestra.sandbox.unsafe import UnsafeSubprocess
from tests.fakes.boxes import Boxes

WHOLE = Enforced()
WEAKER = Enforced(memory="watched", notes=("Memory is watched.",))
OPEN = Enforced(network="none", notes=("The network is open.",))


class Kind(Boxes):
    """A backend that starts or not, and holds what it is told to."""

    def __init__(self, held: Enforced | Exception, log: list[str], name: str) -> None:
        super().__init__()
        self.held, self.log, self.label = held, log, name

    async def start(self) -> None:
        self.log.append(f"start {self.label}")
        if isinstance(self.held, Exception):
            raise self.held

    def enforced(self) -> Enforced:
        assert isinstance(self.held, Enforced)
        return self.held

    async def close(self) -> None:
        self.log.append(f"close {self.label}")


@pytest.fixture
def log() -> list[str]:
    return []


def these(monkeypatch: pytest.MonkeyPatch, log: list[str], **held: Enforced | Exception) -> None:
    """Puts such backends in the place of the real ones."""

    def made(name: str, **_: Any) -> Kind:
        return Kind(held[name], log, name)

    monkeypatch.setattr(choosing, "make", made)


async def test_the_first_that_works_is_taken_and_those_before_it_are_closed(
    monkeypatch: pytest.MonkeyPatch, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    these(monkeypatch, log, bubblewrap=SandboxUnavailableError("no program bwrap"), docker=WHOLE, landlock=WHOLE)
    backend = await choose()
    assert isinstance(backend, Kind)
    assert backend.label == "docker"
    assert log == ["start bubblewrap", "close bubblewrap", "start docker"]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the sandbox is docker, since bubblewrap: no program bwrap")
    ]


async def test_what_is_weaker_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    these(monkeypatch, log, bubblewrap=WEAKER)
    await choose()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "memory: watched" in record.getMessage()
    assert "Memory is watched." in record.getMessage()


async def test_a_backend_that_does_not_hold_what_is_required_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    these(monkeypatch, log, bubblewrap=OPEN, docker=WEAKER, landlock=WHOLE)
    backend = await choose(require=("network", "memory"))
    assert isinstance(backend, Kind)
    assert backend.label == "landlock"
    assert log == ["start bubblewrap", "close bubblewrap", "start docker", "close docker", "start landlock"]


async def test_where_none_fits_each_ones_own_reason_is_told(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    these(monkeypatch, log, bubblewrap=OPEN, docker=OSError("no socket"), landlock=SandboxError("landlock: too old"))
    with pytest.raises(SandboxUnavailableError) as caught:
        await choose()
    assert str(caught.value).splitlines() == [
        "no sandbox works here that holds files, network, processes:",
        "  bubblewrap: it works, but the kernel does not hold network (none). The network is open.",
        "  docker: no socket",
        "  landlock: too old",
    ]
    assert [line for line in log if line.startswith("close")] == ["close bubblewrap", "close docker", "close landlock"]


async def test_no_sandbox_at_all_is_never_chosen_and_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="never chosen"):
        await choose(prefer=("bubblewrap", "unsafe_subprocess"))
    with pytest.raises(ValueError, match="no promise quiet; known: files"):
        await choose(require=("quiet",))
    with pytest.raises(ValueError, match="no sandbox backend 'firejail'"):
        await choose(prefer=("firejail",))


def test_backends_are_made_by_name_and_their_options_are_checked() -> None:
    assert isinstance(make("unsafe_subprocess", i_understand=True), UnsafeSubprocess)
    with pytest.raises(SandboxUnavailableError, match="i_understand"):
        make("unsafe_subprocess")
    with pytest.raises(ValueError, match="unsafe_subprocess has no option colour; known: i_understand"):
        make("unsafe_subprocess", colour="red")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_name_leads_to_a_backend_of_that_name(name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "unsafe_subprocess": {"i_understand": True},
        "remote": {"urls": ["http://127.0.0.1:1"]},
    }
    assert make(name, **options.get(name, {})).name == name


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "docker", "palestra.sandbox.no_such_module:Docker")
    with pytest.raises(SandboxUnavailableError, match=r"docker: .*no_such_module.*pip install"):
        make("docker")


def test_choosing_loads_no_backend() -> None:
    code = (
        "import sys, palestra.sandbox.choose; print([n for n in sys.modules if n in ('docker', 'aiohttp', 'ctypes')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.ci
async def test_a_real_one_is_chosen_on_this_machine_and_runs_code() -> None:
    backend = await choose(prefer=("bubblewrap", "landlock"))
    try:
        box = await backend.create(BoxSpec())
        assert (await box.run_python("print(1)")).stdout == b"1\n"
        await box.close()
    finally:
        await backend.close()
