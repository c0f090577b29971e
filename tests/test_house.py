"""The house itself: what is installed, what an import loads, how large files and functions are, and that the documents are true."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sandbox", "envs", "agents", "server", "trainer", "cli")
HEAVY = ("torch", "megatron", "transformers", "fastapi", "uvicorn", "openai", "aiohttp", "ray")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/", timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["envs", "agents", "server", "trainer"])
def test_importing_types_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(f"import palestra.{package}.types").intersection(HEAVY)


def test_the_supervisor_and_the_help_load_no_torch_and_the_help_loads_nothing() -> None:
    assert not loaded_by("import palestra.cli.train").intersection({"torch", "megatron", "transformers", "fastapi"})
    asked = "import palestra.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\nprint()"
    assert not loaded_by(asked).intersection({*HEAVY, "gymnasium", "numpy", "pydantic", "rich", "httpx2"})


def test_no_file_over_350_lines_and_no_function_over_60() -> None:
    long_files, long_functions = [], []
    for path in sources():
        text = path.read_text()
        if text.count("\n") > 350:
            long_files.append(str(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60:
                    long_functions.append(f"{path}:{node.lineno} {node.name} ({lines})")
    assert (long_files, long_functions) == ([], [])


def test_every_module_and_every_public_thing_says_what_it_is() -> None:
    silent = []
    for path in sources():
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            silent.append(str(path))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
                if not node.name.startswith("_") and not overload and ast.get_docstring(node) is None:
                    silent.append(f"{path}:{node.lineno} {node.name}")
    assert silent == []


def test_no_exception_is_swallowed_in_silence() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and all(isinstance(part, ast.Pass) for part in node.body)
    ]
    assert found == []


@pytest.mark.walk
@pytest.mark.timeout(300)
def test_wheel_and_sdist_hold_palestra_and_nothing_generic(tmp_path: Path) -> None:
    """The wheel is built from the sdist, as an installer would; then it is installed beside nothing else and used."""
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"palestra", names[-1].split("/")[0]}
    assert {name.split("/")[1] for name in names if name.startswith("palestra/")} == set(PACKAGES)
    assert {f"palestra/{package}/py.typed" for package in PACKAGES} <= set(names)
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())
    target = tmp_path / "site"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            str(wheel),
        ],
        check=True,
        timeout=120,
    )
    code = "import palestra.cli.config as c, sys; assert c.__file__.startswith(sys.argv[1]), c.__file__"
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {code}", str(target)], check=True
    )


def test_the_readme_names_the_two_commands_and_the_documents_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.index("./quickstart.sh") < readme.index("./test.sh")
    assert (ROOT / "ARCHITECTURE.md").is_file()
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) < 160
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"sandbox", "train", "cluster", "langgraph", "dev"} <= project["optional-dependencies"].keys()


def test_every_verb_has_a_module_and_every_role_a_main() -> None:
    from palestra.cli.main import VERBS
    from palestra.cli.role import ROLES

    for name, folder in [*((verb, "cli") for verb in VERBS), *((role, "cli/roles") for role in ROLES)]:
        tree = ast.parse((ROOT / folder / f"{name}.py").read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), name
