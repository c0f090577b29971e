"""`palestra buffer ls | show | export | gc`: of a run folder, beside its service and after it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from palestra.cli.buffer import VERBS, main
from palestra.cli.buffers import export
from palestra.cli.config import check_config, dump_toml
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.types import TokenSource
from palestra.trainer.checkpoints import Meta
from tests.conformance.buffer_suite import Clock, ids
from tests.conformance.run_buffer_suite import masked_whole, train
from tests.fakes.rollouts import group


def make_run(folder: Path, **buffer: Any) -> EmbeddedBuffer:
    """A training run with a checkpoint of step 1: a and b are trained in steps 1 and 2, c is dropped, d is claimed, e is ready."""
    config = check_config(
        {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}, "buffer": buffer}, "the test"
    )
    folder.mkdir()
    (folder / "run.toml").write_text(dump_toml(config))
    model = folder / "model"
    model.mkdir()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    (folder / "meta.json").write_text(json.dumps({"kind": "train", "model_folder": str(model)}))
    place = folder / "checkpoints" / "step_1"
    place.mkdir(parents=True)
    (place / "meta.json").write_text(json.dumps(dataclasses.asdict(Meta(1, 1, 1, "f", "c"))))
    opened = EmbeddedBuffer(folder / "store", segment_bytes=1, clock=Clock())
    for version, name in enumerate("abcde"):
        opened.put([group(name, version=version, tokens=4)])
    train(opened, 1)
    train(opened, 2)
    opened.drop(["c"], "why")
    opened.recount([masked_whole(held) for held in opened.claim(1, "t", 1e12)])
    return opened


@pytest.fixture
def live(tmp_path: Path) -> Iterator[EmbeddedBuffer]:
    """The buffer of a run whose service is up, in `tmp_path / "run"`."""
    opened = make_run(tmp_path / "run")
    yield opened
    opened.close()


@pytest.fixture
def run(live: EmbeddedBuffer, tmp_path: Path) -> str:
    return str(tmp_path / "run")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ls_says_what_became_of_each_group(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", run, "--json"]) == 0
    told = {entry["group"]: entry for entry in lines(capsys)}
    assert [(name, entry["state"], entry["step"], entry["reason"]) for name, entry in told.items()] == [
        ("a", "committed", 1, None),
        ("b", "committed", 2, None),
        ("c", "dropped", None, "why"),
        ("d", "claimed", None, None),
        ("e", "ready", None, None),
    ]
    assert told["b"]["versions"] == [1]
    assert told["b"]["trained_tokens"] == 8
    assert (told["d"]["trained_tokens"], told["d"]["masked_tokens"]) == (0, {"stale": 8})
    assert told["e"]["rewards"] == [0.0, 1.0]
    assert told["e"]["stored_bytes"] > 100
    assert told["e"]["age_s"] > 0


def test_ls_as_a_table_with_filters(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", run, "--state", "ready", "--state", "dropped"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["c", "e", "5"]
    assert "dropped (why)" in out
    assert "5 groups: 1 ready, 1 claimed, 2 committed, 1 dropped, 1 dropped(why)" in out
    assert main(["ls", run, "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["d", "e", "5"]
    assert "+8 masked" in out
    assert "2 of 5 are shown" in out


def test_show_gives_runs_of_mask_source_version_and_text(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", run, "b", "--json"]) == 0
    first, second = lines(capsys)
    assert (first["rollout"], second["reward"], first["stop"]) == ("b-0", 1.0, "answer")
    assert first["token_ids"] == [1, 2, 10, 11, 12, 13]
    prompt, sampled = first["runs"]
    assert prompt == {
        "start": 0, "end": 2, "source": "prompt", "mask": 0, "version": None, "logprob": None, "text": "w1 w2",
    }  # fmt: skip
    assert (sampled["source"], sampled["mask"], sampled["version"]) == ("sampled", 1, 1)
    assert sampled["logprob"] == pytest.approx(-0.0115)
    assert main(["show", run, "b"]) == 0
    out = capsys.readouterr().out
    assert "b: task task, committed" in out
    assert "b-1 attempt 0 branch 0: reward 1.000, stop answer, temperature 1, 6 tokens, 4 trained" in out
    assert "'w10 w11 w12 w13'" in out


def test_show_without_the_tokenizer_shows_the_rest(
    run: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (Path(run) / "model" / "tokenizer.json").unlink()
    assert main(["show", run, "a"]) == 0
    assert "sampled" in capsys.readouterr().out
    assert "no text is shown" in caplog.text


def test_show_names_what_is_not_there(run: str, live: EmbeddedBuffer, capsys: pytest.CaptureFixture[str]) -> None:
    assert live.collect(1)
    assert main(["show", run, "a"]) == 1
    assert "arrays of group a are not stored" in capsys.readouterr().err
    assert main(["show", run, "z"]) == 1
    assert "no group z" in capsys.readouterr().err


def test_export_writes_every_row_exactly(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "TOKENS", 10)
    out = tmp_path / "rows.parquet"
    assert main(["export", run, str(out)]) == 0
    assert "10 rows of 5 groups" in capsys.readouterr().out
    file = pyarrow.parquet.ParquetFile(out)
    assert file.num_row_groups == 5
    sources = json.loads(file.schema_arrow.metadata[b"sources"])
    table = file.read().to_pylist()
    file.close()
    reader = BufferReader(Path(run) / "store")
    rows = [row for name in "abcde" for row in reader.read_group(name).samples]
    reader.close()
    assert [(told["rollout_id"], told["state"], told["step"]) for told in table][2:5] == [
        ("b-0", "committed", 2), ("b-1", "committed", 2), ("c-0", "dropped", None),
    ]  # fmt: skip
    for told, row in zip(table, rows, strict=True):
        assert told["token_ids"] == row.token_ids.tolist()
        assert told["loss_mask"] == row.loss_mask.tolist()
        assert told["sources"] == row.sources.tolist()
        logprobs = [None if np.isnan(value) else value for value in row.logprobs.tolist()]
        assert told["logprobs"] == logprobs
        version = row.spans[0].version
        assert told["versions"] == [version if source == TokenSource.SAMPLED else None for source in row.sources]
        assert (told["reward"], told["turn_rewards"], told["routed_experts"]) == (row.reward, [1.0], None)
    assert sources["sampled"] == 1
    assert [path.name for path in tmp_path.iterdir() if "rows" in path.name] == ["rows.parquet"]


def test_export_of_some_states_and_of_what_is_damaged(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.parquet"
    assert main(["export", run, str(out), "--state", "ready"]) == 0
    assert set(pyarrow.parquet.read_table(out)["group_id"].to_pylist()) == {"e"}
    segment = sorted((Path(run) / "store" / "segments").iterdir())[0]
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    assert main(["export", run, str(out)]) == 1
    assert "left out" in capsys.readouterr().err
    assert set(pyarrow.parquet.read_table(out)["group_id"].to_pylist()) == set("bcde")


def test_export_keeps_the_experts_of_each_token(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    opened = make_run(folder)
    routed = group("x", size=1)
    row = routed.samples[0]
    experts = np.arange((len(row.token_ids) - 1) * 4, dtype=np.int16).reshape(-1, 2, 2)
    opened.put([dataclasses.replace(routed, samples=(dataclasses.replace(row, routed_experts=experts),))])
    opened.close()
    assert main(["export", str(folder), str(tmp_path / "o.parquet")]) == 0
    told = pyarrow.parquet.read_table(tmp_path / "o.parquet").to_pylist()[-1]
    assert np.array_equal(np.array(told["routed_experts"]).reshape(told["routed_experts_shape"]), experts)


def test_gc_refuses_beside_a_service_and_a_dry_run_tells(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", run]) == 1
    assert "in use by another process" in capsys.readouterr().err
    assert main(["gc", run, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("2 of 5 parts would go")
    assert main(["gc", run, "--dry-run", "--oldest-step", "0"]) == 0
    assert capsys.readouterr().out.startswith("1 of 5 parts would go"), "the dropped one"
    assert len(list((Path(run) / "store" / "segments").iterdir())) == 5


def test_gc_deletes_what_the_checkpoints_do_not_need(
    run: str, live: EmbeddedBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    live.close()
    assert main(["gc", run]) == 0
    assert capsys.readouterr().out.startswith("2 of 5 parts went")
    again = EmbeddedBuffer(Path(run) / "store", clock=Clock())
    assert again.restore(1, 1).readied == ("b",)
    assert ids(again.claim(9, "t", 60)) == ["b"], "d and e have tokens of versions that nobody published"
    again.close()


def test_gc_keeps_to_the_retention_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    make_run(folder, keep_hours=1.0).close()
    assert main(["gc", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("0 of 5 parts went")
    assert main(["gc", str(folder), "--keep-bytes", "0"]) == 0
    assert capsys.readouterr().out.startswith("2 of 5 parts went")


def test_gc_without_a_checkpoint_asks(run: str, live: EmbeddedBuffer, capsys: pytest.CaptureFixture[str]) -> None:
    live.close()
    (Path(run) / "checkpoints" / "step_1" / "meta.json").unlink()
    assert main(["gc", run]) == 1
    assert "--oldest-step" in capsys.readouterr().err
    assert main(["gc", run, "--oldest-step", "2"]) == 0
    assert capsys.readouterr().out.startswith("3 of 5 parts went")


def test_a_folder_without_a_buffer_is_said_to_be_one_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["ls"], ["show"], ["export"], ["gc", "--oldest-step", "1"]):
        extra = {"show": ["g"], "export": [str(tmp_path / "o.parquet")]}.get(words[0], [])
        assert main([words[0], str(tmp_path), *extra, *words[1:]]) == 1
        assert "holds no buffer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["ls", "x", "--limit", "0"], ["ls", "x", "--state", "open"], ["gc", "x", "--keep-hours", "-1"]]
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


def test_help_names_every_verb_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)
    code = "import sys, palestra.cli.buffer; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
