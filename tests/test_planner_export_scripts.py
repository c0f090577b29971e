"""Exported scripts do what they say, with stand-ins for what they start: they wait, pass addresses on, and end only what they started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from palestra.cli.planner.examples import data_of
from palestra.cli.planner.export import export
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.types import Example
from tests.planexports import EXTERNAL, HALVES

pytestmark = pytest.mark.walk

DEADLINE_S = 30.0
ENGINE = """\
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

said = {"pid": os.getpid(), "argv": sys.argv[1:], "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
with open(os.path.join(os.environ["RECORDS"], f"{os.getpid()}.tmp"), "w") as file:
    json.dump(said, file)
os.rename(file.name, file.name.replace(".tmp", ".json"))
if os.environ.get("FAULTY"):
    sys.exit("out of memory")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/model_info" else 404)
        self.end_headers()


told = dict(zip(sys.argv, sys.argv[1:]))
port = int(told["--port"]) if "--port" in told else json.loads(sys.argv[-1])["port"]
HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def files_of(example: Example) -> Mapping[str, str]:
    data = data_of(example)
    case, *_ = case_of(data)
    return export(plan(data), case, source="")


def stand_in(folder: Path, name: str, text: str) -> Path:
    """A program of this name."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def started(script: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(script)],
        cwd=script.parent,
        env={**env, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def records(folder: Path) -> list[dict[str, object]]:
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda said: str(said["gpus"]))


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_gone(pids: list[int]) -> bool:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if all(map(gone, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def engines_script(tmp_path: Path, free_ports: list[int]) -> tuple[Path, dict[str, str]]:
    """engines.sh of two engines and a router, on ports that are free here, and what it is told."""
    text = files_of(HALVES)["engines.sh"]
    for planned, free in zip(("30000", "30001", "29900", "29901"), free_ports, strict=True):
        text = re.sub(rf"\b{planned}\b", str(free), text)
    script = tmp_path / "engines.sh"
    script.write_text(text)
    (tmp_path / "records").mkdir()
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "env").mkdir()
    stand_in(tmp_path / "env" / "bin", "python", f'#!/bin/sh\nexec {sys.executable} {tmp_path / "engine.py"} "$@"\n')
    env = {**os.environ, "MODEL": "/models/of ours", "ENGINE_ENV": str(tmp_path / "env")}
    return script, env | {"RECORDS": str(tmp_path / "records"), "PALESTRA_PYTHON": sys.executable}


@pytest.fixture
def free_ports() -> list[int]:
    from palestra.cli.engines.ports import free_ports

    return free_ports("127.0.0.1", 4)


def test_engines_are_started_waited_for_and_ended_together(engines_script: tuple[Path, dict[str, str]]) -> None:
    script, env = engines_script
    process = started(script, env)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready: 2 engines\n"
        until = time.monotonic() + DEADLINE_S
        while len(records(script.parent / "records")) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        router, *engines = records(script.parent / "records")
        assert [said["gpus"] for said in engines] == ["0,1", "2,3"]
        for said in engines:
            argv = said["argv"]
            assert isinstance(argv, list)
            assert argv[:4] == ["-m", "sglang.launch_server", "--model-path", "/models/of ours"]
        assert router["gpus"] == ""
        argv = router["argv"]
        assert isinstance(argv, list)
        assert argv[0].endswith("router_main.py")
        assert len(json.loads(argv[1])["worker_urls"]) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert all_gone([int(str(said["pid"])) for said in records(script.parent / "records")])


def test_an_engine_that_ends_ends_the_script_with_a_word(engines_script: tuple[Path, dict[str, str]]) -> None:
    script, env = engines_script
    process = started(script, {**env, "FAULTY": "1"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "has ended: see logs" in said
    assert "out of memory" in (script.parent / "logs" / "engine-0.log").read_text()


def test_a_machine_that_has_no_engines_is_told_so(engines_script: tuple[Path, dict[str, str]]) -> None:
    script, env = engines_script
    process = started(script, {**env, "NODE_RANK": "1"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (2, "NODE_RANK must be 0 to 0\n")


def job_script(folder: Path, name: str, more: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """A script of the two-node plan in a folder with stand-ins, which write down how they were called."""
    files = files_of(Example("two-nodes"))
    for path, text in files.items():
        (folder / path).write_text(text)
    note = '#!/bin/bash\necho "${ON:+$ON: }$(basename "$0") $*" >>"$CALLS"\n'
    for stub, does in more.items():
        stand_in(folder / "bin", stub, note + does)
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "MODEL": "/m"}
    return folder / name, env | {"ENGINE_ENV": "/e", "DEADLINE_S": "20"}


# What ssh does with its words: the other machine's shell reads them once more.
SSH = 'ON=$1 exec bash -c "${*:2}"\n'
RAY = {"ssh": SSH, "ray": "", "python3": "echo 16\n", "curl": ""}


def test_ray_is_started_everywhere_and_stopped_everywhere(tmp_path: Path) -> None:
    script, env = job_script(tmp_path, "launch.sh", {**RAY, "pgrep": "exit 1\n"})
    process = started(script, {**env, "NODES": "alpha beta"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if ": ray " in line]
    assert [line.split(" --", 1)[0] for line in calls] == [
        "alpha: ray start",
        "beta: ray start",
        "alpha: ray job submit",
        "alpha: ray stop",
        "beta: ray stop",
    ]
    submitted = calls[2].partition(" -- ")[2]
    assert submitted.startswith("palestra train train.toml --model.path=/m --rollout.urls=")
    assert '"http://beta:30000","http://beta:30002"' in submitted
    assert submitted.endswith("--rollout.router_url=http://beta:29900")
    waited = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("curl")]
    assert [line.rpartition(" ")[2] for line in waited] == [
        f"http://beta:{port}/model_info" for port in (30000, 30002, 30003, 30004)
    ]


def test_a_ray_of_others_is_left_alone(tmp_path: Path) -> None:
    script, env = job_script(tmp_path, "launch.sh", {**RAY, "pgrep": "[[ $ON == beta ]]\n"})
    process = started(script, {**env, "NODES": "alpha beta"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "Ray runs on beta already" in said
    assert ": ray " not in (tmp_path / "calls").read_text()


def test_a_cluster_that_never_comes_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    stubs = {**RAY, "pgrep": "exit 1\n", "python3": "echo 8\n", "sleep": ""}
    script, env = job_script(tmp_path, "launch.sh", stubs)
    process = started(script, {**env, "NODES": "alpha beta", "DEADLINE_S": "1"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "Ray has 8 of 16 GPUs" in said
    assert "beta: ray stop" in (tmp_path / "calls").read_text()


def test_a_slurm_job_starts_its_steps_and_ends_them_with_the_run(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    more = {
        "scontrol": "printf 'alpha\\nbeta\\n'\n",
        "srun": f'echo $$ >"{steps}/$$"\nexec sleep 100\n',
        "python3": "echo 16\n",
        "curl": f'[[ $(ls "{steps}" | wc -l) == 3 ]]\n',
        "palestra": "exit 3\n",
    }
    script, env = job_script(tmp_path, "slurm.sh", more)
    process = started(script, {**env, "SLURM_JOB_NODELIST": "[alpha-beta]"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, said
    calls = (tmp_path / "calls").read_text().splitlines()
    asked = sorted(line for line in calls if line.startswith("srun"))
    assert len(asked) == 3
    assert "--nodelist=alpha ray start --head" in asked[0]
    assert "--nodelist=beta env NODES=beta NODE_RANK=0 bash engines.sh" in asked[1]
    assert "--nodelist=beta ray start --address=alpha:6379" in asked[2]
    assert [line for line in calls if line.startswith("palestra train train.toml --model.path=/m")]
    pids = [int(path.name) for path in steps.iterdir()]
    assert all_gone(pids)


def test_a_slurm_job_of_another_size_does_not_begin(tmp_path: Path) -> None:
    script, env = job_script(tmp_path, "slurm.sh", {"scontrol": "echo alpha\n", "srun": ""})
    process = started(script, {**env, "SLURM_JOB_NODELIST": "alpha"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (2, "the plan needs 2 machines, the job has 1\n")
    assert "srun" not in (tmp_path / "calls").read_text()


def test_probes_tell_what_an_engine_of_others_lacks(tmp_path: Path) -> None:
    script = tmp_path / "serving-reference.sh"
    script.write_text(files_of(EXTERNAL)["serving-reference.sh"])
    stand_in(tmp_path / "bin", "curl", "#!/bin/bash\n[[ ${*: -1} != http://10.0.0.6:30001/generate ]]\n")
    process = started(script, {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CONTROL": "yes"})
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert [line for line in said.splitlines() if not line.startswith("ok ")] == [
        "FAILS http://10.0.0.6:30001 samples from ids and gives logprobs"
    ]
    assert len(said.splitlines()) == 10
