"""The verb `palestra convert`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.convert import main
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def test_the_verb_writes_a_folder_and_says_so(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(model), str(out), "--quantize", "fp8-block", "--block", "32x64"]) == 0
    said = capsys.readouterr().out
    assert "7 of 11 tensors quantised" in said
    assert (out / "tokenizer.json").is_file()
    assert main([str(model), str(out), "--quantize", "fp8-block"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_bad_input_is_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path / "out"), "--quantize", "fp8-block"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for block in ("128", "0x128", "x", "128x-1"):
        with pytest.raises(SystemExit):
            main([str(model), str(tmp_path / "out"), "--quantize", "fp8-block", "--block", block])


def test_a_full_disk_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main([str(model), str(tmp_path / "out"), "--quantize", "fp8-block"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
