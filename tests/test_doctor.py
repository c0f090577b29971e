"""`palestra doctor template`: what it prints, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from palestra.cli import doctor_template as doctor
from palestra.cli.main import main
from palestra.server.renderer.families.generic import GenericRenderer
from palestra.server.renderer.registry import make_renderer
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import Message, Rendered, Renderer, RenderOptions, Snapshot
from tests import templates, tokenizers
from tests.tiny import save_tokenizer, train_tokenizer


def folder(path: Path, template: str | None = None) -> Path:
    save_tokenizer(train_tokenizer(), path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_family_that_holds_ends_with_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "template", str(folder(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "family  qwen3: Qwen's special tokens, without a chat template" in said
    assert "<|im_end|>" in said
    assert "parallel calls" in said
    assert "│ broken  │" not in said
    assert "not compared" in said


def test_forks_and_their_reasons_are_listed_and_are_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path, templates.NUMBERED)
    assert doctor.check_template(tmp_path) == 0
    said = capsys.readouterr().out
    assert "family  generic" in said
    assert "depends_on_history" in said


def test_a_family_is_set_beside_the_checkpoints_own_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.check_template(folder(tmp_path, templates.CHATML), "qwen3") == 0
    said = capsys.readouterr().out
    assert "family  qwen3: as asked for" in said
    lines = {
        line.split("│")[1].strip(): line
        for line in said.split("beside the own template")[1].splitlines()
        if "│" in line
    }
    assert "same" in lines["question"]
    assert "same" in lines["system message"]
    assert "differs" in lines["tools"]


def test_a_broken_law_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(GenericRenderer):
        def extend(self, last: Snapshot, new: Sequence[Message], options: RenderOptions | None = None) -> Rendered:
            return super().extend(last, [{**message, "content": "…"} for message in new], options)

    def forgetful(folder: Path, codec: TokenCodec, family: str) -> Renderer:
        return Forgetful.of(folder, codec) if family == "generic" else make_renderer(folder, codec, family)

    monkeypatch.setattr(doctor, "make_renderer", forgetful)
    assert doctor.check_template(folder(tmp_path, templates.CHATML), "generic") == 1
    assert "the extension does not hold the message" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("alpaca", "no chat family 'alpaca'; known: chatml"),
        ("harmony", "harmony does not fit"),
        ("generic", "has no chat template"),
    ],
)
def test_bad_input_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, why: str
) -> None:
    assert main(["doctor", "template", str(folder(tmp_path)), "--family", family]) == 2
    assert why in capsys.readouterr().err


def test_folders_that_are_no_models_end_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check_template(tmp_path / "none") == 2
    assert "no such folder" in capsys.readouterr().err
    assert doctor.check_template(tmp_path) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    tokenizers.added_codec(["<odd>"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    assert doctor.check_template(tmp_path) == 2
    assert "no chat family fits" in capsys.readouterr().err
