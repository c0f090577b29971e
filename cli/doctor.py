"""`palestra doctor CHECK ...`: finds the check's module and nothing else.

In: the words of the command line. Out: the check's exit status: 0; 1 where something does not hold; 2 where nothing can be tried. Waits for
the check.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.cli.verbs import run_verb

CHECKS = {
    "template": ("palestra.cli.doctor_template", "does a model's chat template keep what was seen?"),
    "sandbox": ("palestra.cli.doctor_sandbox", "what do this machine's sandboxes hold, and does an attack get out?"),
}
"""The module whose `main(argv)` does it, and what it looks into."""


def main(argv: Sequence[str]) -> int:
    """Runs a check; its exit status."""
    return run_verb("palestra doctor", None, CHECKS, argv, called="check")
