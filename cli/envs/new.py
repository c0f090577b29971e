"""`palestra env new NAME`: writes a package with an environment of one's own.

In: a name and a kind. Out: a folder `NAME` with a package that can be installed, tested, checked and trained on. Nothing that exists is
written over. Exit status 0; 2 where the name cannot be, or is taken. Nothing is waited for.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Kind:
    """What an environment of this kind is like."""

    about: str
    reply: int
    """Tokens of a reply, in the training run that is written."""
    turns: int
    """Model calls of an episode there."""


KINDS: Mapping[str, Kind] = {
    "tool": Kind("a model calls your methods, then answers", 64, 4),
    "text": Kind("a question and an answer in words", 32, 1),
    "code": Kind("code that is run against hidden cases, in the sandbox", 128, 1),
    "game": Kind("several turns, each answered by your code", 32, 6),
}
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Names:
    """What a package and its environment are called."""

    name: str
    """Of the distribution, and of its folder: `letter-count`."""

    @property
    def module(self) -> str:
        """Of the package: `letter_count`."""
        return self.name.replace("-", "_")

    @property
    def cls(self) -> str:
        """Of the class: `LetterCount`."""
        return "".join(part.capitalize() for part in self.name.split("-"))

    @property
    def env_id(self) -> str:
        """Of the environment: `letter-count/LetterCount-v0`."""
        return f"{self.name}/{self.cls}-v0"


def main(argv: Sequence[str]) -> int:
    """Writes the package."""
    told = "\n".join(f"  {name:5} {kind.about}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="palestra env new",
        description="Write a package with an environment of your own.",
        epilog=f"kinds:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="small letters, digits and dashes: letter-count")
    parser.add_argument("--kind", choices=list(KINDS), default="tool", help="tool unless given; see below")
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="where the folder NAME is made")
    options = parser.parse_args(argv)
    try:
        folder = write(options.into, names_of(options.name), options.kind)
    except (ValueError, OSError) as error:
        print(f"palestra env new: {error}", file=sys.stderr)
        return 2
    names = names_of(options.name)
    print(f"wrote {folder}: the environment is {folder / names.module / 'env.py'}")
    print(f"next:\n  pip install -e {folder}\n  palestra env check {names.env_id}\n  palestra env try {names.env_id}")
    return 0


def names_of(name: str) -> Names:
    """The names of a package.

    Raises:
        ValueError: it cannot be called so.
    """
    names = Names(name)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a package: small letters, digits and dashes, a letter first")
    if keyword.iskeyword(names.module) or names.module in (*sys.stdlib_module_names, "palestra", "tests"):
        raise ValueError(f"{name!r}: Python has a module or a word of that name already; choose another")
    return names


def write(into: Path, names: Names, kind: str) -> Path:
    """Writes a package of that kind into a new folder below `into`; the folder.

    Raises:
        FileExistsError: there is one already.
        OSError: it cannot be written.
    """
    folder = into / names.name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise FileExistsError(f"{folder} is there already, and nothing is written over") from None
    for path, template in _files(names, kind).items():
        target = folder / path
        target.parent.mkdir(exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(_filled(TEMPLATES / template, names, KINDS[kind]))
    (folder / names.module / "py.typed").touch(exist_ok=False)
    return folder


def _files(names: Names, kind: str) -> dict[str, str]:
    """Templates, by the path of what is made of them."""
    return {
        "pyproject.toml": "common/pyproject.toml.tmpl",
        "README.md": "common/README.md.tmpl",
        "run.toml": "common/run.toml.tmpl",
        "tests/test_env.py": "common/test_env.py.tmpl",
        f"{names.module}/__init__.py": "common/init.py.tmpl",
        f"{names.module}/env.py": f"{kind}/env.py.tmpl",
        f"{names.module}/tasks.jsonl": f"{kind}/tasks.jsonl.tmpl",
    }


def _filled(path: Path, names: Names, kind: Kind) -> str:
    values = {
        "name": names.name,
        "module": names.module,
        "Class": names.cls,
        "id": names.env_id,
        "reply": kind.reply,
        "turns": kind.turns,
    }
    return Template(path.read_text(encoding="utf-8")).substitute(values)
