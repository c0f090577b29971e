"""`python -m palestra.server.embedded --model-path DIR`: one engine. Prints one JSON line {"url", "pid"} when it answers requests."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import fields

from palestra.server.embedded.run import run
from palestra.server.embedded.types import EngineOptions, ModelRefused

HELP = {
    "model_path": "Hugging Face folder: config.json and safetensors",
    "port": "0 takes a free one",
    "dtype": "float32 or bfloat16",
    "num_threads": "torch's threads; 0: torch's own choice",
    "context_length": "prompt and completion, tokens; 0: the model's",
    "max_running": "requests in one batch",
    "page_size": "tokens per page of the prefix store",
    "max_total_tokens": "bound on the tokens of running requests, and on those of the prefix store; 0: 1 GiB",
    "chunk_size": "prompt tokens read per step",
    "update_timeout_s": "seconds to wait for the other ranks of a weight group",
    "allow_forced_ids": "test option: requests may carry forced_ids",
}


def parse(argv: list[str]) -> EngineOptions:
    """One flag per field of `EngineOptions`."""
    parser = argparse.ArgumentParser(prog="python -m palestra.server.embedded", description=__doc__)
    for field in fields(EngineOptions):
        flag, text = "--" + field.name.replace("_", "-"), HELP.get(field.name)
        if field.name == "model_path":
            parser.add_argument(flag, required=True, help=text)
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, help=text)
    return EngineOptions(**vars(parser.parse_args(argv)))


def announce(url: str) -> None:
    """The one line on stdout."""
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)


def main(argv: list[str]) -> int:
    """Serves until a signal; returns the exit status."""
    try:
        options = parse(argv)
    except ValueError as fault:
        print(fault, file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        run(options, announce)
    except (ModelRefused, OSError) as fault:
        print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # uvicorn raises SIGINT once more when it has shut down
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
