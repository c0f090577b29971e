"""`palestra serve`: the product by itself, as processes; and what decides in its supervisor, with processes that only pretend."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI
from rich.console import Console

from palestra.cli import keeper as keeping
from palestra.cli.config import ConfigError, ServeConfig, check_as, read_run
from palestra.cli.keeper import Keeper, Restarts
from palestra.cli.launch.types import LaunchError, RoleSpec
from palestra.cli.progress import Progress
from palestra.cli.runfolder import prepare_service
from palestra.cli.serve import main
from palestra.server.app import Doors
from palestra.server.client import ServiceClient, ServiceError
from palestra.server.listen import bind, url_of
from tests.jobs import ENV, start
from tests.served import Served

ROOT = Path(__file__).resolve().parent.parent
QUESTION: list[Any] = [{"role": "user", "content": "What is 12 plus 30?"}]


class Pretended:
    """A role that ends when it is told to."""

    pid = 0

    def __init__(self, name: str) -> None:
        self.name, self.status = name, None

    def poll(self) -> int | None:
        return self.status

    def stop(self, timeout_s: float) -> int:
        self.status = self.status or 0
        return self.status

    def kill(self) -> None:
        self.status = -9

    def last_words(self) -> str:
        return "last words"


class Stage:
    """A launcher of pretended roles, which are ready at once; `ends` says with which status each start of a role ends, None: it stays."""

    def __init__(self, **ends: list[int | None]) -> None:
        self.ends, self.specs = ends, list[RoleSpec]()

    def start(self, spec: RoleSpec) -> Pretended:
        self.specs.append(spec)
        role = Pretended(spec.name)
        planned = self.ends.get(spec.name, [])
        role.status = planned.pop(0) if planned else None
        return role


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Keeper, Stage, list[str]]]:
    """A keeper of pretended roles, its launcher, and what it says; it is interrupted once everything was started that is to end."""
    monkeypatch.setattr(keeping, "POLL_S", 0.0)

    def make(**ends: list[int | None]) -> tuple[Keeper, Stage, list[str]]:
        launcher, said = Stage(**ends), list[str]()
        config = check_as(ServeConfig, {"model": {"path": "m"}}, "x")
        progress = Progress(tmp_path, 0, Console(quiet=True))
        monkeypatch.setattr(progress, "say", said.append)
        keeper = Keeper(tmp_path, config, launcher, progress, (7, 8), lambda: said.append("ready"))
        keeper.restarts = Restarts(first_pause_s=0.0)
        monkeypatch.setattr(keeper, "_ready", lambda name: keeper.roles[name].poll() is None)
        monkeypatch.setattr(keeper, "_show", lambda: keeper._on_signal(2, None) if not any(ends.values()) else None)
        monkeypatch.setattr(keeping, "STATUS_S", -1.0)
        return keeper, launcher, said

    return make


def test_restarts_are_bounded_and_further_apart_each_time() -> None:
    restarts = Restarts(most=3, window_s=60.0, first_pause_s=0.5)
    assert [restarts.pause(float(at)) for at in range(4)] == [0.5, 1.0, 2.0, None]
    assert restarts.pause(60.0) == 2.0, "the first one is a minute ago"
    assert restarts.pause(200.0) == 0.5, "all are"


def test_a_service_that_ends_is_started_again_on_the_same_sockets(stage: Any) -> None:
    keeper, launcher, said = stage(service=[None, None])
    keeper.restarts = Restarts(first_pause_s=0.0)
    first_look = keeper.on_ready

    def die() -> None:
        first_look()
        keeper.roles["service"].kill()

    keeper.on_ready = die
    assert keeper.run() == 0
    assert [spec.name for spec in launcher.specs] == ["engine", "service", "service"]
    assert [spec.listeners for spec in launcher.specs] == [(), (7, 8), (7, 8)]
    assert any("the service was ended by signal 9" in line and "restart 1 of 5" in line for line in said)
    assert said.count("ready") == 1


def test_a_service_that_ends_again_and_again_ends_the_run(stage: Any) -> None:
    keeper, launcher, _ = stage(service=[None, 1, 1, 1, 1, 1, 1])
    first_look = keeper.on_ready

    def die() -> None:
        first_look()
        keeper.roles["service"].kill()

    keeper.on_ready = die
    with pytest.raises(
        LaunchError, match=r"ended 6 times within 60 s, the last time it ended with status 1(.|\n)*last words"
    ):
        keeper.run()
    assert len(launcher.specs) == 2 + 5
    assert all(role.poll() is not None for role in keeper.roles.values()), "every role was ended"


def test_an_engine_that_ends_ends_the_run_and_says_what_is_lost(stage: Any) -> None:
    keeper, _, _ = stage()
    keeper.on_ready = lambda: keeper.roles["engine"].kill()
    with pytest.raises(LaunchError, match=r"engine was ended by signal 9.*publish them again"):
        keeper.run()


async def test_each_application_answers_behind_its_own_door() -> None:
    def app(name: str) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            answered.append(name)

        return call

    answered: list[str] = []
    with bind("127.0.0.1", 0) as model, bind("0.0.0.0", 0) as control:
        doors = Doors([(app("model"), model), (app("control"), control)])
        for server in (model.getsockname(), ("10.1.2.3", control.getsockname()[1])):
            await doors({"type": "http", "server": server}, None, None)
        await doors({"type": "lifespan"}, None, None)
        assert answered == ["model", "control", "model"]
        with pytest.raises(KeyError):
            await doors({"type": "http", "server": ("10.1.2.3", model.getsockname()[1])}, None, None)
        assert url_of(control) == f"http://127.0.0.1:{control.getsockname()[1]}"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"serve": {"prt": 1}}, "unknown field serve.prt; did you mean port?"),
        ({"servee": {}}, "did you mean serve?"),
        ({"algo": {}}, "unknown field algo"),
        ({"schedule": {"kind": "sync"}}, "unknown field schedule.kind"),
        ({"run": {"steps": 3}}, "unknown field run.steps"),
        ({"sglang": {"x": 1}}, "it needs rollout.engine = .sglang."),
        ({"serve": {"port": 70000}}, "serve.port.*got 70000"),
        ({"serve": {"temperature": 0}}, 'needs serve.sampling = "free"'),
        ({"serve": {"sampling": "greedy"}}, "serve.sampling"),
        ({"serve": {"max_response": 2048}}, "leaves no room for a prompt in 2048 tokens"),
        ({"serve": {"max_context": 4096}}, r"serve.max_context \(4096\) is more than rollout.context_len"),
        ({"serve": {"host": "0.0.0.0", "admin_port": 0}}, "serve.url must be given"),
        ({"serve": {"url": "rollouts.example"}}, "serve.url"),
    ],
)
def test_wrong_configurations_of_a_service_say_what_is_wrong(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_as(ServeConfig, {"model": {"path": "m"}, **tables}, "serve.toml")


def test_a_service_s_folder_goes_on_with_its_keys_but_not_with_another_model(tmp_path: Path) -> None:
    def config(**serve: Any) -> dict[str, Any]:
        return {"model": {"path": "m"}, "run": {"save_dir": str(tmp_path)}, "serve": serve}

    first = check_as(ServeConfig, config(agent_key=True), "x")
    folder = prepare_service(first, tmp_path / "m")
    keys = [(folder / "roles" / name).read_text() for name in ("admin.token", "agent.key")]
    assert read_run(folder) == first
    again = check_as(ServeConfig, config(port=8000, agent_key=True, temperature=0.5), "x")
    assert prepare_service(again, tmp_path / "m") == folder
    assert [(folder / "roles" / name).read_text() for name in ("admin.token", "agent.key")] == keys
    other = check_as(ServeConfig, {**config(), "model": {"path": "other"}}, "x")
    with pytest.raises(ConfigError, match=r"cannot go on with other model\.path"):
        prepare_service(other, tmp_path / "other")
    (folder / "meta.json").write_text('{"kind": "train", "model_folder": "m"}')
    with pytest.raises(ConfigError, match="the folder of `palestra train`"):
        prepare_service(first, tmp_path / "m")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --model M"),
        (["--model", "m", "nonsense", "more"], "unexpected 'more'"),
        (["--model", "m", "--prot=1"], "--prot=1: overrides look like"),
        (["--model", "m", "--port", "many"], "serve.port"),
        (["--model", "m", "--serve.agent_kye=true"], "did you mean agent_key"),
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as error:  # argparse's own
        status = int(str(error.code))
    assert (status, said in capsys.readouterr().err) == (2, True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("serve"), tiny_moe)
    try:
        yield made
    finally:
        made.down()


def ask(agent: OpenAI, messages: list[Any], **more: Any) -> list[Any]:
    """The conversation with the model's reply behind it."""
    reply = agent.chat.completions.create(model="m", messages=messages, max_tokens=12, **more)
    return [*messages, reply.choices[0].message.model_dump(exclude_none=True)]


def walk(test: Any) -> Any:
    """A test with real processes; the first one that needs the service waits for its start."""
    return pytest.mark.walk(pytest.mark.timeout(300)(test))


@contextmanager
def talking(client: ServiceClient, **limits: Any) -> Iterator[tuple[OpenAI, Any]]:
    """An agent in a session of its own."""
    handle = client.open(**limits)
    with OpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=4) as agent:
        yield agent, handle


@walk
def test_the_example_goes_the_whole_path(served: Served) -> None:
    served.up()
    command = [sys.executable, str(ROOT / "examples" / "serve_client.py"), served.address("control_url")]
    token = served.folder / "roles" / "admin.token"
    done = subprocess.run([*command, str(token)], capture_output=True, text=True, timeout=60, env={**os.environ, **ENV})
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"reward [01]\.0", done.stdout)) == 2, done.stdout
    rows = re.findall(r"(\d+) tokens, (\d+) to train on", done.stdout)
    assert len(rows) == 2, done.stdout
    assert all(0 < int(trained) < int(tokens) for tokens, trained in rows)


@walk
def test_what_the_document_says_in_python_works(served: Served) -> None:
    client = served.up()
    text = (ROOT / "docs" / "service.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    for block in blocks:
        here = block.replace("http://127.0.0.1:8000", served.address("control_url"))
        here = here.replace("runs/serve/", f"{served.folder}/")
        here = re.sub(r"/checkpoints/step_\d", str(served.model), here)
        exec(compile(here, "docs/service.md", "exec"), names)
    assert len(names["trajectory"].turns) == 5
    assert [turn.fork_reason is None for turn in names["trajectory"].turns] == [True, True, False, False, False]
    assert [row.reward for row in names["groups"][0].samples] == [0.0, 1.0]
    assert names["version"] == 3
    assert client.ledger()["balanced"]
    with talking(client) as (agent, handle):
        ask(agent, QUESTION)
        assert client.trajectory(handle).turns[0].spans[0].version == 2


@walk
def test_a_killed_service_comes_back_with_its_sessions(served: Served) -> None:
    """In the middle of a weight update, too, in which the engine stands still."""
    client = served.up()
    with talking(client) as (agent, handle):
        conversation = ask(agent, QUESTION)
        version = int(client.status()["policy_version"]) + 1
        client.publish_begin(version, version)
        before = served.pid("service")
        served.kill("service")
        conversation = ask(agent, [*conversation, {"role": "user", "content": "Are you sure?"}])
        assert len(conversation) == 4
        assert served.pid("service") != before
        turns = client.trajectory(handle).turns
        assert [(turn.parent, turn.fork_reason) for turn in turns] == [(None, None), (0, None)]
        with pytest.raises(ServiceError, match="no publish is open"):
            client.publish_end(version, str(served.model))
        client.reward(handle, 1.0)
        assert client.close_with(handle) == 1.0


@walk
def test_status_and_inspect_read_the_folder(served: Served) -> None:
    client = served.up()
    with talking(client, rollout_id="looked-at", group_id="seen", group_size=1) as (agent, handle):
        ask(agent, QUESTION)
        done = start("status", served.folder)
        assert re.search(r"service .* sessions \d+; requests at the engine 0; groups ready", done.communicate()[0])
        client.close_with(handle)
    for arguments, said in (
        (("--json",), '"group": "seen"'),
        (("seen",), "looked-at"),
        (("looked-at",), "unscored"),
        (("looked-at", "--json"), '"logprob"'),
    ):
        done = start("inspect", served.folder, *arguments)
        out, err = done.communicate()
        assert (done.returncode, said in out) == (0, True), out + err


@walk
def test_stopped_and_started_again_with_a_control_address(served: Served) -> None:
    """Port, keys and sessions are those of before, and agents reach no control route any more; a second server is refused."""
    client = served.up()
    url, agent_key = served.address("url"), served.key("agent.key")
    handle = client.open(rollout_id="kept")
    with OpenAI(base_url=handle.base_url, api_key=handle.api_key) as agent:
        conversation = ask(agent, QUESTION)
    status, out, err = served.down()
    assert status == 0, out + err
    for said in (
        f"router URL    {url}",
        "admin.token",
        "agent.key",
        "curl -s",
        "service.open()",
        "the ledger balances",
    ):
        assert said in out

    client = served.up("--admin-port", "0")
    assert served.address("url") == url
    assert served.address("control_url") != url.removesuffix("/v1")
    named = {"X-Session-Id": "kept"}
    with OpenAI(base_url=url, api_key=agent_key, default_headers=named) as agent:
        ask(agent, [*conversation, {"role": "user", "content": "Go on."}])
    assert [turn.parent for turn in client.trajectory(handle).turns] == [None, 0]
    assert client.open().base_url == url
    headers = {"Authorization": f"Bearer {served.key()}"}
    root = url.removesuffix("/v1")
    for method, path in (("GET", "/health"), ("GET", "/status"), ("POST", "/v1/sessions"), ("POST", "/admin/claim")):
        assert httpx.request(method, root + path, headers=headers).status_code == 404, path
    assert httpx.get(f"{root}/v1/models").status_code == 200

    second = start(*served.arguments("--port", "0"))
    out, err = second.communicate(timeout=60)
    assert (second.returncode, "served already" in err) == (2, True), out + err
    assert served.ready()


@walk
def test_a_taken_port_is_refused_before_anything_starts(served: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("serve", "--model", served.model, "--port", str(port), f"--run.save_dir={tmp_path}")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert f"serve.port: cannot listen on 127.0.0.1:{port}" in err
    assert not list((tmp_path / "serve" / "log").glob("*"))


@walk
def test_an_engine_that_dies_ends_the_run(served: Served) -> None:
    served.up("--admin-port", "0")
    process, served.process = served.process, None
    assert process is not None
    pids = [served.pid(role) for role in ("engine", "service")]
    os.kill(pids[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert "engine was ended by signal 9" in err
    assert "publish them again" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
