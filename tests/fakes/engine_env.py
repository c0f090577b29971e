"""A folder that looks like the engines' environment and runs stand-ins: its python starts `standin_engine.py` in place of SGLang, and in
place of the router one that has the workers which its arguments name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from palestra.cli.engines.environment import FIELDS, RECORD, stamp
from tests.fakes import standin_engine

VALUES = (
    "dtype attention_backend sampling_backend watchdog_timeout mem_fraction_static log_level_http context_length "
    "max_running_requests max_total_tokens chat_template"
)
FLAGS = "disable_overlap_schedule sleep_on_idle"
ROUTER = "queue_size log_level"
PYTHON = """#!{python} -IS
import json, os, sys
words = sys.argv[1:]
if words[0].endswith("router_main.py"):
    given = json.loads(words[1])
    standin = [str(given["port"]), *(word for url in given["worker_urls"] for word in ("--worker", url))]
else:
    standin = [words[words.index("--port") + 1]]
    if "--chat-template" in words:
        standin += ["--dies", words[words.index("--chat-template") + 1]]
os.execv({python!r}, [{python!r}, "-I", "-S", {script!r}, *standin])
"""


def make(folder: Path) -> Path:
    """Makes one; `chat_template` is the option that ends an engine while it starts, with its value as the message."""

    def options(names: str, form: str) -> dict[str, Any]:
        return {
            name: {"flag": "--" + name.replace("_", "-"), "form": form, "off": None, "default": None, "aliases": []}
            for name in names.split()
        }

    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable, script=str(standin_engine.__file__)))
    python.chmod(0o755)
    fields = {
        "sglang": {**options(VALUES, "value"), **options(FLAGS, "flag")},
        "sglang-router": options(ROUTER, "value"),
    }
    (folder / FIELDS).write_text(json.dumps(fields))
    versions = {"sglang": "0", "sglang-router": "0", "torch": "0"}
    record = {"device": "cpu", "versions": versions, "parts": {"cpu": stamp("cpu")}}
    (folder / RECORD).write_text(json.dumps(record))
    return folder
