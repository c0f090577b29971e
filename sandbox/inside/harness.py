"""Runs tests in a box where something is graded. Sent there as text by `checks.Command`; Python 3.9 or newer.

In: two numbers on standard input, which is then closed. Out, on what was standard output: the first number before anything of the graded
work can run, the second when all tests have passed. All else that is printed goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def main(wish: dict[str, Any]) -> None:
    """Runs the tests, says whether they passed, and ends the process."""
    begun, done = _all_of(0).split()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    out = os.dup(1)
    os.dup2(2, 1)
    write, leave = os.write, os._exit
    folder = os.path.abspath(wish["tests"])
    before = _contents(folder)
    # Behind the standard library, so that the work can stand for none of its modules; and behind the tests.
    sys.path += [folder, os.getcwd()]
    sys.argv = list(wish["argv"]) or ["tests"]
    run = STYLES[wish["style"]](folder, before, list(wish["argv"]))
    write(out, begun)
    passed = False
    try:
        passed = run() is True
    except SystemExit as error:
        sys.stderr.write(f"the tests ended early, by exit({error.code!r})\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    if passed and _contents(folder) != before:
        passed = False
        sys.stderr.write("the tests were changed while they ran\n")
    if passed:
        write(out, done)
    leave(0 if passed else 1)


def _all_of(fd: int) -> bytes:
    found = b""
    while True:
        more = os.read(fd, 4096)
        if not more:
            return found
        found += more


def _contents(folder: str) -> dict[str, bytes]:
    """Files below a folder; what Python writes beside them is none of them."""
    found = {}
    for at, _, names in os.walk(folder):
        for name in sorted(names):
            if not name.endswith(".pyc"):
                path = os.path.join(at, name)
                with open(path, "rb") as file:
                    found[path] = file.read()
    return found


def _script(folder: str, sources: dict[str, bytes], argv: list[str]) -> Callable[[], bool]:
    """One file, run as the main module."""
    path = os.path.join(folder, argv[0])
    code = compile(sources[path], path, "exec")
    module = type(sys)("__main__")
    module.__file__ = path

    def run() -> bool:
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
        return True

    return run


def _unittest(folder: str, sources: dict[str, bytes], argv: list[str]) -> Callable[[], bool]:
    """Test cases of some files, from the texts that were there at the start."""
    import unittest

    paths = [os.path.join(folder, name) for name in argv]
    if not paths:
        paths = [path for path in sources if os.path.basename(path).startswith("test") and path.endswith(".py")]
    codes = [(path, compile(sources[path], path, "exec")) for path in paths]

    def run() -> bool:
        suite = unittest.TestSuite()
        for path, code in codes:
            name = os.path.splitext(os.path.basename(path))[0]
            module = sys.modules[name] = type(sys)(name)
            module.__file__ = path
            exec(code, module.__dict__)
            suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
        result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
        return result.wasSuccessful() and result.testsRun > len(result.skipped)

    return run


def _pytest(folder: str, sources: dict[str, bytes], argv: list[str]) -> Callable[[], bool]:
    """Everything in the folder. No plugin is loaded because it lies somewhere, no configuration is looked for above the folder."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    import pytest

    config = [os.path.join(folder, "pytest.ini")] if os.path.join(folder, "pytest.ini") in sources else [os.devnull]
    fixed = ["-c", *config, "--rootdir", folder, "--confcutdir", folder, "-p", "no:cacheprovider", "-q"]

    def run() -> bool:
        return int(pytest.main([*fixed, *argv, folder])) == 0

    return run


STYLES = {"script": _script, "unittest": _unittest, "pytest": _pytest}
