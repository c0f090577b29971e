"""`engines.sh`, and topology files in our form and in slime's. Pure.

`engines.sh` runs on every machine that has engines, each time as another NODE_RANK: it starts that machine's own, and on the first one
also the router, when all answer. What it started ends with it.
"""

from __future__ import annotations

from typing import Any

from palestra.cli.engines.types import EngineCommand
from palestra.cli.planner.export.fleet import ENGINE_ENV, MODEL, ROUTER
from palestra.cli.planner.export.types import Export, ExportError, Files, Fleet
from palestra.cli.planner.export.words import comment, shell, shell_line, variables
from palestra.cli.planner.export.yamls import dumped

FIND_ROUTER = 'import palestra.cli.engines.environment as e; print(e.STANDINS / "router_main.py")'
"""For a Python that has palestra: the script that starts sglang-router from its own arguments."""
FORMS = {
    "sglang.yaml": ("models", "groups", "kind", "gpus", "gpus_per_engine"),
    "sglang.slime.yaml": ("sglang", "server_groups", "worker_type", "num_gpus", "num_gpus_per_engine"),
}
"""File -> its keys: of the models, of a model's groups, of a group's kind, GPUs and GPUs of an engine."""

SCRIPT_HEAD = """\
set -euo pipefail
: "${{MODEL:?folder of the model, in Hugging Face form, under this name on every machine with engines}}"
: "${{ENGINE_ENV:?the Python environment of the engines, made by: palestra engine install --{device}}}"
{nodes}
NODE_RANK=${{NODE_RANK:-${{SLURM_NODEID:-0}}}} LOGS=${{LOGS:-logs}} DEADLINE=$((SECONDS + ${{DEADLINE_S:-1800}}))
mkdir -p "$LOGS"
pids=()
stop() {{
  trap - EXIT
  if ((${{#pids[@]}})); then kill "${{pids[@]}}" 2>/dev/null || true; fi
  wait
}}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
alive() {{
  for pid in "${{pids[@]}}"; do
    kill -0 "$pid" 2>/dev/null || {{ echo "one of the processes started here has ended: see $LOGS" >&2; exit 1; }}
  done
}}
start() {{ # node, name, GPUs, command: starts it where its node is this one
  [[ $1 == "$NODE_RANK" ]] || return 0
  local name=$2 gpus=$3
  shift 3
  env {env} \\
    CUDA_VISIBLE_DEVICES="$gpus" {own} "$@" >"$LOGS/$name.log" 2>&1 &
  pids+=($!)
}}
answers() {{ # URL: waits until an engine is ready, one of ours has ended, or the deadline
  until curl -fsS -m 5 -o /dev/null "$1/model_info" 2>/dev/null; do
    alive
    ((SECONDS < DEADLINE)) || {{ echo "$1 did not answer in time: see $LOGS" >&2; exit 1; }}
    sleep 2
  done
}}
"""


def engines_sh(export: Export) -> Files:
    """One line per engine and machine, then the router.

    Raises:
        ExportError: there are no engines to start.
    """
    fleet = fleet_in(export)
    device = "cpu" if export.case.on_cpu else "cuda"
    own = 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"' if export.case.on_cpu else 'PATH="$ENGINE_ENV/bin:$PATH"'
    env = " ".join(f"{name}={shell(value)}" for name, value in sorted(_env(fleet).items()))
    shapes = ", ".join(
        f"{group.engines} {group.kind} of {group.gpus_per_engine} GPUs" for group in fleet.topology.groups
    )
    if export.case.on_cpu:
        shapes = f"{len(fleet.urls)} on the CPU"
    about = [f"Engines: {shapes}{', and their router' if fleet.router else ''}; logs in $LOGS.", *_where(export, fleet)]
    if export.case.colocated:
        about.append(
            "Training has the same GPUs by turns, and a run starts its engines itself: this starts them without one, to try or to serve."
        )
    head = SCRIPT_HEAD.format(device=device, nodes=name_nodes(fleet.nodes), env=env, own=own)
    lines = ["#!/usr/bin/env bash", comment([*export.head, *about, *fleet.notes]) + head]
    lines += [_start(each) for each in fleet.commands]
    lines += [f'((${{#pids[@]}})) || {{ echo "NODE_RANK must be 0 to {fleet.nodes - 1}" >&2; exit 2; }}']
    lines += ["", "if [[ $NODE_RANK == 0 ]]; then", *(f"  answers {shell(url)}" for url in fleet.urls)]
    if fleet.router is not None:
        if ROUTER in variables(fleet.router.argv):
            lines.append(f'  ROUTER=$("${{PALESTRA_PYTHON:-python3}}" -c {shell(FIND_ROUTER)})')
        lines.append(f"  {_start(fleet.router)}")
    lines += [
        f"  echo {shell(f'ready: {len(fleet.urls)} engines')}",
        "fi",
        "# Whatever ends first ends all of this machine.",
        "wait -n || true",
    ]
    lines += ["alive"]
    return {"engines.sh": "\n".join(lines) + "\n"}


def topology_file(export: Export, path: str) -> Files:
    """The engines as a topology file, which `palestra engine serve --topology` and `rollout.topology` read.

    Raises:
        ExportError: there are no engines to start.
    """
    models, groups, kind, gpus, each = FORMS[path]
    listed: list[dict[str, Any]] = [
        {
            kind: str(group.kind),
            gpus: group.engines * group.gpus_per_engine,
            each: group.gpus_per_engine,
            "overrides": dict(group.options),
        }
        for group in fleet_in(export).topology.groups
    ]
    model = {"name": "policy", "update_weights": True, groups: listed}
    text = dumped({models: [model]})
    return {path: comment(export.head) + text}


def fleet_in(export: Export) -> Fleet:
    """The engines of an export.

    Raises:
        ExportError: there are none.
    """
    if export.fleet is None:
        raise ExportError(export.no_fleet)
    return export.fleet


def name_nodes(nodes: int) -> str:
    """Shell lines that set NODE_0 and so on from the words of NODES; one machine needs none."""
    if nodes == 1:
        return "NODE_0=${NODES:-127.0.0.1}"
    names = " ".join(f"NODE_{node}=${{nodes[{node}]}}" for node in range(nodes))
    return (
        f': "${{NODES:?addresses of the {nodes} machines with engines, with spaces between}}"\n'
        f'read -r -a nodes <<<"$NODES"\n'
        f'((${{#nodes[@]}} == {nodes})) || {{ echo "NODES must name {nodes} machines" >&2; exit 2; }}\n{names}'
    )


def _where(export: Export, fleet: Fleet) -> tuple[str, ...]:
    if fleet.nodes == 1:
        return ("Needs the GPUs of one machine." if not export.case.on_cpu else "Needs one machine.",)
    last = fleet.nodes - 1
    return (
        f"Run it on each of {fleet.nodes} machines with the same NODES and with NODE_RANK 0 to {last} (Slurm: one task a node does).",
    )


def _env(fleet: Fleet) -> dict[str, str]:
    """What all engines are told alike."""
    return {name: value for name, value in fleet.commands[0].env.items() if name != "CUDA_VISIBLE_DEVICES"}


def _start(command: EngineCommand) -> str:
    gpus = command.env.get("CUDA_VISIBLE_DEVICES", "")
    return f"start {command.node} {shell(command.name)} {shell(gpus)} {shell_line(command.argv)}"


__all__ = ["ENGINE_ENV", "MODEL", "engines_sh", "fleet_in", "name_nodes", "topology_file"]
