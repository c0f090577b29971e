"""Tables as TOML. Pure.

In: plain values by table, nested tables among them. Out: text that `tomllib` reads back as the same values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(tables: Mapping[str, Any]) -> str:
    """A whole file: values first, then a section per table, inner tables after what their table holds itself."""
    lines = list(_lines(tables, ()))
    return "\n".join(lines).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    held = {key: value for key, value in table.items() if value is not None}
    inner = {key: value for key, value in held.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in held.items() if key not in inner}
    if path and (plain or not inner):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        yield from _lines(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _float(value)
    return str(value) if isinstance(value, int) else _text(str(value))


def _float(value: float) -> str:
    """Python's own shortest form, which TOML has too: `inf`, `nan`, and a point or an exponent in any other."""
    return repr(value)


def _text(value: str) -> str:
    # JSON leaves DEL as it is, which TOML does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
