"""The `[sandbox]` and `[host]` sections: every wrong input has one clear line, and no field is without effect."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from palestra.cli import sandbox as verb
from palestra.cli.config import ConfigError, check_as, load_as
from palestra.envs import sandboxes
from palestra.envs.sandboxes import SandboxConfig, make_backend, make_pool, options_of, read_token, spec_of
from palestra.sandbox.types import MIB, Backend, BoxSpec, Enforced, Limits, Mount, SandboxUnavailableError
from palestra.server.sandbox_host.config import HostConfig, HostSection

ROOT = Path(__file__).resolve().parent.parent
UNSAFE = {"backend": "unsafe_subprocess", "i_understand": True}
SINGLE = {"network": "egress_list", "per_episode": False, "fresh_grader": False}
"""Fields of one value, each with another one, which is refused by name."""


def host_config(**tables: Any) -> HostConfig:
    return check_as(HostConfig, tables, "host.toml")


class StandIn:
    """A backend that says what it is told to."""

    def __init__(self, enforced: Enforced, left: int = 0, fails: str = "") -> None:
        self.name = "bubblewrap"
        self._enforced, self._left, self._fails = enforced, left, fails
        self.closed = 0

    async def start(self) -> None:
        if self._fails:
            raise SandboxUnavailableError(self._fails)

    def enforced(self) -> Enforced:
        return self._enforced

    async def reap(self) -> int:
        return self._left

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"sandbox": {"boxs": 2}}, "unknown field sandbox.boxs; did you mean boxes"),
        ({"sandbox": {"create_s": 0.1}}, "not built: sandbox.create_s"),
        ({"sandbox": {"egress_list": []}}, "not built: sandbox.egress_list"),
        ({"sandbox": {"backend": "podman"}}, "sandbox.backend"),
        ({"sandbox": {"backend": "unsafe_subprocess"}}, "sandbox.i_understand = true"),
        ({"sandbox": {"i_understand": True}}, 'sandbox.i_understand needs sandbox.backend = "unsafe_subprocess"'),
        ({"sandbox": {"backend": "remote", "hosts": ["http://h:1"]}}, "cannot be remote there"),
        ({"sandbox": {"hosts": ["http://h:1"]}}, 'sandbox.hosts needs sandbox.backend = "remote"'),
        ({"sandbox": {"backend": "bubblewrap", "image": "x"}}, 'sandbox.image needs sandbox.backend = "docker"'),
        ({"sandbox": {"memory_bytes": 1}}, "sandbox.memory_bytes"),
        ({"sandbox": {"boxes": 0}}, "sandbox.boxes"),
        ({"sandbox": {"output_bytes": 64 * MIB}}, "limits.output_bytes"),
        ({"sandbox": {"mounts": {"/data": "relative"}}}, "mount source 'relative'"),
        ({"sandbox": {"require": ["safety"]}}, "sandbox.require"),
        ({"host": {"listen": "8070"}}, "host.listen"),
        ({"host": {"listen": "h:99999"}}, "99999 is no port"),
        ({"host": {"lease_s": 0.1}}, "host.lease_s"),
        *[({"sandbox": {name: value}}, f"not built: sandbox.{name}") for name, value in SINGLE.items()],
    ],
)
def test_wrong_sections_say_what_is_wrong(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        host_config(**tables)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_remote_needs_hosts() -> None:
    with pytest.raises(ValueError, match=r"needs sandbox\.hosts"):
        SandboxConfig(backend="remote")


def test_the_defaults_are_those_of_a_box_and_every_limit_arrives() -> None:
    assert spec_of(SandboxConfig()) == BoxSpec()
    section = SandboxConfig(
        memory_bytes=64 * MIB, pids=9, disk_bytes=3 * MIB, output_bytes=5, total_output_bytes=77, cpus=0.5, image="i",
        backend="docker", mounts={"/data": "/srv/data"}, preload=("numpy",), packages="/p", env={"A": "b"},
    )  # fmt: skip
    assert spec_of(section) == BoxSpec(
        limits=Limits(64 * MIB, 9, 3 * MIB, output_bytes=5, total_output_bytes=77, cpus=0.5),
        image="i",
        mounts=(Mount("/srv/data", "/data"),),
        preload=("numpy",),
        packages="/p",
        env=(("A", "b"),),
    )


def test_every_field_has_a_consumer_or_a_refusal() -> None:
    consumed: set[str] = set()
    for path in ("envs/sandboxes.py", "cli/sandbox.py", "server/sandbox_host/config.py"):
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        consumed |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    fields = SandboxConfig.model_fields.keys() | HostSection.model_fields.keys()
    assert fields - consumed - SINGLE.keys() == set()
    assert not SandboxConfig.not_built & SandboxConfig.model_fields.keys()


def test_options_go_to_the_backends_that_know_them(tmp_path: Path) -> None:
    assert options_of(SandboxConfig(backend="docker", base_url="unix:///s"))["docker"] == {"base_url": "unix:///s"}
    assert options_of(SandboxConfig(**UNSAFE))["unsafe_subprocess"] == {"i_understand": True}
    (token := tmp_path / "token").write_text("secret\n")
    section = SandboxConfig(backend="remote", hosts=("http://a:1", "http://b:1"), token_file=str(token))
    assert options_of(section)["remote"] == {"urls": ("http://a:1", "http://b:1"), "token": "secret"}


@pytest.mark.parametrize("content", [None, b"", b" \n", b"two\nlines", b"\xff\xfe"])
def test_a_token_file_without_a_token_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SandboxUnavailableError, match=r"sandbox\.token_file: .*token"):
        read_token(str(path), "sandbox.token_file")


async def test_a_backend_that_does_not_hold_what_is_required_is_closed_and_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in: Any = StandIn(Enforced(network="none", disk="watched", notes=("network: no namespace here",)))
    monkeypatch.setattr(sandboxes, "make", lambda name, **options: stand_in)
    with pytest.raises(
        SandboxUnavailableError, match=r"the kernel does not hold network, disk here(.|\n)*no namespace here"
    ):
        await make_backend(SandboxConfig(backend="bubblewrap", require=("files", "network", "disk")))
    assert stand_in.closed == 1
    made: Any = await make_backend(SandboxConfig(backend="bubblewrap", require=("files", "cpu")))
    assert made is stand_in
    assert stand_in.closed == 1


async def test_auto_passes_on_what_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    async def choose(**options: Any) -> Backend:
        asked.update(options)
        raise SandboxUnavailableError("nothing here")

    monkeypatch.setattr(sandboxes, "choose", choose)
    with pytest.raises(SandboxUnavailableError, match="nothing here"):
        await make_backend(SandboxConfig(require=("files", "memory"), base_url="unix:///s"))
    assert asked["require"] == ("files", "memory")
    assert asked["options"]["docker"] == {"base_url": "unix:///s"}


def test_a_pool_is_as_the_section_says() -> None:
    section = SandboxConfig(boxes=3, warm=0, total_memory_bytes=512 * MIB, memory_bytes=64 * MIB)
    stand_in: Any = StandIn(Enforced())
    pool = make_pool(section, stand_in)
    figures = pool.figures()
    assert (pool.spec, figures["boxes"], figures["memory_limit_bytes"]) == (spec_of(section), 3, 512 * MIB)


def test_the_file_and_overrides_come_together(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text('[sandbox]\nbackend = "unsafe_subprocess"\ni_understand = true\nboxes = 2\n')
    config = load_as(HostConfig, path, ["--host.listen=[::1]:0", "--sandbox.boxes=5"])
    assert (config.sandbox.boxes, config.host.address) == (5, ("::1", 0))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--listen", "0.0.0.0:0"], "give --token-file FILE too"),
        (["--listen", "sandboxes.example:0"], "give --token-file FILE too"),
        (["--token-file", "/nowhere/token"], "host.token_file: /nowhere/token cannot be read"),
        (["--sandbox.backend=unsafe_subprocess"], "sandbox.i_understand = true"),
        (["--config", "/nowhere/host.toml"], "/nowhere/host.toml: cannot be read"),
        (["--listen", "198.51.100.7:1", "--token-file", "TOKEN"], "host.listen: cannot listen on 198.51.100.7:1"),
    ],
)
def test_what_cannot_be_served_ends_with_2_and_says_what_to_do(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (token := tmp_path / "token").write_text("secret")
    assert verb.main(["serve", *(str(token) if word == "TOKEN" else word for word in argv)]) == 2
    assert said in capsys.readouterr().err


def test_unexpected_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["serve", "host.toml"], ["reap", "--sandbox.boxes=2"], ["serve", "--sandbox.boxes"]):
        with pytest.raises(SystemExit) as caught:
            verb.main(argv)
        assert caught.value.code == 2
        assert "overrides look like" in capsys.readouterr().err


def test_reap_looks_at_every_backend_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = {
        "bubblewrap": StandIn(Enforced(), left=3),
        "docker": StandIn(Enforced(), fails="no daemon answers"),
        "landlock": StandIn(Enforced()),
    }
    monkeypatch.setattr(verb, "make", lambda name: backends[name])
    assert verb.main(["reap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["bubblewrap", "3 removed"],
        ["docker", "not looked at: no daemon answers"],
        ["landlock", "0 removed"],
    ]
    assert all(backend.closed == 1 for backend in backends.values())


def test_reap_without_any_backend_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "make", lambda name: StandIn(Enforced(), fails="not installed"))
    assert verb.main(["reap"]) == 2
    assert "no backend works here" in capsys.readouterr().err
