"""JSON for the store: any message becomes bytes, and the bytes become the message again.

A turn must not be lost because its text holds a lone surrogate or a number beyond 64 bits, which the fast encoder
refuses: those go through the standard library. Nothing is waited for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import orjson


def _plain(value: Any) -> Any:
    """What JSON has no word for: mappings and dataclasses by content, the rest by its repr, for the reader."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return repr(value)


def dumps(value: Any) -> bytes:
    """UTF-8 JSON of `value`."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, UnicodeEncodeError):
        return json.dumps(value, default=_plain, ensure_ascii=True).encode()


def loads(data: bytes) -> Any:
    """The value that `dumps` wrote."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
