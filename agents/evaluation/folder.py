"""Begins an evaluation in a folder, or goes on with the one that is there.

A header goes in; the folder's one writer, its rows and the header in force come out. Waits for the disk only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from palestra.agents.evaluation.plan import differences, plan_tasks, task_set_hash
from palestra.agents.evaluation.provenance import provenance
from palestra.agents.evaluation.records import (
    RowLog,
    has_header,
    latest,
    read_header,
    read_rows,
    write_header,
)
from palestra.agents.evaluation.run import now
from palestra.agents.evaluation.types import EvalError, EvalSpec, Header, Key, Row
from palestra.envs.tasks import TaskSource


@dataclass(frozen=True, slots=True)
class Opened:
    """A folder that is being written."""

    header: Header
    log: RowLog
    rows: dict[Key, Row]
    """What it holds already."""


def header_of(spec: EvalSpec, source: TaskSource) -> Header:
    """The header of a fresh evaluation.

    Raises:
        EvalError, TaskError, EnvError: the tasks cannot be planned, or the environment is not there.
    """
    tasks = plan_tasks(source, spec)
    return Header(replace(spec, n=len(tasks)), tasks, task_set_hash(tasks), provenance(spec.env), now())


def open_folder(folder: Path, header: Header, *, resume: bool = False, allow_changed: bool = False) -> Opened:
    """Takes the folder. With `resume` an evaluation that was begun there is gone on with, and an empty folder begun.

    Raises:
        EvalError: it is being written, holds an evaluation already, or one that differs: says in what.
    """
    log = RowLog(folder)
    try:
        return Opened(_settled(folder, header, resume, allow_changed), log, latest(read_rows(folder)))
    except BaseException:
        log.close()
        raise


def _settled(folder: Path, header: Header, resume: bool, allow_changed: bool) -> Header:
    """The header in force, written."""
    rows = read_rows(folder)
    if not rows or not has_header(folder):  # without rows there is nothing that another evaluation could be mixed with
        if rows:
            raise EvalError(f"{folder} has episodes but no run.json, so nobody knows of what; choose another --out")
        write_header(folder, header)
        return header
    if not resume:
        raise EvalError(f"{folder} has an evaluation already: go on with --resume, or choose another --out")
    old = read_header(folder)
    if old.rescored_from is not None:
        raise EvalError(f"{folder} was rescored from {old.rescored_from}; resume that one and rescore it again")
    changed = differences(old, header)
    if changed and not allow_changed:
        raise EvalError(
            f"{folder} cannot go on with other {'; '.join(changed)}. "
            "Ask for the same, choose another --out, or mix them by --allow-changed"
        )
    changes = (*old.changes, {"at": now(), "differences": changed}) if changed else old.changes
    header = replace(header, created=old.created, changes=changes)
    write_header(folder, header)
    return header
