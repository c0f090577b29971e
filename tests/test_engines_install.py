"""The engines' own environment: how it is made, found, finished and refused, and the stand-ins that are put into it. What needs a real
one takes $PALESTRA_ENGINE_ENV or .engine, and fails without.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from palestra.cli.engines import environment as environments
from palestra.cli.engines import install as installing
from palestra.cli.engines import interpreter
from palestra.cli.engines.commands import engine_commands, router_command
from palestra.cli.engines.environment import PARTS, RECORD, STANDINS, find, has_smg, python_env, requirements, stamp
from palestra.cli.engines.install import Wanted, install, main
from palestra.cli.engines.options import fields_of, known
from palestra.cli.engines.topology import of_config
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError
from palestra.server.config import EngineSection

ROOT = Path(__file__).resolve().parent.parent
SITE = STANDINS / "site"
VERSIONS = {"sglang": "0.5.23", "torch": "2.13.0", "python": "3.11.7"}


@dataclass
class Pip:
    """Steps and questions of an installation, answered without pip."""

    folder: Path
    steps: list[list[str]] = field(default_factory=list)
    failing: str | None = None
    smg: bool = False

    def step(
        self,
        command: Sequence[str],
        what: str,
        folder: Path,
        say: Callable[[str], None],
        told: Mapping[str, str] | None = None,
    ) -> None:
        if self.failing is not None and self.failing in command:
            raise EngineSetupError(f"{what} failed")
        self.steps.append(list(command))
        if "venv" in command:
            (folder / "bin").mkdir()
            (folder / "site").mkdir()
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "pyvenv.cfg").write_text("")
        self.smg |= any(word.endswith("smg.txt") for word in command)

    def ask(self, environment: EngineEnvironment, arguments: Sequence[str], timeout_s: float) -> str:
        if "purelib" in arguments[1]:
            return f"{self.folder / 'site'}\nFalse\n"
        return json.dumps({**VERSIONS, **({"smg": "1.13.0"} if self.smg else {})})

    def packages(self) -> list[str]:
        """The last words of each call of pip."""
        found = [" ".join(step[step.index("off") + 1 :]) for step in self.steps if "pip" in step]
        return [words.replace(f"{STANDINS / 'requirements'}/", "") for words in found]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip(tmp_path / "engine")
    monkeypatch.setattr(installing, "run_step", fake.step)
    monkeypatch.setattr(installing, "ask", fake.ask)
    monkeypatch.setattr(installing, "read_fields", lambda environment, which: {which: {}})
    for name in ("PALESTRA_TORCH_INDEX", environments.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return fake


def made(pip: Pip, part: Any = "cpu", smg: bool = False) -> list[str]:
    """Runs the installation; the lines that it said."""
    said: list[str] = []
    install(Wanted(pip.folder, part, smg), said.append)
    return said


def test_the_lists_that_are_shipped_agree_with_the_projects_group() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["engine"]
    assert set(requirements("cuda.txt")) == set(group)
    assert set(group) <= {line for listed in PARTS["cpu"] for line in requirements(listed)}
    for listed in itertools.chain(*PARTS.values()):
        assert all(line.count("==") == 1 for line in requirements(listed)), listed


def test_an_environment_is_made_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_TORCH_INDEX", "https://torch.example/cpu")
    said = made(pip)
    assert pip.packages() == [
        "--index-url https://torch.example/cpu torch==2.13.0",
        "-r cpu.txt",
        "--no-deps -r cpu-alone.txt",
    ]
    assert [line.split("]")[0] for line in said[:-1]] == [f"[{step}/6" for step in range(1, 7)]
    assert said[-1].startswith("done in ")
    assert (pip.folder / "site" / "sgl_kernel" / "__init__.py").is_file()
    assert (pip.folder / "site" / "palestra_torchvision.pth").is_file()
    found = find(str(pip.folder))
    assert (found.device, found.python, found.versions) == ("cpu", pip.folder / "bin" / "python", VERSIONS)

    pip.failing = "-m"
    assert made(pip) == [f"{pip.folder} is complete: sglang 0.5.23, torch 2.13.0, for cpu"]


def test_what_was_left_half_made_is_finished(pip: Pip) -> None:
    pip.failing = "--no-deps"
    with pytest.raises(EngineSetupError, match="installing SGLang failed"):
        made(pip)
    with pytest.raises(
        EngineSetupError, match=f"is not whole; make it with: palestra engine install --cpu --into {pip.folder}"
    ):
        find(str(pip.folder), "cpu")
    pip.failing, pip.steps = None, []
    made(pip)
    assert not any("venv" in step for step in pip.steps)
    assert find(str(pip.folder)).device == "cpu"


def test_the_other_router_is_added_and_stays(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    made(pip)
    assert not has_smg(find(str(pip.folder)))
    pip.steps = []
    pip.failing = str(STANDINS / "requirements" / "smg.txt")
    with pytest.raises(EngineSetupError):
        made(pip, smg=True)
    assert find(str(pip.folder)).device == "cpu", "what there was stays whole"
    pip.failing = None
    made(pip, smg=True)
    assert pip.packages() == ["-r smg.txt"]
    assert has_smg(find(str(pip.folder)))
    assert "complete" in made(pip)[0]
    monkeypatch.setattr(installing, "stamp", lambda part: f"new {part}")
    pip.steps = []
    made(pip)
    assert pip.packages()[-1] == "-r smg.txt"


def test_new_versions_are_installed_over_the_old_and_another_device_from_the_beginning(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(pip)
    record = json.loads((pip.folder / RECORD).read_text())
    record |= {"parts": {"cpu": "older"}, "versions": {"sglang": "0.5.22"}}
    (pip.folder / RECORD).write_text(json.dumps(record))
    with pytest.raises(
        EngineSetupError, match=r"SGLang 0\.5\.22 .* needs 0\.5\.23; bring it up to date with: palestra engine install"
    ):
        find(str(pip.folder))
    pip.steps = []
    made(pip)
    assert not any("venv" in step for step in pip.steps)
    assert find(str(pip.folder)).versions == VERSIONS
    with pytest.raises(
        EngineSetupError, match=f"computes on cpu, and cuda is asked for.*--cuda --into {pip.folder}-cuda"
    ):
        find(str(pip.folder), "cuda")

    (pip.folder / "leftover").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=31e9))
    made(pip, "cuda")
    assert not (pip.folder / "leftover").exists()
    assert pip.packages()[-1] == "-r cuda.txt"
    assert find(str(pip.folder)).device == "cuda"


def test_an_environment_whose_interpreter_is_gone_is_made_again(pip: Pip) -> None:
    made(pip)
    (pip.folder / "bin" / "python").unlink()
    pip.steps = []
    made(pip)
    assert any("venv" in step for step in pip.steps)


def test_a_folder_with_other_things_is_left_alone(pip: Pip) -> None:
    pip.folder.mkdir()
    (pip.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(EngineSetupError, match="holds something else already; give a new folder with --into"):
        made(pip)
    assert os.listdir(pip.folder) == ["thesis.txt"]
    with pytest.raises(EngineSetupError, match="cannot write to"):
        install(Wanted(pip.folder / "thesis.txt" / "engine", "cpu"), print)


def test_two_installations_do_not_share_a_folder(pip: Pip) -> None:
    pip.folder.mkdir()
    holder = os.open(pip.folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(EngineSetupError, match="another palestra engine install is at work"):
            made(pip)
    finally:
        os.close(holder)


def test_too_little_disk_and_a_wrong_interpreter_are_told_before_anything_is_downloaded(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, bare = tmp_path / "old", tmp_path / "bare"
    for path, status in ((old, 3), (bare, 1)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    cases = [(str(old), "no Python 3.11"), (str(bare), "has no venv module"), ("/no/python", "does not run")]
    for python, said in cases:
        assert main(["--cpu", "--into", str(pip.folder), "--python", python]) == 1
        assert said in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    assert main(["--cpu", "--into", str(pip.folder)]) == 1
    assert "has 1.0 GB free, and 4 GB are needed" in capsys.readouterr().err
    assert pip.steps == []


def test_a_step_that_fails_shows_its_last_words_and_one_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('\\n'.join(f'line {n}' for n in range(30))); raise SystemExit(3)"
    with pytest.raises(EngineSetupError, match=r"doing it failed \(status 3\); run the same command") as caught:
        interpreter.run_step([sys.executable, "-c", code], "doing it", tmp_path, print)
    assert "line 29" in str(caught.value)
    assert "line 17" not in str(caught.value)
    monkeypatch.setattr(interpreter, "TICK_S", 0.01)
    monkeypatch.setattr(interpreter, "STEP_S", 0.0)
    with pytest.raises(EngineSetupError, match="doing it took longer than 0 s"):
        interpreter.run_step(
            [sys.executable, "-S", "-c", "input() if 0 else __import__('time').sleep(600)"], "doing it", tmp_path, print
        )


def test_environments_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(folder: Path) -> Path:
        folder.mkdir(parents=True)
        record = {"device": "cpu", "versions": VERSIONS, "parts": {"cpu": stamp("cpu")}}
        (folder / RECORD).write_text(json.dumps(record))
        return folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(environments.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    with pytest.raises(EngineSetupError, match=r"does not exist; make it with: palestra engine install --(cpu|cuda)$"):
        find()
    home = put(tmp_path / "share" / "palestra" / "engine")
    assert find().folder == home
    here = put(tmp_path / ".engine")
    assert find().folder == here
    named = put(tmp_path / "named")
    monkeypatch.setenv(environments.VARIABLE, str(named))
    assert find().folder == named
    assert find(str(home)).folder == home
    with pytest.raises(EngineSetupError, match="gone does not exist"):
        find("gone")


def test_what_processes_of_the_environment_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = python_env(EngineEnvironment(Path("/e"), Path("/e/bin/python"), "cpu"))
    assert (cpu["SGLANG_USE_CPU_ENGINE"], cpu["OMP_NUM_THREADS"], cpu["CUDA_VISIBLE_DEVICES"]) == ("1", "1", "")
    cuda = python_env(EngineEnvironment(Path("/e"), Path("/e/bin/python"), "cuda"))
    assert "SGLANG_USE_CPU_ENGINE" not in cuda
    assert cuda["PATH"] == "/e/bin:/usr/bin"
    assert {name: cuda[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH", "HF_HUB_OFFLINE")} == {
        "PYTHONPATH": "",
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
    }


def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "sgl_kernel.mamba", ModuleType("put back afterwards"))
    spec = importlib.util.spec_from_file_location("sgl_kernel", SITE / "sgl_kernel" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernels_stand_in_writes_slots_and_says_which_kernel_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    module = kernels(monkeypatch)
    table = torch.zeros((3, 5), dtype=torch.int32)
    starts, ends = torch.tensor([1, 0]), torch.tensor([3, 1])
    module.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, starts, ends, torch.tensor([7, 8, 9]), 5)
    assert table.tolist() == [[9, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]]
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul has no stand-in"):
        module.silu_and_mul()
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.mamba\.causal_conv1d"):
        sys.modules["sgl_kernel.mamba"].causal_conv1d()
    assert not hasattr(module, "__wrapped__")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ImportError, match="this machine has CUDA"):
        kernels(monkeypatch)


@pytest.mark.parametrize("whole", [True, False])
def test_the_image_library_gets_its_operators_only_where_its_own_did_not_load(tmp_path: Path, whole: bool) -> None:
    files = {
        "torch/__init__.py": "",
        "torch/library.py": (
            "made = []\n"
            "class Library:\n"
            "    def __init__(self, *a): made.append(a)\n"
            "    def define(self, s): made.append(s)\n"
        ),
        "torchvision/__init__.py": "from torchvision import extension, _meta_registrations\n",
        "torchvision/extension.py": f"def _has_ops(): return {whole}\n",
        "torchvision/_meta_registrations.py": "import torch.library\nat_import = list(torch.library.made)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import palestra_torchvision as p, torchvision as v; "
        "print(len(v._meta_registrations.at_import), sum(isinstance(f, p._Declarer) for f in sys.meta_path))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path), str(SITE)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["0" if whole else "3", "0"], done.stderr


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_second_installation_changes_nothing_and_the_stand_ins_are_imported_for_real() -> None:
    environment = find()
    record = environment.folder / RECORD
    before = record.stat().st_mtime_ns
    said: list[str] = []
    part = environment.device
    install(Wanted(environment.folder, part), said.append)
    assert "is complete" in said[0]
    assert record.stat().st_mtime_ns == before
    code = "import torchvision, sgl_kernel; print(torchvision.__version__, sgl_kernel.__version__)"
    if part == "cpu":
        assert interpreter.ask(environment, ["-c", code], 120).split()[-1].endswith("palestra.cpu")


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_the_installed_upstreams_read_every_command_line_of_ours() -> None:
    """Each option that a field of `[rollout]` becomes exists, and SGLang's own parser takes the whole line."""
    environment = find()
    gpu = EngineEnvironment(environment.folder, environment.python, "cuda", environment.versions)
    cases: list[dict[str, Any]] = [
        {"gpus_per_engine": 16, "ep": 4, "dp": 2, "dp_attention": True, "kv_dtype": "fp8_e4m3", "page_size": 16},
        {"ssm_dtype": "fp32", "state_ratio": 0.5, "state_strategy": "extra_buffer", "attention_backend": "fa3"},
        {"state_slots_pin": 8, "deterministic": True, "hicache": True, "hicache_ratio": 3.0, "max_total_tokens": 4096},
        {"prefix_cache": False, "kv_dtype": "bf16", "ssm_dtype": "bf16", "routed_experts": True, "router": "smg"},
        {"pd": {"prefill_gpus": 1, "decode_gpus": 1, "transfer": "nixl", "ib_device": "mlx5_0"}, "mem_fraction": 0.7},
    ]
    fields = known(environment, "sglang")
    lines: list[Sequence[str]] = []
    for device, case in [(gpu, case) for case in cases] + [(environment, {})]:
        topology = of_config(EngineSection(engine="sglang", **case))
        ports = itertools.count(30000)
        engines = engine_commands(
            topology, Path("/m"), device, ports, hosts=("127.0.0.1", "127.0.0.2"), fields=fields, weight_version="0"
        )
        lines += [engine.argv[3:] for engine in engines]
    router = router_command(engines, environment, port=1, prometheus_port=2, fields=known(environment, "sglang-router"))
    code = (
        "import argparse, json, sys; from sglang.srt.server_args import ServerArgs; from sglang_router.router_args import RouterArgs\n"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)\n"
        "for line in json.loads(sys.argv[1]): parser.parse_args(line)\n"
        "print(RouterArgs(**json.loads(sys.argv[2])).policy)"
    )
    said = interpreter.ask(environment, ["-c", code, json.dumps(lines), router.argv[2]], 150)
    assert said.split()[-1] == "consistent_hashing"
    assert fields == fields_of(json.loads((environment.folder / environments.FIELDS).read_text())["sglang"])
    if has_smg(environment):
        router_command(engines, environment, port=1, prometheus_port=2, kind="smg", fields=known(environment, "smg"))
