"""What a judge says, read strictly, and kept on disk.

A reply of a chat completion goes in, a `Verdict` comes out. Nothing is repaired: a text that is not wholly of the form is a fault.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "correct": {"type": "boolean"}},
    "required": ["reason", "correct"],
    "additionalProperties": False,
}
"""The reason first: a verdict that follows its reason is a better one."""


class VerdictError(Exception):
    """A reply that is no verdict: a fault of the judge. Shows what came."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of one answer."""

    reason: str
    correct: bool


def read_verdict(reply: Mapping[str, Any]) -> Verdict:
    """The verdict in a chat completion.

    Raises:
        VerdictError: it was cut, or its text is not one JSON object of the form `SCHEMA`.
    """
    try:
        choice = reply["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError) as error:
        raise VerdictError(f"the reply is no chat completion: {str(reply)[:200]}") from error
    if finish != "stop":
        raise VerdictError(f"its reply ended by {finish!r}, not by itself")
    if not isinstance(text, str):
        raise VerdictError(f"its reply has no text: {str(choice)[:200]}")
    return verdict_of(text)


def verdict_of(text: str) -> Verdict:
    """The verdict that a text is.

    Raises:
        VerdictError: it is not one JSON object of the form `SCHEMA`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise VerdictError(f"its reply is no verdict: {text[:200]!r}") from error
    if not isinstance(value, dict) or value.keys() != {"reason", "correct"}:
        raise VerdictError(f"its reply is no verdict: {text[:200]!r}")
    if not isinstance(value["correct"], bool) or not isinstance(value["reason"], str):
        raise VerdictError(f"its reply is no verdict: {text[:200]!r}")
    return Verdict(value["reason"], value["correct"])


class Verdicts:
    """A folder of verdicts, a file each, by a digest of everything that decided it. Any number of processes share one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: Mapping[str, Any]) -> Verdict | None:
        """The verdict that was kept under `key`. A file that cannot be read counts as none, and is on record."""
        path = self._path(key)
        try:
            return verdict_of(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, VerdictError) as error:
            logger.warning("the verdict %s cannot be read, and is asked for again: %s", path, error)
            return None

    def keep(self, key: Mapping[str, Any], verdict: Verdict) -> None:
        """Writes a verdict; a reader sees the whole file or none. One that cannot be written is on record, and still a verdict."""
        path = self._path(key)
        beside = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(asdict(verdict), ensure_ascii=False), encoding="utf-8", errors="replace")
            beside.replace(path)
        except OSError as error:
            logger.warning("the verdict %s cannot be kept: %s", path, error)

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two verdicts neither counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key comes twice")
    return value
