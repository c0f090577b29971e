"""`launch.sh` (Ray over ssh) and `slurm.sh`: the whole plan as a job. Pure.

Either ends only what it started, waits with a deadline and says for whom.
"""

from __future__ import annotations

import json

from palestra.cli.planner.export.training import train_env, train_words, wall_clock_s
from palestra.cli.planner.export.types import Export, Files
from palestra.cli.planner.export.words import comment, shell, shell_line, variables

RAY_PORT, RAY_DASHBOARD_PORT = 6379, 8265
CLUSTER_GPUS = (
    'import ray; ray.init(address="auto", log_to_driver=False); print(int(ray.cluster_resources().get("GPU", 0)))'
)

ANSWERS = """\
answers() { # URL: waits until an engine is ready
  until curl -fsS -m 5 -o /dev/null "$1/model_info" 2>/dev/null; do
    ((SECONDS < deadline)) || { echo "the engine $1 did not answer in time" >&2; exit 1; }
    sleep 2
  done
}
"""

RAY_OVER_SSH = """\
on() {{ # machine, command
  local node=$1
  shift
  if [[ $node == 127.0.0.1 || $node == localhost ]]; then "$@"; else ssh "$node" "$(printf '%q ' "$@")"; fi
}}
# Where no Ray ran before, stopping Ray ends only what was started here.
for node in "${{nodes[@]}}"; do
  if on "$node" pgrep -u "$(id -un)" -x raylet >/dev/null; then
    echo "Ray runs on $node already: submit the job there, or stop it first" >&2
    exit 1
  fi
done
started=()
cleanup() {{ for node in "${{started[@]}}"; do on "$node" ray stop || true; done; }}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
head=${{nodes[0]}}
started+=("$head")
on "$head" ray start --head --node-ip-address="$head" --port={port} --num-gpus={gpus} --disable-usage-stats
for node in "${{nodes[@]:1}}"; do
  started+=("$node")
  on "$node" ray start --address="$head:{port}" --num-gpus={gpus} --disable-usage-stats
done
have=0
until have=$(on "$head" python3 -c {count} 2>/dev/null) && ((${{have:-0}} >= {need})); do
  ((SECONDS < deadline)) || {{ echo "Ray has ${{have:-0}} of {need} GPUs, and others did not come in time" >&2; exit 1; }}
  sleep 5
done
"""

RAY_UNDER_SLURM = """\
step() {{ # machine, command: a step of this job, ended with it
  local node=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@" &
  pids+=($!)
}}
head=${{nodes[0]}}
export RAY_ADDRESS="$head:{port}"
step "$head" ray start --head --node-ip-address="$head" --port={port} --num-gpus={gpus} --disable-usage-stats --block
for node in "${{nodes[@]:1}}"; do
  step "$node" ray start --address="$head:{port}" --num-gpus={gpus} --disable-usage-stats --block
done
have=0
until have=$(python3 -c {count} 2>/dev/null) && ((${{have:-0}} >= {need})); do
  ((SECONDS < deadline)) || {{ echo "Ray has ${{have:-0}} of {need} GPUs, and others did not come in time" >&2; exit 1; }}
  sleep 5
done
"""

SLURM_HEAD = """\
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${{#nodes[@]}} == {nodes})) || {{ echo "the plan needs {nodes} machines, the job has ${{#nodes[@]}}" >&2; exit 2; }}
deadline=$((SECONDS + ${{DEADLINE_S:-1800}}))
pids=()
stop() {{
  trap - EXIT
  if ((${{#pids[@]}})); then kill "${{pids[@]}}" 2>/dev/null || true; fi
  wait
}}
trap stop EXIT
trap 'exit 143' TERM INT
"""


def launch_sh(export: Export) -> Files:
    """Ray on the machines of $NODES, then the run as a Ray job; without GPUs the run itself."""
    words = train_words(export)
    lines = ["#!/usr/bin/env bash", comment([*export.head, *_about(export)]) + "set -euo pipefail"]
    lines += _wants(words)
    if export.gpus or export.apart:
        lines.append("deadline=$((SECONDS + ${DEADLINE_S:-1800}))")
    if not export.gpus:
        lines += [*_engine_nodes(export), *_engines_answer(export), *_exports(export), f"exec {shell_line(words)}"]
        return {"launch.sh": "\n".join(lines) + "\n"}
    lines += [_nodes_of_words(export.nodes), *_engine_nodes(export)]
    ray = RAY_OVER_SSH.format(port=RAY_PORT, gpus=export.node_gpus, need=export.gpus, count=shell(CLUSTER_GPUS))
    lines += [ray.rstrip("\n"), *_engines_answer(export)]
    env = json.dumps({"env_vars": train_env(export)}, separators=(",", ":"))
    lines += [
        f'on "$head" ray job submit --address http://127.0.0.1:{RAY_DASHBOARD_PORT} --working-dir . \\',
        f"  --runtime-env-json {shell(env)} -- {shell_line(words)}",
    ]
    return {"launch.sh": "\n".join(lines) + "\n"}


def slurm_sh(export: Export) -> Files:
    """One sbatch job: Ray, the engines where they stand apart, and the run on the first machine."""
    words = train_words(export)
    seconds = wall_clock_s(export)
    asked = ["--job-name=palestra", f"--nodes={export.nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0"]
    asked += [f"--gpus-per-node={export.node_gpus}"] if export.gpus else []
    asked += [f"--time={-(-seconds // 60)}"] if seconds is not None else []
    asked += ["--output=palestra-%j.log", "--signal=B:TERM@120"]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {each}" for each in asked)]
    lines.append(
        comment([*export.head, "sbatch slurm.sh, in this folder, on a file system that all machines see."]).rstrip("\n")
    )
    lines += [SLURM_HEAD.format(nodes=export.nodes).rstrip("\n"), *_wants(words, engines=export.apart)]
    ray = RAY_UNDER_SLURM.format(port=RAY_PORT, gpus=export.node_gpus, need=export.gpus, count=shell(CLUSTER_GPUS))
    if export.gpus:
        lines.append(ray.rstrip("\n"))
    if export.fleet is not None and export.apart:
        lines += [*_engine_nodes(export), *_slurm_engines(export), *_engines_answer(export)]
    lines += [*_exports(export), f"{shell_line(words)} &", "training=$!", 'pids+=("$training")', 'wait "$training"']
    return {"slurm.sh": "\n".join(lines) + "\n"}


def _about(export: Export) -> list[str]:
    if not export.gpus:
        return ["Runs the plan on this machine."]
    told = f"Starts Ray on the {export.nodes} machines of $NODES" if export.nodes > 1 else "Starts Ray on this machine"
    lines = [f"{told}, waits for {export.gpus} GPUs and submits the run. Ends only the Ray that it started."]
    if export.fleet is not None and export.apart:
        first, last = export.fleet.first_node, export.fleet.first_node + export.fleet.nodes - 1
        where = f"machine {first}" if first == last else f"machines {first} to {last}"
        lines.append(
            f"engines.sh starts the engines, on {where} of $NODES (counted from 0): run it there first; this waits for them."
        )
    return lines


def _wants(words: tuple[str, ...], engines: bool = False) -> list[str]:
    """Lines that refuse to begin without what the command needs."""
    lines = (
        ['export MODEL="${MODEL:?folder of the model, in Hugging Face form}"']
        if "MODEL" in variables(words) or engines
        else []
    )
    if engines:
        lines.append('export ENGINE_ENV="${ENGINE_ENV:?the Python environment of the engines}"')
    return lines


def _nodes_of_words(nodes: int) -> str:
    if nodes == 1:
        return 'read -r -a nodes <<<"${NODES:-127.0.0.1}"'
    return (
        f': "${{NODES:?addresses of {nodes} machines, with spaces between; the first is the head}}"\n'
        'read -r -a nodes <<<"$NODES"\n'
        f'((${{#nodes[@]}} == {nodes})) || {{ echo "NODES must name {nodes} machines" >&2; exit 2; }}'
    )


def _engine_nodes(export: Export) -> list[str]:
    """NODE_0 and so on: the machines with engines, as their command lines name them."""
    if export.fleet is None or not export.apart:
        return []
    if not export.gpus:
        return ["NODE_0=127.0.0.1"]
    first = export.fleet.first_node
    return [f"NODE_{node}=${{nodes[{first + node}]}}" for node in range(export.fleet.nodes)]


def _slurm_engines(export: Export) -> list[str]:
    if export.fleet is None:
        return []
    first, nodes = export.fleet.first_node, export.fleet.nodes
    if not export.gpus:
        return ["NODES=$NODE_0 NODE_RANK=0 bash engines.sh &", "pids+=($!)"]
    return [
        f'engine_nodes="${{nodes[*]:{first}:{nodes}}}"',
        f"for rank in {{0..{nodes - 1}}}; do",
        f'  step "${{nodes[{first} + rank]}}" env NODES="$engine_nodes" NODE_RANK="$rank" bash engines.sh',
        "done",
    ]


def _engines_answer(export: Export) -> list[str]:
    if export.fleet is None or not export.apart:
        return []
    return [ANSWERS.rstrip("\n"), *(f"answers {shell(url)}" for url in export.fleet.urls)]


def _exports(export: Export) -> list[str]:
    return [f"export {name}={shell(value)}" for name, value in train_env(export).items()]
