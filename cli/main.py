"""`palestra VERB ...`: finds the verb's module and nothing else, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

VERBS = {
    "train": "run a training job: engine, service, environment worker and trainer",
    "serve": "serve a model to agents of any kind and keep their tokens, without a trainer",
    "plan": "check a run before paying for it: memory, times, what speaks against it; export what starts it",
    "eval": "play an environment with any OpenAI-compatible model and score it; show and compare evaluations",
    "env": "make, list, try, check and serve environments",
    "retriever": "serve a search index to agents and trainers over HTTP",
    "buffer": "list, show, export and clean up the groups of a run",
    "inspect": "show a run, a group or a rollout, token by token",
    "status": "say what a run is doing and who waits for whom",
    "engine": "install, start and serve inference engines (SGLang) and their router",
    "sandbox": "lend boxes for model-written code to other machines; remove what dead processes left",
    "convert": "write a model folder in another form: block-quantised",
    "doctor": "check what a run stands on: a model's chat template, this machine's sandboxes",
    "role": "run one process of a job (started by train)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(
        prog="palestra", description="A gym for language-model agents, and a trainer behind it."
    )
    parser.add_argument("--version", action="version", version=f"palestra {version('palestra')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, about in VERBS.items():
        verbs.add_parser(verb, help=about, add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, _ = parser.parse_known_args(arguments[:1])
    module = importlib.import_module(f"palestra.cli.{known.verb}")
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
