"""Words of command lines that hold variables, written for a shell and for compose. Pure.

In: texts in which `var(NAME)` stands for a value that only the machine knows. Out: the same words, quoted so that nothing but these
variables is expanded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

# Of Unicode's private use: no path, address or option has them, so quoting can tell a variable from what a user wrote.
_OPEN, _CLOSE = "\ue000", "\ue001"
_VARIABLE = re.compile(f"{_OPEN}([A-Z][A-Z0-9_]*){_CLOSE}")


def var(name: str) -> str:
    """A variable's place in a word."""
    return f"{_OPEN}{name}{_CLOSE}"


def variables(words: Iterable[str]) -> tuple[str, ...]:
    """Names of all variables in words, each once, in order."""
    return tuple(dict.fromkeys(name for word in words for name in _VARIABLE.findall(word)))


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word with the variables that have a value replaced by it."""
    return _VARIABLE.sub(lambda found: values.get(found[1], found[0]), word)


def shell(word: str) -> str:
    """One word for a shell: variables in double quotes, the rest as it is or in single ones."""
    pieces = _VARIABLE.split(word)
    quoted = [
        f'"${{{piece}}}"' if at % 2 else shlex.quote(piece)
        for at, piece in enumerate(pieces)
        if piece or len(pieces) == 1
    ]
    return "".join(quoted)


def shell_line(words: Iterable[str]) -> str:
    """A command for a shell."""
    return " ".join(map(shell, words))


def compose(word: str) -> str:
    """One word for a compose file, which reads `$$` as a dollar; a variable that nobody set ends it."""
    pieces = _VARIABLE.split(word)
    return "".join(f"${{{piece}:?missing}}" if at % 2 else piece.replace("$", "$$") for at, piece in enumerate(pieces))


def comment(lines: Iterable[str]) -> str:
    """Lines as comments of a shell, TOML or YAML file; a line break within a line would end the comment."""
    return "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
