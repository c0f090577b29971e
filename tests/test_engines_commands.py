"""The exact command lines of engines and router, case by case, and how engines are laid onto nodes and GPUs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.engines import environment as environments
from palestra.cli.engines.commands import engine_commands, ports_needed, router_command
from palestra.cli.engines.options import Option
from palestra.cli.engines.topology import of_config, read_topology
from palestra.cli.engines.types import EngineCommand, EngineEnvironment, EngineGroup, EngineSetupError, Topology
from palestra.server.config import EngineSection

MODEL = Path("/m")
START = "/env/bin/python -m sglang.launch_server --model-path /m"
GPU = "--mem-fraction-static 0.85 --log-level-http warning"
SIZES = "--context-length 2048"
EXAMPLE = """
models:
  - name: policy
    groups:
      - {kind: prefill, gpus: 2, gpus_per_engine: 2, overrides: {mem_fraction_static: 0.8}}
      - {kind: decode, gpus: 6, gpus_per_engine: 2, overrides: {context_length: 12288}}
"""


def env(device: str = "cuda") -> EngineEnvironment:
    return EngineEnvironment(Path("/env"), Path("/env/bin/python"), "cpu" if device == "cpu" else "cuda")


def rollout(**fields: Any) -> Topology:
    return of_config(EngineSection(engine="sglang", **fields))


def commands(topology: Topology, device: str = "cuda", **more: Any) -> list[EngineCommand]:
    return engine_commands(topology, MODEL, env(device), itertools.count(30000), **more)


def lines(engines: Sequence[EngineCommand]) -> list[str]:
    """A process's GPUs, then its command line."""
    return [f"{each.name} [{each.env['CUDA_VISIBLE_DEVICES']}] {' '.join(each.argv)}" for each in engines]


def test_one_engine_on_a_cpu() -> None:
    (engine,) = commands(rollout(max_total_tokens=8192), "cpu", weight_version="0")
    assert lines([engine]) == [
        f"engine-0 [] {START} --host 127.0.0.1 --port 30000 --device cpu --enable-metrics --dtype float32"
        " --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule --sleep-on-idle --watchdog-timeout 600"
        f" --mem-fraction-static 0.1 --max-running-requests 64 --log-level-http warning {SIZES} --max-total-tokens 8192 --weight-version 0"
    ]
    assert (engine.url, engine.kind, engine.node) == ("http://127.0.0.1:30000", "regular", 0)
    assert engine.env["SGLANG_USE_CPU_ENGINE"] == "1"


def test_two_engines_of_two_gpus_with_data_parallel_attention_and_parallel_experts() -> None:
    engines = commands(rollout(engines=2, gpus_per_engine=2, dp=2, dp_attention=True, ep=2))
    rest = f"--device cuda --enable-metrics --tp-size 2 {GPU} {SIZES} --ep-size 2 --attn-dp-size 2"
    assert lines(engines) == [
        f"engine-0 [0,1] {START} --host 127.0.0.1 --port 30000 {rest}",
        f"engine-1 [2,3] {START} --host 127.0.0.1 --port 30001 {rest}",
    ]


def test_one_prefill_engine_and_three_decode_engines(tmp_path: Path) -> None:
    path = tmp_path / "sglang.yaml"
    path.write_text(EXAMPLE)
    topology = read_topology(path)
    engines = commands(topology)
    shared = "--device cuda --enable-metrics --tp-size 2 --disaggregation-mode"
    decode = f"{shared} decode {GPU} --context-length 12288"
    assert lines(engines) == [
        f"engine-0 [0,1] {START} --host 127.0.0.1 --port 30000 {shared} prefill --disaggregation-bootstrap-port 30001"
        " --mem-fraction-static 0.8 --log-level-http warning",
        f"engine-1 [2,3] {START} --host 127.0.0.1 --port 30002 {decode}",
        f"engine-2 [4,5] {START} --host 127.0.0.1 --port 30003 {decode}",
        f"engine-3 [6,7] {START} --host 127.0.0.1 --port 30004 {decode}",
    ]
    assert [(each.kind, each.bootstrap_port) for each in engines[:2]] == [("prefill", 30001), ("decode", None)]
    assert ports_needed(topology) == 5


def test_an_engine_over_two_nodes() -> None:
    topology = rollout(gpus_per_engine=16)
    first, second = commands(topology, hosts=("10.0.0.1", "10.0.0.2"))
    shared = "--device cuda --enable-metrics --tp-size 16 --nnodes 2 --node-rank"
    assert lines([first, second]) == [
        f"engine-0 [0,1,2,3,4,5,6,7] {START} --host 10.0.0.1 --port 30000 {shared} 0 --dist-init-addr 10.0.0.1:30001 {GPU} {SIZES}",
        f"engine-0.1 [0,1,2,3,4,5,6,7] {START} --host 10.0.0.2 --port 30000 {shared} 1 --dist-init-addr 10.0.0.1:30001 {GPU} {SIZES}",
    ]
    assert [(each.url, each.node) for each in (first, second)] == [("http://10.0.0.1:30000", 0), ("", 1)]
    assert ports_needed(topology) == 2
    with pytest.raises(EngineSetupError, match="need 2 nodes of 8 GPUs each, and 1 are known"):
        commands(topology)


def test_a_second_cache_in_host_memory() -> None:
    (engine,) = commands(rollout(hicache=True, hicache_ratio=3.0))
    assert " ".join(engine.argv).endswith(f"{GPU} {SIZES} --enable-hierarchical-cache --hicache-ratio 3.0")


def test_states_of_linear_attention() -> None:
    (engine,) = commands(rollout(kv_dtype="fp8_e4m3", ssm_dtype="fp32", state_ratio=0.5, state_strategy="extra_buffer"))
    states = "--mamba-ssm-dtype float32 --mamba-full-memory-ratio 0.5 --mamba-radix-cache-strategy extra_buffer"
    assert " ".join(engine.argv).endswith(f"{GPU} {SIZES} --kv-cache-dtype fp8_e4m3 {states}")


def test_the_table_goes_through_before_a_groups_own_and_after_the_devices() -> None:
    topology = Topology((EngineGroup(options={"chunked_prefill_size": 7}),))
    (engine,) = commands(topology, "cpu", sglang={"dtype": "bfloat16", "chunked-prefill-size": 512})
    words = list(engine.argv)
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert words[words.index("--chunked-prefill-size") + 1] == "7"
    assert words.count("--dtype") == words.count("--chunked-prefill-size") == 1


def test_engines_are_laid_onto_nodes_and_none_straddles_two() -> None:
    groups = (EngineGroup("regular", 3, 3), EngineGroup("regular", 1, 16), EngineGroup("regular", 1, 1))
    engines = commands(Topology(groups), hosts=[f"10.0.0.{node}" for node in range(5)])
    where = [(each.name, each.node, each.env["CUDA_VISIBLE_DEVICES"]) for each in engines]
    assert where == [
        ("engine-0", 0, "0,1,2"),
        ("engine-1", 0, "3,4,5"),
        ("engine-2", 1, "0,1,2"),
        ("engine-3", 2, "0,1,2,3,4,5,6,7"),
        ("engine-3.1", 3, "0,1,2,3,4,5,6,7"),
        ("engine-4", 4, "0"),
    ]


def test_only_the_gpus_that_are_to_be_used_are_used() -> None:
    engines = commands(rollout(engines=2), visible=["4", "GPU-abc"])
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in engines] == ["4", "GPU-abc"]
    with pytest.raises(
        EngineSetupError, match="engine 2 needs GPU number 3 of this machine, and CUDA_VISIBLE_DEVICES names 2"
    ):
        commands(rollout(engines=3), visible=["4", "5"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus_per_engine": 2}, "more than one GPU per engine"),
        ({"pd": {"prefill_gpus": 1, "decode_gpus": 1}}, "prefill and decode apart"),
        ({"hicache": True}, "a hierarchical cache"),
        ({"deterministic": True}, "deterministic inference"),
        ({"routed_experts": True, "router": "smg"}, "the experts of each token"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineSetupError, match=f"SGLang on a CPU has no {said}"):
        commands(rollout(**fields), "cpu")


def arguments(router: EngineCommand) -> dict[str, Any]:
    assert router.argv[:2] == ("/env/bin/python", str(environments.STANDINS / "router_main.py"))
    given: dict[str, Any] = json.loads(router.argv[2])
    return given


def test_the_routers_arguments() -> None:
    engines = commands(rollout(engines=2))
    router = router_command(engines, env(), port=40000, prometheus_port=40001, startup_s=300, external=["http://h:1"])
    assert (router.name, router.kind, router.url) == ("router", "router", "http://127.0.0.1:40000")
    assert arguments(router) == {
        "host": "127.0.0.1",
        "port": 40000,
        "policy": "consistent_hashing",
        "worker_startup_timeout_secs": 300,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": 40001,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "health_check_endpoint": "/model_info",
        "health_check_interval_secs": 5,
        "health_success_threshold": 1,
        "worker_startup_check_interval": 1,
        "log_level": "warn",
        "request_timeout_secs": 86400,
        "shutdown_grace_period_secs": 2,
        "worker_urls": ["http://127.0.0.1:30000", "http://127.0.0.1:30001", "http://h:1"],
    }


def test_the_router_of_prefill_and_decode_engines_and_a_table_that_changes_its_arguments() -> None:
    engines = commands(rollout(pd={"prefill_gpus": 1, "decode_gpus": 2}))
    table = {"health-check-interval-secs": 1, "cache_threshold": 0.5}
    fields = {name: Option(name, "") for name in ("health_check_interval_secs", "cache_threshold")}
    router = router_command(
        engines, env(), port=1, prometheus_port=2, host="0.0.0.0", policy="manual", router=table, fields=fields
    )
    given = arguments(router)
    assert router.url == "http://127.0.0.1:1"
    assert given["pd_disaggregation"] is True
    assert given["prefill_urls"] == [["http://127.0.0.1:30000", 30001]]
    assert given["decode_urls"] == ["http://127.0.0.1:30002", "http://127.0.0.1:30003"]
    assert "worker_urls" not in given
    assert (given["health_check_interval_secs"], given["cache_threshold"], given["policy"]) == (1, 0.5, "manual")
    with pytest.raises(EngineSetupError, match="not both"):
        router_command([*engines, *commands(rollout())], env(), port=1, prometheus_port=2)


def test_smg_is_started_by_its_own_launcher_where_it_is_installed(tmp_path: Path) -> None:
    place = EngineEnvironment(tmp_path, Path("/env/bin/python"), "cuda")
    engines = commands(rollout(engines=2))
    with pytest.raises(EngineSetupError, match="palestra engine install --cuda --smg --into"):
        router_command(engines, place, port=40000, prometheus_port=40001, kind="smg")
    record = {"device": "cuda", "versions": {}, "parts": {"smg": environments.stamp("smg")}}
    (tmp_path / environments.RECORD).write_text(json.dumps(record))
    shared = (
        "/env/bin/python -m smg.launch_router --host 127.0.0.1 --port 40000 --policy consistent_hashing"
        " --worker-startup-timeout-secs 1800 --prometheus-host 127.0.0.1 --prometheus-port 40001 --disable-retries"
        " --disable-circuit-breaker --health-check-endpoint /model_info --health-check-interval-secs 5 --health-success-threshold 1"
        " --worker-startup-check-interval 1 --log-level warn --request-timeout-secs 86400 --shutdown-grace-period-secs 2"
        " --disable-worker-overload-protection --disable-tokenizer-autoload"
    )
    whole = router_command(engines, place, port=40000, prometheus_port=40001, kind="smg")
    assert " ".join(whole.argv) == f"{shared} --worker-urls http://127.0.0.1:30000 http://127.0.0.1:30001"
    split = commands(rollout(pd={"prefill_gpus": 1, "decode_gpus": 1}))
    apart = router_command(split, place, port=40000, prometheus_port=40001, kind="smg")
    pairs = "--prefill http://127.0.0.1:30000 30001 --decode http://127.0.0.1:30002"
    assert " ".join(apart.argv) == f"{shared} --pd-disaggregation {pairs}"
