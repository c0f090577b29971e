"""Words of exported command lines, and tables: read back by a shell and by a TOML reader they are what they were."""

from __future__ import annotations

import subprocess
import tomllib

from palestra.cli.planner.export import tables as toml
from palestra.cli.planner.export.words import compose, shell_line, var

HOSTILE = ["plain", "two words", "it's", '"quoted"', "$(touch x)`id`", "${MODEL}", "a\\b", "", "*", "ö;&|<>\n2"]


def test_nothing_but_variables_is_expanded() -> None:
    words = [*HOSTILE, var("NODE_0"), f"http://{var('NODE_0')}:1/{HOSTILE[4]}", f'["{var("NODE_0")}","{HOSTILE[2]}"]']
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {shell_line(words)}"],
        env={"NODE_0": "a b*"},
        capture_output=True,
        timeout=20,
        check=True,
    )
    expected = [word.replace(var("NODE_0"), "a b*") for word in words]
    assert printed.stdout.decode().split("\0")[:-1] == expected
    assert compose(f"$HOME {var('NODE_0')} $$") == "$$HOME ${NODE_0:?missing} $$$$"


def test_tables_are_read_back_as_they_were() -> None:
    values = {
        "version": 1,
        "env": {
            "id": "a/B",
            "args": {"text": 'x"\\\n\t\x7f\x01ö', "list": [1, 2.5, True, {"a b": [1e300, -0.0]}], "empty": {}},
        },
        "model": {"ratio": 1e-07, "big": 10**15, "none": [], "inf": float("inf"), "q.r": {"s": 1.0}},
    }
    assert tomllib.loads(toml.dump(values)) == values
