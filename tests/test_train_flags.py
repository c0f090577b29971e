"""The modes of `palestra train`: what a flag stands for, and what is refused before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import ConfigError, RunConfig, check_config, load_config
from palestra.cli.modes import add_flags, check_mode, overrides_of
from palestra.cli.runfolder import owned, prepare
from palestra.cli.train import main

BASE: dict[str, Any] = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}}


def parsed(*argv: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return overrides_of(parser.parse_args(argv))


def config_of(mode: str, dump: Path | None, **tables: Any) -> RunConfig:
    return check_config({**BASE, "run": {"mode": mode, "dump": None if dump is None else str(dump)}, **tables}, "x")


def test_a_flag_is_two_fields_of_the_run_with_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed() == []
    assert parsed("--replay", "x") == []
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[env]\nid = "palestra/Calculator-v0"\n')
    for flag, mode in (("--rollout-only", "rollout_only"), ("--train-only", "train_only")):
        config = load_config(file, parsed(flag, 'a "dump"'))
        assert (config.run.mode, config.run.dump) == (mode, tmp_path / 'a "dump"')


@pytest.mark.parametrize("argv", [["--train-only", "a", "--replay", "b"], ["--replay", "a", "--resume"]])
def test_two_modes_at_once_are_refused(tmp_path: Path, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "run.toml"), *argv])
    assert caught.value.code == 2


@pytest.mark.parametrize("mode", ["rollout_only", "train_only"])
def test_a_mode_needs_the_folder_of_its_batches(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"run.mode = '{mode}' needs run.dump"):
        config_of(mode, None)


def test_batches_are_there_to_be_trained_and_not_to_be_written_over(tmp_path: Path) -> None:
    assert check_mode(config_of("train", None), resume=False) == []
    for mode in ("train", "rollout_only"):
        assert check_mode(config_of(mode, tmp_path / "new"), resume=False) == []
    with pytest.raises(ConfigError, match="has no batches"):
        check_mode(config_of("train_only", tmp_path), resume=False)
    (tmp_path / "step-00000001.batch").write_bytes(b"")
    for mode in ("train", "rollout_only"):
        with pytest.raises(ConfigError, match="has batches already"):
            check_mode(config_of(mode, tmp_path), resume=False)
        assert check_mode(config_of(mode, tmp_path), resume=True) == []
    with pytest.raises(ConfigError, match="is no folder"):
        check_mode(config_of("train", tmp_path / "step-00000001.batch"), resume=False)


def test_what_a_run_without_engines_leaves_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.batch").write_bytes(b"")
    said = check_mode(config_of("train_only", tmp_path, eval={}), resume=False)
    assert said == [
        "[eval]: nothing is evaluated without engines",
        f"run.steps: {tmp_path} has batches for 1 of 10 steps",
    ]


def test_a_run_that_plays_and_trains_may_begin_to_keep_batches_and_others_keep_their_folder(tmp_path: Path) -> None:
    def prepared(mode: str, dump: Path | None, resume: bool) -> Path:
        config = config_of(mode, dump)
        placed = config.model_copy(update={"run": config.run.model_copy(update={"save_dir": str(tmp_path / mode)})})
        return prepare(placed, tmp_path, resume)

    prepared("train", None, resume=False)
    prepared("train", tmp_path / "dump", resume=True)
    for mode in ("train_only", "rollout_only"):
        prepared(mode, tmp_path / "dump", resume=False)
        prepared(mode, tmp_path / "dump", resume=True)
        with pytest.raises(ConfigError, match=r"cannot change run\.dump"):
            prepared(mode, tmp_path / "elsewhere", resume=True)


def test_a_folder_is_one_process_s_and_its_key_is_there_whole(tmp_path: Path) -> None:
    config = config_of("train", None)
    config = config.model_copy(update={"run": config.run.model_copy(update={"save_dir": str(tmp_path)})})
    folder = config.folder.resolve()
    (folder / "roles").mkdir(parents=True)
    (folder / "roles" / "web.json").write_text("{}")
    (folder / "roles" / "admin.token").write_text("")
    with owned(folder, "train.lock"):
        prepare(config, tmp_path, resume=False)
        with pytest.raises(ConfigError, match="run or served already"), owned(folder, "train.lock"):
            raise AssertionError("two at once")
    assert (folder / "roles" / "web.json").is_file(), "a file that no run of ours has made"
    key = folder / "roles" / "admin.token"
    assert (len(key.read_text()) > 40, key.stat().st_mode & 0o077) == (True, 0)
    with owned(folder, "train.lock"):
        prepare(config, tmp_path, resume=True)
    assert not (folder / "roles" / "web.json").exists(), "a role's place in an earlier start"
