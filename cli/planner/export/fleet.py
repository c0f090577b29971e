"""The engines of a plan as command lines: the same code makes them that `palestra train` and `palestra engine serve` start engines with.

In: a case and the resolved tables. Out: a `Fleet`, whose words hold variables where only the machine knows the value. Starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from palestra.cli.engines.commands import SMG, engine_commands, ports_needed, router_command
from palestra.cli.engines.options import argv_of
from palestra.cli.engines.topology import of_config
from palestra.cli.engines.types import EngineCommand, EngineEnvironment, EngineSetupError, Topology
from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import mem_fraction, weight_dtype
from palestra.cli.planner.export.types import ExportError, Fleet
from palestra.cli.planner.export.words import var
from palestra.server.config import EngineSection

FIRST_PORT = 30_000
"""Of the engines; below the range that kernels give to outgoing connections."""
ROUTER_PORT, ROUTER_FIGURES_PORT = 29_900, 29_901
NOT_OURS = ("PATH", "OMP_NUM_THREADS")
"""Variables whose values an engine takes over from this machine: a script takes them over from its own."""
MODEL, ENGINE_ENV, ROUTER = "MODEL", "ENGINE_ENV", "ROUTER"


def fleet_of(case: Case, resolved: Mapping[str, Any]) -> Fleet:
    """The processes of a plan's engines.

    Raises:
        ExportError: there are none to start, or they cannot be as they are described; the message says why.
    """
    rollout = case.input.rollout
    if case.mode == "external" or case.external_urls:
        raise ExportError("the engines are run by others: see serving-reference.sh")
    if rollout.engine != "sglang":
        raise ExportError(f"rollout.engine is {rollout.engine}: there are no SGLang engines")
    section = engine_section(case, resolved)
    try:
        topology = of_config(section, _node_size(case))
        environment = EngineEnvironment(
            Path(var(ENGINE_ENV)), Path(var(ENGINE_ENV)) / "bin" / "python", "cpu" if case.on_cpu else "cuda"
        )
        ports = [port for port, _ in zip(count(FIRST_PORT), range(ports_needed(topology)), strict=False)]
        extra, notes = _beside(case)
        commands = engine_commands(
            topology,
            Path(var(MODEL)),
            environment,
            iter(ports),
            hosts=[var(f"NODE_{node}") for node in range(_most_nodes(topology))],
            sglang={**extra, **resolved.get("sglang", {})},
        )
        router = _router(commands, environment, rollout.router, rollout.router_policy, resolved.get("router", {}))
    except EngineSetupError as error:
        raise ExportError(f"the engines cannot be as they are described: {error}") from None
    needed = 1 + max(command.node for command in commands)
    first = 0 if case.colocated or case.on_cpu else _first_node(case, needed)
    return Fleet(topology, tuple(map(_own_env, commands)), router, first, needed, notes)


def engine_section(case: Case, resolved: Mapping[str, Any]) -> EngineSection:
    """`[rollout]` as a run has it, of what a plan says. Not validated again: rules have looked at it already."""
    given = case.input.rollout
    said = resolved.get("rollout", {})
    values: dict[str, Any] = {name: said[name] for name in EngineSection.model_fields if name in said}
    linear = bool(case.model.linear_layers)
    pd = given.pd
    values |= {
        "engine": "sglang",
        "urls": [],
        "topology": None,
        "router_url": None,
        "device": "cpu" if case.on_cpu else "cuda",
        "pd": pd,
        # Where prefill and decode are apart, each says by itself how many there are.
        "engines": 1 if pd is not None or not case.engines else case.engines[-1].count,
        "gpus_per_engine": 1 if pd is not None or case.on_cpu else given.gpus_per_engine,
        "mem_fraction": given.mem_fraction if case.on_cpu else mem_fraction(case),
        "weight_dtype": weight_dtype(case),
        "kv_dtype": "auto" if given.kv_dtype == "fp32" else given.kv_dtype,
        "ssm_dtype": given.ssm_dtype if linear else "default",
        "conv_dtype": given.conv_dtype if linear else "bf16",
        "state_ratio": given.state_ratio if linear and given.state_slots_pin is None else None,
        "state_slots_pin": given.state_slots_pin if linear else None,
        "state_strategy": given.state_strategy if linear and given.state_strategy != "no_radix" else None,
        "prefix_cache": given.prefix_cache and given.state_strategy != "no_radix",
        "deterministic": case.deterministic_engine,
        "routed_experts": case.input.train.router_replay == "rollout",
    }
    return EngineSection.model_construct(**values)


def _beside(case: Case) -> tuple[dict[str, object], tuple[str, ...]]:
    """Options of SGLang that follow from the plan and have no field of a run, and what has no option at all."""
    options: dict[str, object] = {}
    notes = []
    if case.memory_saver and not case.on_cpu:
        options["enable_memory_saver"] = True
    if case.input.rollout.draft_tokens:
        notes.append(
            "rollout.draft_tokens: which algorithm drafts is the model's matter; add its --speculative options"
        )
    if weight_dtype(case) in ("fp8", "int4"):
        notes.append(f"rollout.weight_dtype is {weight_dtype(case)}: MODEL must be a folder that is quantised so")
    return options, tuple(notes)


def _node_size(case: Case) -> int:
    """GPUs of a node; without GPUs all engines are on one."""
    if case.on_cpu:
        return max(1, case.engines[-1].count if case.engines else 1)
    return case.input.hardware.gpus_per_node


def _most_nodes(topology: Topology) -> int:
    """No fewer nodes than engines can be laid onto; how many they take, their commands say."""
    size = topology.gpus_per_node
    return sum(group.engines * -(-group.gpus_per_engine // size) for group in topology.groups)


def _first_node(case: Case, needed: int) -> int:
    """Training has the first nodes where it fills them, and engines those after; else engines begin on the first, from its GPU 0 on."""
    size = case.input.hardware.gpus_per_node
    training = case.train_gpus + case.reference_gpus
    return training // size if training % size == 0 and training // size + needed <= case.input.hardware.nodes else 0


def _router(
    commands: list[EngineCommand], environment: EngineEnvironment, kind: str, policy: str, table: Mapping[str, Any]
) -> EngineCommand | None:
    """The router in front of several engines, and of any prefill and decode engines."""
    if kind == "none" or (sum(bool(each.url) for each in commands) < 2):
        return None
    made = router_command(
        commands,
        environment,
        port=ROUTER_PORT,
        prometheus_port=ROUTER_FIGURES_PORT,
        host=var("NODE_0"),
        policy=policy,
        router=table,
    )
    arguments: dict[str, Any] = json.loads(made.argv[2])
    # Not escaped: variables must be found again.
    words = _smg(arguments, table) if kind == "smg" else (var(ROUTER), json.dumps(arguments, ensure_ascii=False))
    return replace(_own_env(made), argv=(made.argv[0], *words))


def _smg(arguments: dict[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    """The same router as smg is told it: engines are words of their own there."""
    prefill, decode = arguments.pop("prefill_urls", []), arguments.pop("decode_urls", [])
    workers = arguments.pop("worker_urls", [])
    arguments.pop("pd_disaggregation", None)
    yield from ("-m", "smg.launch_router", *argv_of({**SMG, **arguments, **table}))
    if not decode:
        yield from ("--worker-urls", *workers)
        return
    yield "--pd-disaggregation"
    for url, bootstrap in prefill:
        yield from ("--prefill", url, str(bootstrap))
    for url in decode:
        yield from ("--decode", url)


def _own_env(command: EngineCommand) -> EngineCommand:
    return replace(command, env={name: value for name, value in command.env.items() if name not in NOT_OURS})
