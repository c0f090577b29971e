"""`palestra engine serve` and the engine role: what they refuse, what they start, what they say, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import ServeConfig, check_as, dump_toml
from palestra.cli.engines.assemble import Places, assemble
from palestra.cli.engines.external import probe
from palestra.cli.engines.part import FleetError
from palestra.cli.engines.ports import free_ports
from palestra.cli.engines.probes import router_lacks
from palestra.cli.engines.serve import main, window
from palestra.cli.engines.types import EngineSetupError
from palestra.server.config import EngineSection
from tests import jobs
from tests.fakes import engine_env, standin_engine
from tests.live import wait_for
from tests.sglang import START_S, WINDOW, SglangEngines
from tests.test_engines_fleet import MARK, marked, pid_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that says how long its texts may be, which is all that is read of it here."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


@pytest.fixture
def env(tmp_path: Path) -> Path:
    return engine_env.make(tmp_path / "env")


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """What `palestra engine serve` says where it starts nothing."""
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("palestra engine serve: ")
    assert "Traceback" not in said
    return said


# What is refused before anything starts


def test_wrong_wishes_are_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], model: Path, env: Path, tmp_path: Path
) -> None:
    at = (model, "--env", env)
    assert "palestra engine install" in refused(capsys, model, "--env", tmp_path / "none")
    assert "config.json cannot be read" in refused(capsys, env, "--env", env)
    assert 'rollout.router = "none" is for one engine' in refused(capsys, *at, "--num", "2", "--router", "none")
    assert "did you mean context_length" in refused(capsys, *at, "--sglang-contextlength", "1")
    assert "rollout.max_total_tokens" in refused(capsys, *at, "--sglang-max-total-tokens", "1")
    assert "in front of several SGLang engines" in refused(capsys, *at, "--router-queue-size", "1")
    assert "did you mean queue_size" in refused(capsys, *at, "--num", "2", "--router-queue-sizes", "1")
    assert "no address of this machine" in refused(capsys, *at, "--host", "203.0.113.7")
    assert "router_policy" in refused(capsys, *at, "--num", "2", "--policy", "best")


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(model: Path, env: Path) -> None:
    rollout = EngineSection(engine="sglang", environment=str(env))
    (port,) = free_ports("127.0.0.1", 1)
    server = standin_engine.start(port)
    try:
        with pytest.raises(EngineSetupError, match=f"port {port} of 127.0.0.1 is taken"):
            assemble(rollout, model, {}, {}, Places(port=port))
    finally:
        server.shutdown()
        server.server_close()
    only = assemble(rollout, model, {}, {}, Places(port=port))
    assert (only.engines[0].url, only.router) == (f"http://127.0.0.1:{port}", None)


def test_ports_of_engines_router_and_figures_differ(model: Path, env: Path) -> None:
    rollout = EngineSection(engine="sglang", engines=3, environment=str(env))
    made = assemble(rollout, model, {}, {"queue_size": 5})
    assert made.router is not None
    given = json.loads(made.router.argv[-1])
    ports = [*(int(engine.url.rpartition(":")[2]) for engine in made.engines), given["port"], given["prometheus_port"]]
    assert len(set(ports)) == 5
    assert (given["worker_urls"], given["queue_size"]) == ([engine.url for engine in made.engines], 5)
    assert given["policy"] == "consistent_hashing"


def test_engines_of_others_get_a_router_only_where_they_need_one(model: Path, env: Path) -> None:
    two = ["http://a:1/", "http://b:2"]
    one = assemble(EngineSection(engine="sglang", urls=two[:1]), model, {}, {})
    assert (one.engines, one.router, one.external) == ((), None, ("http://a:1",))
    ours = assemble(EngineSection(engine="sglang", urls=two, environment=str(env)), model, {}, {})
    assert ours.router is not None
    assert json.loads(ours.router.argv[-1])["worker_urls"] == ["http://a:1", "http://b:2"]
    theirs = EngineSection(engine="sglang", urls=two, router_url="http://r:3")
    assert assemble(theirs, model, {}, {}).router is None
    with pytest.raises(EngineSetupError, match="engines that are started here"):
        assemble(theirs, model, {"dtype": "float32"}, {})
    with pytest.raises(EngineSetupError, match="router that is started here"):
        assemble(theirs, model, {}, {"queue_size": 1})


def test_the_window_is_the_models_own(model: Path) -> None:
    assert window(model) == 4096
    (model / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 512}}))
    assert window(model) == 512
    (model / "config.json").write_text("{}")
    assert window(model) == 2048


def test_engines_of_others_that_do_not_answer_are_named() -> None:
    port, silent = free_ports("127.0.0.1", 2)
    url, nobody = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{silent}"
    server = standin_engine.start(port)
    try:
        assert probe([url], None)[url].tokens == 16_384
        with pytest.raises(FleetError, match=rf"rollout.urls: {nobody} does not answer GET /model_info"):
            probe([url, nobody], None)
        with pytest.raises(FleetError, match=rf"router {url} does not have {url}"):
            probe([url], url)
        with pytest.raises(FleetError, match=rf"rollout.router_url: {nobody} does not answer"):
            probe([url], nobody)
    finally:
        server.shutdown()
        server.server_close()


# Whole commands, with stand-ins in SGLang's place


def listening(urls: list[str]) -> list[str]:
    return [url for url in urls if pid_of(url) is not None]


@pytest.mark.walk
def test_serve_says_where_engines_are_and_ctrl_c_leaves_nothing(model: Path, env: Path, tmp_path: Path) -> None:
    announced = tmp_path / "told.json"
    words = ("engine", "serve", model, "--num", "2", "--env", env, "--log", tmp_path / "log", "--announce", announced)
    process = jobs.start(*words, env={MARK: "serve"})
    try:
        wait_for(lambda: announced.exists() or process.poll() is not None, "the engines")
        told = json.loads(announced.read_text())
        assert router_lacks(told["url"], told["workers"], 2) == []
        assert set(told["pids"]) == {"engine-0", "engine-1", "router"}
        assert pid_of(told["workers"][0]) == told["pids"]["engine-0"]
        os.kill(told["pids"]["engine-1"], signal.SIGKILL)
        wait_for(
            lambda: json.loads(announced.read_text())["pids"]["engine-1"] != told["pids"]["engine-1"], "it is back"
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, err) == (0, "")
    assert f"router    {told['url']}" in out
    assert "  [rollout]\n" in out
    assert f"engine-1  {told['workers'][1]}  16,384 tokens of cache, 64 requests at a time" in out
    assert f'urls = ["{told["workers"][0]}", "{told["workers"][1]}"]' in out
    assert "engine-1 was ended by signal 9: it is started again in 1 s" in out
    assert out.endswith("stopping\nstopped\n")
    assert (marked("serve"), announced.exists()) == ([], False)


@pytest.mark.walk
def test_serve_that_cannot_start_its_engines_exits_1_with_their_fault(model: Path, env: Path, tmp_path: Path) -> None:
    words = (
        "engine",
        "serve",
        model,
        "--env",
        env,
        "--log",
        tmp_path / "log",
        "--sglang-chat-template",
        "no-such.jinja",
    )
    status, _, err = jobs.palestra(*words, env={MARK: "faulty"})
    assert status == 1
    assert "engine-0 ended with status 1 while it started:" in err
    assert "RuntimeError: no-such.jinja" in err
    assert "--chat-template no-such.jinja" in err.splitlines()[-1]
    assert marked("faulty") == []


@contextmanager
def role(folder: Path, model: Path, mark: str, **rollout: Any) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The engine role of a service's run folder, as a supervisor starts it; SIGTERM at the end leaves nothing."""
    data = {"model": {"path": str(model)}, "rollout": {"engine": "sglang", **rollout}}
    for part in ("log", "roles"):
        (folder / part).mkdir(parents=True)
    (folder / "run.toml").write_text(dump_toml(check_as(ServeConfig, data, "test")))
    (folder / "meta.json").write_text(json.dumps({"kind": "serve", "model_folder": str(model)}))
    process = jobs.start("role", "engine", "--config", folder / "run.toml", env={MARK: mark})
    try:
        yield process, folder / "roles" / "engine.json"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, out + err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert marked(mark) == []


def announced_by(process: subprocess.Popen[str], path: Path) -> dict[str, Any]:
    wait_for(lambda: path.exists() or process.poll() is not None, "the role's announcement")
    assert process.poll() is None, process.communicate()
    return dict(json.loads(path.read_text()))


@pytest.mark.walk
def test_the_role_announces_router_workers_and_pools(model: Path, env: Path, tmp_path: Path) -> None:
    with role(tmp_path / "run", model, "role", engines=2, environment=str(env)) as (process, path):
        said = announced_by(process, path)
        assert (said["kind"], said["router"], len(said["workers"])) == ("sglang", True, 2)
        assert said["pools"][said["workers"][0]] == {"tokens": 16_384, "requests": 64, "context": 2048}
        assert listening([f"{said['url']}/health", *said["workers"]]) == [f"{said['url']}/health", *said["workers"]]
        assert said["pid"] == process.pid
    log = (tmp_path / "run" / "log" / "engine.jsonl").read_text()
    assert "16,384 tokens of cache" in log
    assert listening(said["workers"]) == []


@pytest.mark.walk
def test_engines_of_others_are_used_and_left_running(model: Path, env: Path, tmp_path: Path) -> None:
    ports = free_ports("127.0.0.1", 2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    servers = [standin_engine.start(port) for port in ports]
    try:
        with role(tmp_path / "two", model, "two", urls=urls, environment=str(env)) as (process, path):
            said = announced_by(process, path)
            assert said["workers"] == urls
            assert router_lacks(said["url"], urls, 2) == []
            assert set(said["pools"]) == set(urls)
        with role(tmp_path / "one", model, "one", urls=urls[:1]) as (process, path):
            said = announced_by(process, path)
            assert (said["url"], said["workers"], said["router"]) == (urls[0], urls[:1], False)
        assert listening(urls) == urls
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


# The real thing


@pytest.mark.ci
@pytest.mark.timeout(START_S + 60)  # it may be the one that waits for the engines
def test_real_engines_are_announced_with_their_pools_and_answer_alike(sglang_engines: SglangEngines) -> None:
    """That they come back after a death is in test_sglang_faults.py; that nothing of them is left is looked at when they end."""
    told = json.loads(sglang_engines.announced.read_text())
    assert list(told["pools"]) == list(sglang_engines.workers)
    for pool in told["pools"].values():
        assert pool == {"tokens": 16_384, "requests": 64, "context": WINDOW}
    assert "16,384 tokens of cache, 64 requests at a time, 2,048 tokens a request" in sglang_engines.log.read_text()
    sglang_engines.fresh()
    first, *others = (generated(url) for url in (sglang_engines.router, *sglang_engines.workers))
    assert len(first) == 4
    assert others == [first, first]


def generated(url: str) -> list[int]:
    """The ids of four greedy tokens."""
    import urllib.request

    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json", "X-SMG-Routing-Key": "g"}
    )
    with standin_engine.OPENER.open(request, timeout=60) as answer:
        return list(json.loads(answer.read())["output_ids"])
