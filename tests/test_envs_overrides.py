"""Words of command lines that set values: one reader for all of them."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.envs.overrides import apply_override, read_settings, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-5", 1e-5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{ a = 1 }", {"a": 1}),
        ('{"a": null}', {"a": None}),
        ("null", None),
        ('"a=b"', "a=b"),
        ("plain", "plain"),
        ("", ""),
        ("[1, 2", "[1, 2"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert read_value(text) == value


def test_words_go_into_tables() -> None:
    words = ["args.size=3", "args.name=text", "args.inner.key=[1]", "args.inner.other=true", "agent.kind=python"]
    found = read_settings(words, ("args", "agent"))
    inner = {"key": [1], "other": True}
    assert found == {"args": {"size": 3, "name": "text", "inner": inner}, "agent": {"kind": "python"}}
    assert read_settings([]) == {"args": {}}


@pytest.mark.parametrize("word", ["size=3", "args.size", "args.=3", "args=3", "env.size=3", "args.a b=1", ""])
def test_other_forms_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"write args\.NAME=VALUE"):
        read_settings([word])


def test_a_key_inside_of_a_value_is_refused() -> None:
    data = {"a": {"b": 1}}
    with pytest.raises(ValueError, match=r"a\.b\.c=2: b is not a table"):
        apply_override(data, "a.b.c=2")
    apply_override(data, "a.c=2")
    assert data == {"a": {"b": 1, "c": 2}}
