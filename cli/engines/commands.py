"""The command lines of engines and router. Pure: nothing is started, looked up or asked.

In: a topology, a model's folder, the engines' environment, free ports and the options that go straight through. Out: one `EngineCommand`
a process. Engines are laid onto nodes in order: one that fits into a node never straddles two, a larger one takes whole nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.cli.engines.environment import STANDINS, has_smg, python_env
from palestra.cli.engines.options import Fields, argv_of, merged
from palestra.cli.engines.types import EngineCommand, EngineEnvironment, EngineGroup, EngineSetupError, Topology
from palestra.server.listen import LOOPBACK

RouterKind = Literal["sglang-router", "smg"]

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "cpu": {
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        # It overlaps the CPU's work with a GPU's, of which there is none.
        "disable_overlap_schedule": True,
        # Without it an idle engine keeps a core busy.
        "sleep_on_idle": True,
        # A long prompt on few cores takes longer than the usual 300 s.
        "watchdog_timeout": 600,
        "mem_fraction_static": 0.1,
        # As many as the memory of the host had room for would be thousands.
        "max_running_requests": 64,
    },
    "cuda": {"mem_fraction_static": 0.85},
}
"""SGLang's options of a device, where nothing else is asked for."""
# One line of access log a request says nothing and costs the engine time.
QUIET = {"log_level_http": "warning"}
DAY_S = 86_400
ROUTING: Mapping[str, object] = {
    # The service repeats requests itself, since it knows their tokens, and takes engines out of routing itself.
    "disable_retries": True,
    "disable_circuit_breaker": True,
    # /health makes an engine sample a token, and fails while it is paused for new weights.
    "health_check_endpoint": "/model_info",
    "health_check_interval_secs": 5,
    "health_success_threshold": 1,
    "worker_startup_check_interval": 1,
    "log_level": "warn",
    # The service's own deadlines are the ones that count.
    "request_timeout_secs": DAY_S,
    "shutdown_grace_period_secs": 2,
}
"""Arguments of either router, of which `[router]` may change what is not palestra's."""
SMG: Mapping[str, object] = {
    # A group's turns stay with their engine until the service moves them.
    "disable_worker_overload_protection": True,
    "disable_tokenizer_autoload": True,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an engine's processes run."""

    node: int
    nodes: int
    gpus: range
    """Of each of its nodes."""


def ports_needed(topology: Topology) -> int:
    """How many free ports `engine_commands` takes."""
    return sum(group.engines * (1 + _extra_ports(group, topology)) for group in topology.groups)


def engine_commands(
    topology: Topology,
    model: Path,
    environment: EngineEnvironment,
    ports: Iterator[int],
    *,
    hosts: Sequence[str] = ("127.0.0.1",),
    visible: Sequence[str] = (),
    sglang: Mapping[str, object] | None = None,
    fields: Fields | None = None,
    weight_version: str | None = None,
) -> list[EngineCommand]:
    """The processes of all engines, a multi-node engine's one after the other.

    `hosts` are the addresses that the nodes listen on, this machine's first; `visible` names its GPUs where only some are to be used
    (the words of CUDA_VISIBLE_DEVICES); `sglang` is the checked table `[sglang]` and `fields` what the installed version has.

    Raises:
        EngineSetupError: the topology needs more nodes or GPUs than there are, or what this device cannot do.
    """
    _check_device(topology, environment)
    places = _places(topology, len(hosts))
    commands = []
    for index, (group, place) in enumerate(zip(_each(topology), places, strict=True)):
        own = _Engine(index, group, place, next(ports), [next(ports) for _ in range(_extra_ports(group, topology))])
        options = merged(fields, DEFAULTS[environment.device], QUIET, sglang or {}, group.options)
        if weight_version is not None:
            options["weight_version"] = weight_version
        for rank in range(place.nodes):
            words = [*own.words(model, environment, hosts, rank), *argv_of(options, fields)]
            commands.append(own.command(words, environment, hosts, rank, visible))
    return commands


def router_command(
    engines: Sequence[EngineCommand],
    environment: EngineEnvironment,
    *,
    port: int,
    prometheus_port: int,
    kind: RouterKind = "sglang-router",
    host: str = "127.0.0.1",
    policy: str = "consistent_hashing",
    startup_s: float = 1800.0,
    external: Sequence[str] = (),
    router: Mapping[str, object] | None = None,
    fields: Fields | None = None,
) -> EngineCommand:
    """The router in front of engines, and of `external` ones that others run; `router` is the checked table `[router]`.

    Raises:
        EngineSetupError: smg is not installed, or an option does not exist.
    """
    arguments: dict[str, object] = {
        "host": host,
        "port": port,
        "policy": policy,
        "worker_startup_timeout_secs": max(1, round(startup_s)),
        # Its own place for its own figures would be every address of this machine.
        "prometheus_host": "127.0.0.1",
        "prometheus_port": prometheus_port,
    }
    workers = [*(command.url for command in engines if command.url and command.kind == "regular"), *external]
    prefill = [
        (command.url, command.bootstrap_port) for command in engines if command.url and command.kind == "prefill"
    ]
    decode = [command.url for command in engines if command.url and command.kind == "decode"]
    split = bool(prefill or decode)
    if split and workers:
        raise EngineSetupError("a router has either whole engines or prefill and decode engines behind it, not both")
    if kind == "smg":
        if not has_smg(environment):
            raise EngineSetupError(
                f"the router smg is not in {environment.folder}; install it with: "
                f"palestra engine install --{environment.device} --smg --into {environment.folder}"
            )
        options = merged(fields, arguments, ROUTING, SMG, router or {})
        pairs = [word for url, bootstrap in prefill for word in ("--prefill", url, str(bootstrap))]
        pairs += [word for url in decode for word in ("--decode", url)]
        listed = ["--pd-disaggregation", *pairs] if split else ["--worker-urls", *workers]
        argv = ("-m", "smg.launch_router", *argv_of(options, fields), *listed)
    else:
        listing = {"pd_disaggregation": True, "prefill_urls": prefill, "decode_urls": decode}
        options = merged(fields, arguments, ROUTING, listing if split else {"worker_urls": workers}, router or {})
        argv = (str(STANDINS / "router_main.py"), json.dumps(options))
    return EngineCommand(
        "router", (str(environment.python), *argv), python_env(environment), _url(host, port), kind="router"
    )


@dataclass(frozen=True, slots=True)
class _Engine:
    """One engine on its way to a command line."""

    index: int
    group: EngineGroup
    place: _Place
    port: int
    extra: Sequence[int]
    """Ports of a prefill engine's bootstrap server and of a multi-node engine's first contact."""

    @property
    def bootstrap(self) -> int | None:
        return self.extra[0] if self.group.kind == "prefill" else None

    def words(self, model: Path, environment: EngineEnvironment, hosts: Sequence[str], rank: int) -> list[str]:
        """What palestra decides of the command line."""
        host = hosts[self.place.node + rank]
        words = [str(environment.python), "-m", "sglang.launch_server", "--model-path", str(model)]
        words += ["--host", host, "--port", str(self.port), "--device", environment.device, "--enable-metrics"]
        if self.group.gpus_per_engine > 1:
            words += ["--tp-size", str(self.group.gpus_per_engine)]
        if self.place.nodes > 1:
            contact = _address(hosts[self.place.node], self.extra[-1])
            words += ["--nnodes", str(self.place.nodes), "--node-rank", str(rank), "--dist-init-addr", contact]
        if self.group.kind != "regular":
            words += ["--disaggregation-mode", self.group.kind]
        if self.bootstrap is not None:
            words += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        return words

    def command(
        self,
        words: Sequence[str],
        environment: EngineEnvironment,
        hosts: Sequence[str],
        rank: int,
        visible: Sequence[str],
    ) -> EngineCommand:
        """The whole command of one of its nodes."""
        env, node = {**python_env(environment), **self.group.env}, self.place.node + rank
        if environment.device == "cuda":
            gpus = [str(gpu) for gpu in self.place.gpus]
            if visible and node == 0:
                if self.place.gpus.stop > len(visible):
                    raise EngineSetupError(
                        f"engine {self.index} needs GPU number {self.place.gpus.stop} of this machine, and "
                        f"CUDA_VISIBLE_DEVICES names {len(visible)}"
                    )
                gpus = [visible[gpu] for gpu in self.place.gpus]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        name = f"engine-{self.index}" + (f".{rank}" if rank else "")
        url = "" if rank else _url(hosts[node], self.port)
        return EngineCommand(name, tuple(words), env, url, self.group.kind, None if rank else self.bootstrap, node)


def _each(topology: Topology) -> list[EngineGroup]:
    """The group of every engine, in order."""
    return [group for group in topology.groups for _ in range(group.engines)]


def _places(topology: Topology, nodes: int) -> list[_Place]:
    """Lays engines onto nodes, first come first served.

    Raises:
        EngineSetupError: they need more nodes than there are.
    """
    size, places, node, taken = topology.gpus_per_node, list[_Place](), 0, 0
    for group in _each(topology):
        if taken and taken + group.gpus_per_engine > size:
            node, taken = node + 1, 0
        if group.gpus_per_engine <= size:
            places.append(_Place(node, 1, range(taken, taken + group.gpus_per_engine)))
            taken += group.gpus_per_engine
        else:
            whole = group.gpus_per_engine // size
            places.append(_Place(node, whole, range(size)))
            node += whole
    needed = max((place.node + place.nodes for place in places), default=0)
    if needed > nodes:
        raise EngineSetupError(
            f"these engines need {needed} nodes of {size} GPUs each, and {nodes} are known; name their addresses"
        )
    return places


def _extra_ports(group: EngineGroup, topology: Topology) -> int:
    return (group.kind == "prefill") + (group.gpus_per_engine > topology.gpus_per_node)


def _check_device(topology: Topology, environment: EngineEnvironment) -> None:
    """On a CPU an engine is one whole process, without what SGLang writes for GPUs only.

    Raises:
        EngineSetupError: something else is asked for.
    """
    if environment.device != "cpu":
        return
    for group in topology.groups:
        wanted = {
            "more than one GPU per engine": group.gpus_per_engine > 1,
            "prefill and decode apart": group.kind != "regular",
            "a hierarchical cache": group.options.get("enable_hierarchical_cache") is True,
            "deterministic inference": group.options.get("enable_deterministic_inference") is True,
            # It pins host memory with CUDA, which ends an engine on a CPU at its start.
            "the experts of each token": group.options.get("enable_return_routed_experts") is True,
        }
        refused = [name for name, asked in wanted.items() if asked]
        if refused:
            raise EngineSetupError(
                f"SGLang on a CPU has no {refused[0]}; the engines' environment {environment.folder} is for a CPU"
            )


def _url(host: str, port: int) -> str:
    return f"http://{_address(LOOPBACK.get(host, host), port)}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
