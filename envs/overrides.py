"""Words of a command line that set a value: `table.key=value`.

A word goes in, a nested dict is changed. Nothing is waited for.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Any


def read_value(text: str) -> Any:
    """A value as TOML writes it, or JSON; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def apply_override(data: dict[str, Any], word: str, form: str = "write table.key=value") -> None:
    """Sets what `table.key=value` says; each dot more names a key inside of the one before. `form`: what a message about another form says.

    Raises:
        ValueError: the word is of another form, or names a key inside of what is no table.
    """
    path, equals, text = word.partition("=")
    parts = path.split(".")
    if not equals or len(parts) < 2 or not all(parts) or any(letter.isspace() for letter in path):
        raise ValueError(f"{word}: {form}")
    at = data
    for part in parts[:-1]:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ValueError(f"{word}: {part} is not a table")
    at[parts[-1]] = read_value(text)


def read_settings(words: Iterable[str], tables: tuple[str, ...] = ("args",)) -> dict[str, dict[str, Any]]:
    """What the words of `--set` say, by table: `args.NAME=VALUE` is an argument of an environment.

    Raises:
        ValueError: a word is of another form, or names another table.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in tables}
    form = f"write {' or '.join(f'{name}.NAME=VALUE' for name in tables)}"
    for word in words:
        if word.partition("=")[0].partition(".")[0] not in tables:
            raise ValueError(f"--set {word}: {form}")
        try:
            apply_override(found, word, form)
        except ValueError as error:
            raise ValueError(f"--set {error}") from None
    return found
