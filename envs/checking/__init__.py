"""Checks of environments: the laws that every one of them keeps, tried on one.

    report = check("my_package:mine/Thing-v0")
    assert report.passed, report.text()

An environment for which a law makes no sense says so in a class attribute, `excused = {"null": "silence is the right answer"}`: the report
shows the reason. `call` and `say` write the messages of an oracle.
"""

from palestra.envs.checking.run import LAWS, check
from palestra.envs.checking.scripts import call, say
from palestra.envs.checking.types import Outcome, Report, Verdict

__all__ = ["LAWS", "Outcome", "Report", "Verdict", "call", "check", "say"]
