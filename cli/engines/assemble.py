"""From `[rollout]` to processes: which commands make the engines and the router that a configuration asks for.

In: the section, the model's folder, the tables `[sglang]` and `[router]`, addresses. Out: an `Assembly` for `fleet.py`, everything checked
before anything starts. Looks into the engines' environment; starts nothing and waits for nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.cli.engines.commands import RouterKind, engine_commands, ports_needed, router_command
from palestra.cli.engines.environment import find
from palestra.cli.engines.options import check, known
from palestra.cli.engines.ports import free_ports, is_free
from palestra.cli.engines.topology import of_config
from palestra.cli.engines.types import EngineCommand, EngineEnvironment, EngineSetupError
from palestra.cli.sections import check_passed
from palestra.server.config import EngineSection

HERE = "127.0.0.1"
DAY_S = 86_400.0
"""How long a router goes on trying a worker that does not answer: an engine that dies is started again on its address."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the processes listen."""

    host: str = HERE
    """Of the router, and of all engines of this machine."""
    port: int = 0
    """Of the router, or of the only engine; 0: a free one."""
    others: Sequence[str] = ()
    """Addresses of further machines, for engines that do not fit on this one."""
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True)
class Assembly:
    """What is to be started."""

    engines: tuple[EngineCommand, ...] = ()
    router: EngineCommand | None = None
    external: tuple[str, ...] = ()
    """Engines of others that the router has too."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the engines that are started compute on."""


def assemble(
    rollout: EngineSection,
    model: Path,
    sglang: Mapping[str, object],
    router: Mapping[str, object],
    places: Places | None = None,
) -> Assembly:
    """The processes of a run's engines.

    Raises:
        EngineSetupError: the environment, an option, the topology or a port is not as it must be.
    """
    places = places or Places()
    try:
        check_passed(rollout, sglang, router)
    except ValueError as error:
        raise EngineSetupError(str(error)) from None
    urls = tuple(url.rstrip("/") for url in rollout.urls)
    if urls:
        return _in_front(rollout, urls, router, places)
    check_precision(rollout, model)
    environment = find(rollout.environment, rollout.device)
    fields = known(environment, "sglang")
    check(sglang, "sglang", fields)
    topology = of_config(rollout, places.gpus_per_node)
    ports = free_ports(places.host, ports_needed(topology), {places.port})
    if not rollout.routed:
        ports[0] = _port(places) or ports[0]
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    engines = engine_commands(
        topology,
        model,
        environment,
        iter(ports),
        hosts=(places.host, *places.others),
        visible=visible,
        sglang=sglang,
        fields=fields,
    )
    in_front = _router(rollout, engines, (), environment, router, places, ports) if rollout.routed else None
    return Assembly(tuple(engines), in_front, (), environment.device)


def check_precision(rollout: EngineSection, model: Path) -> None:
    """Holds `rollout.weight_dtype` to what the folder has: quantised weights stay what they are, and others are not quantised by an engine.

    Raises:
        EngineSetupError: the two differ.
    """
    try:
        quantised = "quantization_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # a folder that cannot be read is the engine's to refuse, with the reason
    if rollout.weight_dtype == "fp8" and not quantised:
        raise EngineSetupError(
            f'rollout.weight_dtype = "fp8", and {model} is not quantised: make a folder with `palestra convert` and name it as '
            "weights.engine_model (of a service: model.path)"
        )
    if rollout.weight_dtype in ("bf16", "fp32") and quantised:
        raise EngineSetupError(
            f'rollout.weight_dtype = "{rollout.weight_dtype}", and {model} is quantised: leave it out'
        )


def _in_front(rollout: EngineSection, urls: tuple[str, ...], router: Mapping[str, object], places: Places) -> Assembly:
    """Engines that others run: at most a router of ours in front of them."""
    if rollout.router_url is not None or not rollout.routed:
        return Assembly(external=urls)
    environment = find(rollout.environment, rollout.device)
    return Assembly((), _router(rollout, (), urls, environment, router, places, ()), urls)


def _router(
    rollout: EngineSection,
    engines: Sequence[EngineCommand],
    external: Sequence[str],
    environment: EngineEnvironment,
    table: Mapping[str, object],
    places: Places,
    taken: Sequence[int],
) -> EngineCommand:
    kind: RouterKind = "smg" if rollout.router == "smg" else "sglang-router"
    fields = known(environment, kind)
    check(table, kind, fields)
    (port,) = [_port(places)] if places.port else free_ports(places.host, 1, taken)
    (figures,) = free_ports(HERE, 1, {*taken, port})
    return router_command(
        engines,
        environment,
        port=port,
        prometheus_port=figures,
        kind=kind,
        host=places.host,
        policy=rollout.router_policy,
        startup_s=DAY_S,
        external=external,
        router=table,
        fields=fields,
    )


def _port(places: Places) -> int:
    """The port that was asked for; 0 where none was."""
    if places.port and not is_free(places.host, places.port):
        raise EngineSetupError(f"port {places.port} of {places.host} is taken; choose another")
    return places.port
