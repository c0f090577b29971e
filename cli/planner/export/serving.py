"""`serving-reference.sh`: for whoever runs engines that this plan does not start. Pure.

It starts nothing. It holds the command lines with the options that the service relies on, and tries the routes that it will call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from palestra.cli.engines.commands import engine_commands
from palestra.cli.engines.topology import of_config
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError
from palestra.cli.planner.export.fleet import MODEL, NOT_OURS, engine_section
from palestra.cli.planner.export.types import Export, ExportError, Files
from palestra.cli.planner.export.words import comment, shell, shell_line, var

NEEDS = (
    "What a run asks of engines that it does not start:",
    "- SGLang 0.5.23 with its tokenizer loaded (no --skip-tokenizer-init), and no --api-key: the service calls it without one.",
    "- the same model folder as the run starts from (or the quantised one of weights.engine_model), under any path.",
    "- nobody else's requests and no other run's weights: pause, flush and update are calls to the whole engine.",
    "- a router in front must route by X-SMG-Routing-Key or by prefix, and must not repeat requests (--disable-retries).",
)
PROBES = """\
failed=0
ask() { # what it is, curl's words
  local what=$1
  shift
  if curl -fsS -m 20 -o /dev/null "$@"; then echo "ok    $what"; else echo "FAILS $what"; failed=1; fi
}
body='{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": true}'
for url in "${urls[@]}"; do
  ask "$url answers as an engine" "$url/model_info"
  ask "$url tells the sizes of its caches" "$url/server_info"
  ask "$url samples from ids and gives logprobs" -H 'Content-Type: application/json' -d "$body" "$url/generate"
  if [[ ${CONTROL:-} == yes ]]; then
    ask "$url can be paused" -H 'Content-Type: application/json' -d '{"mode": "retract"}' "$url/pause_generation"
    ask "$url goes on" -H 'Content-Type: application/json' -d '{}' "$url/continue_generation"
  fi
done
"""
ROUTER_PROBES = """\
ask "the router answers" "$router/health"
ask "the router lists its workers" "$router/workers"
"""


def serving_reference(export: Export) -> Files:
    """What the engines of others must be started with, and probes.

    Raises:
        ExportError: the plan starts its engines itself, or they are no SGLang engines.
    """
    case, urls = export.case, tuple(url.rstrip("/") for url in export.case.external_urls)
    if case.input.rollout.engine != "sglang" or (case.mode != "external" and not urls):
        raise ExportError("the plan's engines are started by the run: see engines.sh")
    listed = " ".join(map(shell, urls))
    router = export.report.resolved.get("rollout", {}).get("router_url")
    lines = ["#!/usr/bin/env bash", comment([*export.head, *NEEDS])]
    lines += ["# Commands for the engines, one each; add what else the machines need:", *_commands(export, urls)]
    lines += [
        "",
        "# Probes. CONTROL=yes also pauses each engine for a moment: only where nobody uses them yet.",
        "set -euo pipefail",
    ]
    lines += [
        f"urls=({listed})" if urls else 'read -r -a urls <<<"${URLS:?addresses of the engines, with spaces between}"'
    ]
    lines.append(PROBES.rstrip("\n"))
    if router:
        lines += [f"router={shell(router)}", ROUTER_PROBES.rstrip("\n")]
    lines.append('exit "$failed"')
    return {"serving-reference.sh": "\n".join(lines) + "\n"}


def _commands(export: Export, urls: tuple[str, ...]) -> Iterator[str]:
    """A comment line for each URL: the command that the project's own code makes for such an engine."""
    case = export.case
    section = engine_section(case, export.report.resolved).model_copy(update={"engines": 1, "pd": None})
    # Whatever the run's own machines are: an engine of several GPUs, wherever it stands, is one command here.
    size = max(case.input.rollout.gpus_per_engine, 1)
    section = section.model_copy(update={"gpus_per_engine": size, "device": "cuda"})
    python = EngineEnvironment(Path("."), Path("python"), "cuda")
    for url in urls or ("http://ADDRESS:30000",):
        try:
            parts = urlsplit(url)
            (command,) = engine_commands(
                of_config(section, size),
                Path(var(MODEL)),
                python,
                iter([parts.port or 30_000]),
                hosts=[parts.hostname or "ADDRESS"],
                sglang=export.report.resolved.get("sglang", {}),
            )
        except (EngineSetupError, ValueError) as error:
            yield from comment([f"{url}: no command can be given: {error}"]).splitlines()
            continue
        env = " ".join(
            f"{name}={shell(value)}"
            for name, value in sorted(command.env.items())
            if name.startswith("SGLANG_") and name not in NOT_OURS
        )
        yield from comment([f"{env} {shell_line(command.argv)}".strip()]).splitlines()
