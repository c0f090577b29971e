"""`palestra doctor sandbox`: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.cli import doctor_sandbox
from palestra.cli.main import main
from palestra.sandbox.attacks.run import ATTACKS
from palestra.sandbox.types import Backend, SandboxUnavailableError
from palestra.sandbox.unsafe import UnsafeSubprocess


def test_where_nothing_can_be_tried_the_status_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def make(name: str, **options: Any) -> Backend:
        raise SandboxUnavailableError(f"{name} is not installed [here]")

    monkeypatch.setattr(doctor_sandbox, "make", make)
    assert doctor_sandbox.check_sandbox(["bubblewrap", "docker"]) == 2
    said = capsys.readouterr()
    assert "docker: not tried: docker is not installed [here]" in said.out
    assert "no backend can be tried here" in said.err
    assert doctor_sandbox.check_sandbox(["remote"], ["http://127.0.0.1:1"], tmp_path / "none") == 2
    assert "none: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--backend", "remote"], ["--backend", "docker", "--host", "http://x"], ["--backend", "odd"]]
)
def test_words_that_do_not_go_together(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "sandbox", *words])
    assert ended.value.code == 2


@pytest.mark.walk
def test_an_escape_is_told_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_sandbox, "make", lambda name, **options: UnsafeSubprocess(i_understand=True))
    harmless = [attack for attack in ATTACKS if attack.harmless][:4]
    assert doctor_sandbox.check_sandbox(["bubblewrap"], attacks=harmless) == 1
    said = capsys.readouterr().out
    assert "bubblewrap: ESCAPED: secret files" in said
    assert "Nothing is enforced" in said
    assert "│ network" in said


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_bubblewrap_holds_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sandbox", "--backend", "bubblewrap"]) == 0
    said = capsys.readouterr().out
    assert said.count("contained") == len(ATTACKS) + 1, said
    assert "│ network   │ kernel" in said
