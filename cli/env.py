"""`palestra env VERB ...`: make, list, look at, check, try and serve environments. Finds the verb's module and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.cli.verbs import run_verb

VERBS = {
    "new": ("palestra.cli.envs.new", "write a package with an environment of your own"),
    "list": ("palestra.cli.envs.listing", "say which environments there are: built-ins and plugins"),
    "show": ("palestra.cli.envs.show", "show an environment: its prompt, tools, arguments and a task"),
    "check": ("palestra.cli.envs.check", "try the laws that every environment keeps"),
    "try": ("palestra.cli.envs.console", "play an episode in the terminal, in the model's place"),
    "serve": ("palestra.server.env_host.main", "serve an environment over HTTP to other trainers and languages"),
}
"""The module whose `main(argv)` does it, and what it does."""


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    return run_verb("palestra env", "Environments.", VERBS, argv)
