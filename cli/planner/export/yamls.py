"""Plain values as YAML. Pure."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

WIDTH = 120


class _Plain(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
    """Writes equal parts out instead of pointing from one to another."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


def dumped(*documents: Any) -> str:
    """One file: keys in the order in which they came, lists and tables of plain values on one line."""
    return str(yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=WIDTH, default_flow_style=None))
