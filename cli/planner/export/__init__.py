"""A plan as files: the resolved configuration, the report, scripts and manifests that start what was planned. Pure: same plan, same bytes.

Nothing is written here; the caller gets texts by their paths. Each file has the version and the input's digest at its top.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version

from palestra.cli.planner.case import Case
from palestra.cli.planner.export.composing import compose_yaml, env_example, prometheus_yml
from palestra.cli.planner.export.engines import engines_sh, topology_file
from palestra.cli.planner.export.fleet import fleet_of
from palestra.cli.planner.export.jobs import launch_sh, slurm_sh
from palestra.cli.planner.export.manifests import rayjob
from palestra.cli.planner.export.report import plan_json, plan_md, run_toml
from palestra.cli.planner.export.serving import serving_reference
from palestra.cli.planner.export.types import Export, ExportError, Files, Fleet
from palestra.cli.planner.types import PlanReport, Severity

NAMES: Mapping[str, tuple[str, ...]] = {
    "config": ("run.toml", "train.toml"),
    "report": ("plan.json", "plan.schema.json", "PLAN.md"),
    "launch": ("launch.sh",),
    "slurm": ("slurm.sh",),
    "engines": ("engines.sh",),
    "sglang": ("sglang.yaml",),
    "slime-sglang": ("sglang.slime.yaml",),
    "serving": ("serving-reference.sh",),
    "compose": ("compose.yaml", ".env.example"),
    "rayjob": ("rayjob.yaml", "engines.k8s.yaml"),
    "prometheus": ("prometheus.yml",),
}
"""What can be asked for, and its files. A plan may have no use for some of them."""
ASKED_FOR = ("slime-sglang",)
"""Written only where it is asked for by name: another program's dialect of a file that is there already."""
_MAKERS: Mapping[str, Callable[[Export], Files]] = {
    "config": run_toml,
    "launch": launch_sh,
    "slurm": slurm_sh,
    "engines": engines_sh,
    "sglang": lambda export: topology_file(export, "sglang.yaml"),
    "slime-sglang": lambda export: topology_file(export, "sglang.slime.yaml"),
    "serving": serving_reference,
    "compose": lambda export: {**compose_yaml(export), **env_example(export)},
    "rayjob": rayjob,
    "prometheus": prometheus_yml,
}

__all__ = ["NAMES", "ExportError", "export"]


def export(
    report: PlanReport, case: Case | None, *, source: str, only: Collection[str] = (), force: bool = False
) -> dict[str, str]:
    """The files of a plan: path -> text.

    Args:
        report: of the plan.
        case: what it was made from; None where the input could not be read.
        source: the input as it was given, whose digest the files bear.
        only: some of `NAMES`; empty for all that this plan has a use for.
        force: also where the plan has errors; their codes then stand at the top of every file.

    Raises:
        ExportError: the plan has errors, or a name is unknown, or is of a file that this plan cannot have.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ExportError(f"nothing is called {unknown[0]} here; there are {', '.join(NAMES)}")
    errors = sorted({each.code for each in report.of(Severity.ERROR)})
    if case is None:
        raise ExportError(f"the input could not be read ({', '.join(errors)}): there is nothing to export")
    if errors and not force:
        raise ExportError(
            f"the plan has errors ({', '.join(errors)}): mend them, or force the export, which then names them"
        )
    made = _of(report, case, source, errors)
    found: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, make in _MAKERS.items():
        if name not in (only or set(NAMES).difference(ASKED_FOR)):
            continue
        try:
            found |= make(made)
        except ExportError as error:
            if only:
                raise ExportError(f"{NAMES[name][0]}: {error}") from None
            left_out[NAMES[name][0]] = str(error)
    if not only or "report" in only:
        found |= {**plan_json(made), **plan_md(made, left_out)}
    return dict(sorted(found.items()))


def _of(report: PlanReport, case: Case, source: str, errors: list[str]) -> Export:
    digest = hashlib.sha256(source.encode()).hexdigest()
    head = [f"palestra {version('palestra')}, planned from an input with sha256 {digest}"]
    if errors:
        head.append(f"This plan has errors: {', '.join(errors)}. It will not run as it is.")
    fleet: Fleet | None = None
    why = ""
    try:
        fleet = fleet_of(case, report.resolved)
    except ExportError as error:
        why = str(error)
    return Export(report, case, tuple(head), fleet, why)
