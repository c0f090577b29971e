"""`palestra env`: packages that are written, environments that are listed, shown, checked and played by hand; and plugins."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from palestra.cli.config import load_config
from palestra.cli.env import VERBS, main
from palestra.cli.envs.arguments import read_set
from palestra.cli.envs.console import read_reply
from palestra.cli.envs.listing import NEEDS
from palestra.cli.envs.messages import printable
from palestra.cli.envs.new import KINDS, names_of, write
from palestra.envs import BUILTINS, plugins
from palestra.envs.calculator import Calculator
from palestra.envs.checking import LAWS, check
from palestra.envs.registry import find_spec
from palestra.envs.types import EnvError

ROOT = Path(__file__).resolve().parent.parent
ID = "palestra/Calculator-v0"
SPAWNING = {"vectors", "close", "killed"}

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one module and an entry point where Python finds it."""
    site = tmp_path / "site"
    site.mkdir()
    known, modules = set(gym.registry), set(sys.modules)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "_loaded", None)

    def put(name: str, module: str, code: str) -> None:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[palestra.envs]\n{name} = {module}\n")
        if code:
            (site / f"{module}.py").write_text(code)

    yield put
    for env_id in set(gym.registry) - known:
        del gym.registry[env_id]
    for name in {name for name in set(sys.modules) - modules if name.startswith(("plug_", "my_"))}:
        del sys.modules[name]


GOOD = """
from palestra.envs.calculator import Calculator
from palestra.envs.registry import register

@register("plug/Good-v0")
class Good(Calculator):
    "A calculator of somebody else's."
"""


class TestPlugins:
    def test_an_unknown_id_is_looked_for_among_the_plugins(self, install: Install) -> None:
        install("plug-good", "plug_good", GOOD)
        assert find_spec("plug/Good-v0").id == "plug/Good-v0"
        (plugin,) = (one for one in plugins.load() if one.name == "plug-good")
        assert (plugin.module, plugin.package, plugin.ids, plugin.error) == (
            "plug_good",
            "plug-good 1.0",
            ("plug/Good-v0",),
            None,
        )

    @pytest.mark.parametrize(
        "code", ["raise RuntimeError('no GPU')", "import surely_not_there", "raise SystemExit(3)", "x ="]
    )
    def test_one_that_fails_is_named_and_stops_nobody(self, install: Install, code: str) -> None:
        install("plug-bad", "plug_bad", code)
        install("plug-good", "plug_good", GOOD)
        assert find_spec("plug/Good-v0")
        with pytest.raises(EnvError, match=r"could not be imported: plug-bad \(plug-bad 1.0\): \w+"):
            find_spec("plug/Nothing-v0")

    def test_a_plugin_may_ask_for_an_environment_while_it_is_imported(self, install: Install) -> None:
        install("plug-asks", "plug_asks", "from palestra.envs.registry import make_env\nmake_env('plug/Nowhere-v0')")
        install("plug-good", "plug_good", GOOD)
        errors = {plugin.name: plugin.error for plugin in plugins.load()}
        assert "no environment" in str(errors["plug-asks"])
        assert errors["plug-good"] is None

    def test_they_are_listed(self, install: Install, capsys: pytest.CaptureFixture[str]) -> None:
        install("plug-good", "plug_good", GOOD)
        install("plug-bad", "plug_bad", "raise RuntimeError('no GPU')")
        assert main(["list"]) == 1
        told = capsys.readouterr().out
        assert "plug/Good-v0" in told
        assert "A calculator of somebody else's." in told
        assert "plug-bad (plug-bad 1.0) could not be imported: RuntimeError: no GPU" in told
        assert main(["list", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        ours = {one["id"]: one for one in found["environments"]}
        assert ours[ID]["source"] == "built in"
        assert ours["plug/Good-v0"]["source"] == "plug-good 1.0"
        assert [one["name"] for one in found["failed"]] == ["plug-bad"]


def test_what_an_environment_needs_is_an_extra_of_ours() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for extra, _ in NEEDS.values()} <= extras.keys()


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ([], {}),
        (["args.levels=[1, 2]", "args.prompt=plain"], {"levels": [1, 2], "prompt": "plain"}),
        (["args.seed=3", "args.seed=4"], {"seed": 4}),
        (['args.text="a=b"'], {"text": "a=b"}),
    ],
)
def test_arguments(words: list[str], args: dict[str, Any]) -> None:
    assert read_set(words) == args


@pytest.mark.parametrize("word", ["levels=1", "args.levels", "args.=1", "args.a b=1", ""])
def test_wrong_arguments_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"args\.NAME=VALUE"):
        read_set([word])


class TestShow:
    def test_everything_is_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show", ID, "--set", "args.prompt=plain", "--task", "1"]) == 0
        told = capsys.readouterr().out
        for part in (
            "calculator(expression: string)",
            "Computes + - *",
            "prompt = 'plain'",
            "levels = (1,)",
            "4096 tasks",
        ):
            assert part in told
        assert "First reply with a JSON tool call" in told
        assert "right_answer" in told

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show", ID, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["tools"] == [spec["function"] for spec in Calculator().tool_specs()]
        assert shown["task"]["prompt"][-1]["role"] == "user"

    @pytest.mark.parametrize(
        "words", [["palestra/Nothing-v0"], [ID, "--task", "9999"], [ID, "--set", "args.levels=7"], ["CartPole-v1"]]
    )
    def test_what_cannot_be_shown(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show", *words]) == 2
        assert capsys.readouterr().err.startswith("palestra env show: ")


class TestCheck:
    def test_a_good_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", ID, "--law", "oracle", "--law", "box"]) == 0
        told = capsys.readouterr().out
        assert "1 passed, 0 failed, 1 not testable" in told
        assert "oracle 1.000" in told

    def test_a_broken_one(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Calculator, "oracle", lambda self, task: [{"role": "assistant", "content": "[red]7"}])
        assert main(["check", ID, "--law", "oracle", "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert (report["passed"], report["laws"][0]["verdict"]) == (False, "failed")
        assert main(["check", ID, "--law", "oracle"]) == 1
        assert "the oracle earns 0" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("words", [["palestra/Nothing-v0"], [ID, "--set", "x"], [ID, "--set", "args.levels=7"]])
    def test_what_cannot_be_checked(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", *words]) == 2
        assert capsys.readouterr().err.startswith("palestra env check: ")

    def test_scores_are_written_into_a_document(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "README.md"
        page.write_text("before\n<!-- scores -->\nold\n<!-- /scores -->\nafter\n")
        command = ["check", ID, "--law", "null", "--law", "oracle", "--law", "box", "--tasks", "3", "--fill", str(page)]
        assert main(command) == 0
        row = f"| `{ID}` | 3 of 4096 | 0.000 | 0.000 | 1.000 | 2 of 2 | box |"
        assert row in page.read_text()
        assert page.read_text().startswith("before\n<!-- scores -->\n| environment")
        assert page.read_text().endswith("|\n<!-- /scores -->\nafter\n")
        page.write_text("no marks")
        assert main(command) == 2
        assert "between <!-- scores -->" in capsys.readouterr().err
        assert page.read_text() == "no marks"


class TestTry:
    def play(self, monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return main(["try", ID, "--set", "args.prompt=plain", "--task", "0", *words])

    def test_a_person_wins(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.play(monkeypatch, ":tools\n\ncalculator expression=37+70\n107\n") == 0
        told = capsys.readouterr().out
        for part in (
            "What is 37 plus 70?",
            "calculator(expression: string)",
            "tool calculator  107",
            "reward 1",
            "right_call ",
        ):
            assert part in told

    def test_commands(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.play(monkeypatch, ":help\n:oracle\n:what\ncalculator 1 2\n:quit\nnever read\n") == 0
        told = capsys.readouterr().out
        assert '{"expression": "37+70"}' in told
        assert "no command :what" in told
        assert "'1' is no argument=value" in told
        assert "cancelled after 0 turns, 0 calls" in told
        assert "reward 0" in told

    def test_the_end_of_the_input_ends_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.play(monkeypatch, 'calculator {"expression": "37+70"}\n') == 0
        assert "reward 0.5" in capsys.readouterr().out

    def test_a_longer_answer(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.play(monkeypatch, '"""\ntwo\nlines\n"""\n') == 0
        assert "lines" in capsys.readouterr().out

    @pytest.mark.parametrize("words", [["--task", "9999"], ["--set", "args.levels=7"]])
    def test_what_cannot_be_played(
        self, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.play(monkeypatch, "", *words) == 2
        assert capsys.readouterr().err.startswith("palestra env try: ")

    @pytest.mark.parametrize(
        ("line", "arguments"),
        [
            ("f", {}),
            ('f {"a": 1}', {"a": 1}),
            ("f text=12 number=12", {"text": "12", "number": 12}),
            ('f text="two words" flag=true other=plain', {"text": "two words", "flag": True, "other": "plain"}),
            ("f text=", {"text": ""}),
        ],
    )
    def test_calls(self, line: str, arguments: dict[str, Any]) -> None:
        properties = {"text": {"type": "string"}, "number": {"type": "integer"}}
        spec = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
        message = read_reply(line, [spec])
        assert not isinstance(message, str)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == arguments

    def test_what_is_no_call_is_an_answer(self) -> None:
        assert read_reply("forty two", []) == {"role": "assistant", "content": "forty two"}

    def test_a_terminal_obeys_no_message(self) -> None:
        assert printable("a\x1b[31mb\r\u202e\tc\n") == "a\\x1b[31mb\\r\\u202e\tc\n"


class TestNew:
    @pytest.mark.parametrize(
        "name", ["Letters", "1st", "a_b", "-a", "a--b", "class", "json", "palestra", "../up", "a/b", ""]
    )
    def test_names_that_cannot_be(self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["new", "--into", str(tmp_path), "--", name]) == 2
        assert capsys.readouterr().err.startswith("palestra env new: ")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_written_over(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine").mkdir()
        assert main(["new", "mine", "--into", str(tmp_path)]) == 2
        assert "nothing is written over" in capsys.readouterr().err
        assert list((tmp_path / "mine").iterdir()) == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_kind_keeps_the_laws(
        self, kind: str, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = names_of(f"my-{kind}")
        folder = write(tmp_path, names, kind)
        monkeypatch.syspath_prepend(str(folder))
        install(names.name, names.module, "")
        assert names.env_id == f"my-{kind}/My{kind.capitalize()}-v0"
        if kind == "code":  # the rest takes boxes: the walk has it
            assert find_spec(names.env_id)
            return
        report = check(names.env_id, processes=False)
        assert report.passed, report.text()
        assert (report.scores["null"], report.scores["oracle"]) == (0.0, 1.0)

    @pytest.mark.parametrize("kind", KINDS)
    def test_its_files(self, kind: str, tmp_path: Path) -> None:
        folder = write(tmp_path, names_of("letter-count"), kind)
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["entry-points"]["palestra.envs"] == {"letter-count": "letter_count"}
        config = load_config(folder / "run.toml")
        assert config.env.id == "letter-count/LetterCount-v0"
        assert "$" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
        assert (folder / "README.md").read_text().count("<!-- scores -->") == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_linted_and_formatted(self, kind: str, tmp_path: Path) -> None:
        folder, ruff = write(tmp_path, names_of("letter-count"), kind), str(Path(sys.executable).with_name("ruff"))
        run(ruff, "check", "--no-cache", str(folder), cwd=folder, site=folder)
        run(ruff, "format", "--no-cache", "--check", str(folder), cwd=folder, site=folder)

    def test_a_tool_environment_is_15_lines_of_the_users(self, tmp_path: Path) -> None:
        folder = write(tmp_path, names_of("letter-count"), "tool")
        assert users_lines((folder / "letter_count/env.py").read_text()) <= 15


def users_lines(source: str) -> int:
    """Lines of code, without imports, docstrings, comments and blank lines."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and at not in skipped for at, line in lines)


def run(*command: str, cwd: Path, site: Path, timeout: float = 300) -> str:
    """A command in a fresh process, with `site` among what Python finds; its output."""
    surroundings = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_package_is_installed_and_passes_its_own_tests(tmp_path: Path) -> None:
    """Into a folder, as a wheel; docs/first-environment.md has the editable way."""
    folder, site, python = write(tmp_path, names_of("letter-count"), "tool"), tmp_path / "site", sys.executable
    target = ["--target", str(site), str(folder)]
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", *target, cwd=tmp_path, site=site)
    assert "2 passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder, site=site)
    code = "from palestra.envs import plugins; import gymnasium as g; plugins.load(); print(g.make('letter-count/LetterCount-v0'))"
    assert "LetterCount" in run(python, "-c", code, cwd=tmp_path, site=site)


@pytest.mark.walk
@pytest.mark.timeout(600)
def test_a_code_environment_of_ones_own_keeps_the_laws(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of("my-code")
    monkeypatch.syspath_prepend(str(write(tmp_path, names, "code")))
    install(names.name, names.module, "")
    report = check(names.env_id, tasks=2, processes=False)
    assert report.passed, report.text()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_packages_of_every_kind_are_strictly_typed(tmp_path: Path) -> None:
    both = tmp_path / "all"
    both.mkdir()
    for kind in KINDS:
        names = names_of(f"my-{kind}")
        (both / names.module).symlink_to(write(tmp_path, names, kind) / names.module)
    packages = [word for kind in KINDS for word in ("-p", f"my_{kind}")]
    run(str(Path(sys.executable).with_name("mypy")), "--strict", *packages, cwd=both, site=both, timeout=1000)


HEAVY = ("palestra/Code-v0", "palestra/Math-v0")
"""They have processes of their own: a sandbox, graders that can be killed."""
ELSEWHERE = {"palestra/OpenEnv-v0", "palestra/Gem-v0"}
"""They need somebody else's server or package."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(env_id, marks=pytest.mark.walk if env_id in HEAVY else pytest.mark.full)
        for env_id in BUILTINS
        if env_id not in ELSEWHERE
    ],
)
def test_built_ins_leave_nothing_running(env_id: str) -> None:
    """The laws that start processes; the others are in each environment's own suite."""
    report = check(env_id, laws=["close", "killed"], tasks=2)
    assert report.passed, report.text()
    assert report.untested == ()


def test_the_index_of_environments_is_whole() -> None:
    page = (ROOT / "docs/envs/README.md").read_text()
    for env_id in BUILTINS:
        assert re.search(rf"`(palestra/)?{env_id.removeprefix('palestra/')}`", page), env_id
    for law in LAWS.values():
        assert f"| `{law.name}` | {law.says} |" in page
    for linked in re.findall(r"\]\(([a-z./-]+\.md)\)", page):
        assert (ROOT / "docs/envs" / linked).is_file(), linked


def test_every_verb_has_a_main() -> None:
    for module, _ in VERBS.values():
        assert callable(importlib.import_module(module).main)
