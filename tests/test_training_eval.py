"""Evaluations of a run that trains, the books: what is due, what is kept for it, what holds a publish, and what a restart makes of it."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palestra.agents.evaluation.config import EvalConfig
from palestra.cli.config import ConfigError, check_config
from palestra.cli.evaluation.watch import RESTARTS, EvalWatch, outcome_line
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.settling import settle
from palestra.server.evaluating.snapshots import link_folder, remove_folder
from palestra.server.evaluating.types import Done, Due, EvalState, EvaluatingError, Ways
from palestra.trainer.config import WeightsConfig
from palestra.trainer.evaluation import Evaluations
from palestra.trainer.settings import TrainerSettings

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}}


def due_of(step: int, version: int = 7, on: Ways = "job", **more: Any) -> Due:
    return Due(step, version, on, 1000.0, **more)


def done_of(due: Due, state: EvalState = EvalState.DONE) -> Done:
    return Done(due.step, due.version, due.on, state, 1001.0, "", {"eval/E/mean": 0.5})


# The section.


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"on": "engines"}, "eval.urls and eval.on"),
        ({"urls": ["http://e"]}, "eval.urls and eval.on"),
        ({"on": "hold", "threads": 2}, 'eval.threads needs eval.on = "job"'),
        ({"evry": 3}, "did you mean every"),
        ({"on": "hold", "max_response": 4096}, "eval.max_response leaves no room"),
    ],
)
def test_a_wrong_section_says_what_is_wrong(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config({**MINIMAL, "eval": section}, "run.toml")


def test_top_p_needs_an_agent_that_asks_through_us() -> None:
    agent = {"kind": "python", "entry": "a:b"}
    with pytest.raises(ConfigError, match=r"eval\.top_p needs agent\.kind"):
        check_config({**MINIMAL, "agent": agent, "eval": {"top_p": 0.9}}, "run.toml")


def test_metrics_are_called_after_the_environment_unless_told() -> None:
    assert EvalConfig().label("palestra/Calculator-v0") == "Calculator-v0"
    assert EvalConfig(env="my.module:my/Own Env-v1").label("x") == "Own-Env-v1"
    assert EvalConfig(name="held-out").label("x") == "held-out"


# The desk.


def test_the_desk_keeps_what_is_due_in_order_and_tells_each_outcome_once(tmp_path: Path) -> None:
    desk = EvalDesk(tmp_path)
    assert desk.pending() == []
    for step in (20, 3, 100):
        desk.ask(due_of(step))
    assert [due.step for due in desk.pending()] == [3, 20, 100]
    desk.finish(done_of(due_of(20)))
    assert [due.step for due in desk.pending()] == [3, 100]
    assert [due.step for due in desk.asked()] == [3, 20, 100]
    (line,) = desk.outcomes()
    assert (line["eval/train_step"], line["eval/version"], line["state"], line["eval/E/mean"]) == (20, 7, "done", 0.5)


def test_a_line_that_a_kill_cut_costs_no_other(tmp_path: Path) -> None:
    desk = EvalDesk(tmp_path)
    desk.ask(due_of(1))
    desk.finish(done_of(due_of(1)))
    with desk.lines.open("ab") as stream:
        stream.write(b'{"eval/train_st')
    desk.ask(due_of(2))
    desk.finish(done_of(due_of(2)))
    assert [line["eval/train_step"] for line in desk.outcomes()] == [1, 2]


def test_a_damaged_file_of_the_desk_is_named(tmp_path: Path) -> None:
    desk = EvalDesk(tmp_path)
    desk.ask(due_of(1))
    (desk.folder(1) / "due.json").write_text("{")
    with pytest.raises(EvaluatingError, match=r"step_1/due\.json cannot be read"):
        desk.pending()


def test_weights_are_kept_by_links_that_outlive_the_folder_and_go_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "v3", tmp_path / "evals" / "step_3" / "weights"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"x" * 100)
    link_folder(source, target)
    assert os.stat(target / "model.safetensors").st_nlink == 2
    for path in source.iterdir():
        path.unlink()
    source.rmdir()
    assert (target / "model.safetensors").read_bytes() == b"x" * 100
    remove_folder(target)
    assert not target.exists()
    remove_folder(target)
    with pytest.raises(EvaluatingError, match="cannot be kept"):
        link_folder(tmp_path / "nothing", target)


def test_what_is_no_flat_folder_of_files_is_never_removed(tmp_path: Path) -> None:
    deep, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    (deep / "below").mkdir(parents=True)
    (deep / "below" / "kept").write_text("1")
    with pytest.raises(OSError):
        remove_folder(deep)
    assert (deep / "below" / "kept").exists()
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("1")
    (tmp_path / "link").symlink_to(elsewhere)
    remove_folder(tmp_path / "link")
    assert (elsewhere / "kept").exists()


# After a restart.


def cut_run(tmp_path: Path) -> EvalDesk:
    """Asked for: 2 is done, 4 has its weights, 6 was on the training's engines, 8 is after the newest checkpoint, done and all."""
    desk = EvalDesk(tmp_path)
    for due in (due_of(2), due_of(4), due_of(6, on="hold"), due_of(8)):
        desk.ask(due)
    desk.finish(done_of(due_of(2)))
    desk.finish(done_of(due_of(8)))
    desk.weights(4).mkdir()
    return desk


def test_a_restart_keeps_what_is_done_goes_on_where_weights_are_and_voids_the_rest(tmp_path: Path) -> None:
    desk = cut_run(tmp_path)
    voided = settle(desk, newest_step=6, clock=lambda: 5.0)
    assert [(done.step, done.state) for done in voided] == [(6, EvalState.VOID), (8, EvalState.VOID)]
    assert [due.step for due in desk.pending()] == [4]
    assert [due.step for due in desk.asked()] == [2, 4]
    assert sorted(path.name for path in (desk.root / "abandoned").iterdir()) == ["step_6-v7", "step_8-v7"]
    assert [line["state"] for line in desk.outcomes()] == ["done", "done", "void", "void"]
    assert settle(desk, newest_step=6) == [], "once is enough"


def test_the_same_step_can_be_void_twice(tmp_path: Path) -> None:
    desk = EvalDesk(tmp_path)
    for _ in range(3):
        desk.ask(due_of(5))
        settle(desk, newest_step=4)
    names = sorted(path.name for path in (desk.root / "abandoned").iterdir())
    assert names == ["step_5-v7", "step_5-v7-1", "step_5-v7-2"]


def test_a_run_without_a_checkpoint_begins_its_evaluations_again(tmp_path: Path) -> None:
    desk = cut_run(tmp_path)
    settle(desk, newest_step=-1)
    assert desk.asked() == []


# The trainer's side.


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def evaluations(tmp_path: Path, clock: Clock | None = None, steps: int = 10, **section: Any) -> Evaluations:
    config = EvalConfig(**{"on": "hold", "queue": 99, **section})
    weights = WeightsConfig(bucket_bytes=1 << 20)
    settings = TrainerSettings(model=tmp_path / "model", steps=steps, eval=config, weights=weights)
    return Evaluations(settings, tmp_path, clock or Clock())


def export() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a.weight", torch.arange(6.0)


def asked_steps(tmp_path: Path) -> list[int]:
    return [due.step for due in EvalDesk(tmp_path).asked()]


@pytest.mark.parametrize(
    ("section", "published", "asked"),
    [
        ({"every": 4}, range(11), [0, 4, 8, 10]),
        ({"every": 4, "at_start": False, "at_end": False}, range(11), [4, 8]),
        ({"every": 3}, (0, 2, 4, 6, 8, 10), [0, 4, 6, 10]),  # 3 and 9 are not published: the next one is
        ({"every": 1}, (0, 1, 1, 2), [0, 1, 2]),  # a resumed run publishes a step again
        ({"every": 100}, range(11), [0, 10]),
    ],
)
def test_what_is_due(tmp_path: Path, section: dict[str, Any], published: Any, asked: list[int]) -> None:
    for step in published:
        # A new object each time: nothing of it may live in the trainer's memory alone.
        evaluations(tmp_path, **section).published(export, step, 100 + step)
    assert asked_steps(tmp_path) == asked
    assert [due.version for due in EvalDesk(tmp_path).asked()] == [100 + step for step in asked]


def test_without_the_section_nothing_is_due_or_held(tmp_path: Path) -> None:
    made = Evaluations(TrainerSettings(model=tmp_path, steps=4), tmp_path)
    made.published(export, 0, 0)
    assert made.hold(lambda: False, lambda text: None) == 0.0
    assert not (tmp_path / "evals").exists()


def test_the_published_folder_is_kept_and_else_the_weights_are_written(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "x"}')
    published = tmp_path / "weights" / "v1"
    published.mkdir(parents=True)
    (published / "config.json").write_text('{"model_type": "published"}')
    made = evaluations(tmp_path, on="job", every=1)
    made.published(export, 0, 1)
    made.published(export, 1, 2)
    desk = EvalDesk(tmp_path)
    assert "published" in (desk.weights(0) / "config.json").read_text()
    assert load_file(desk.weights(1) / "model-00001.safetensors")["a.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [due.refused for due in desk.pending()] == ["", ""]


def test_too_many_are_refused_with_the_reason_and_keep_no_weights(tmp_path: Path) -> None:
    made = evaluations(tmp_path, on="job", every=1, queue=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for step in (0, 1, 2, 3, 10):
        made.published(export, step, step)
    desk = EvalDesk(tmp_path)
    assert [bool(due.refused) for due in desk.asked()] == [False, False, True, True, False], "the last one is played"
    assert "eval.queue = 1" in desk.asked()[2].refused
    assert [desk.weights(step).is_dir() for step in (0, 1, 2, 3, 10)] == [True, True, False, False, True]


def test_weights_that_cannot_be_kept_are_reported_and_raise_nothing(tmp_path: Path) -> None:
    made = evaluations(tmp_path, on="job")  # there is no model folder to take the configuration from
    made.published(export, 0, 0)
    (due,) = EvalDesk(tmp_path).asked()
    assert "could not be kept" in due.refused


def test_a_disk_that_refuses_is_no_fault_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "evals").write_text("no folder")
    made = evaluations(tmp_path)
    made.published(export, 0, 0)
    assert made.hold(lambda: False, lambda text: None) < 5.0


def test_a_publish_is_held_until_the_evaluation_is_done(tmp_path: Path) -> None:
    made, said = evaluations(tmp_path, every=1), list[str]()
    made.published(export, 0, 3)
    desk = EvalDesk(tmp_path)

    def finish(text: str) -> None:
        said.append(text)
        threading.Thread(target=desk.finish, args=(done_of(desk.pending()[0]),)).start()

    assert made.hold(lambda: False, finish) > 0
    assert said == ["waits for the evaluation of step 0 before it publishes (eval.on = hold)"]
    assert desk.done(0) is not None
    assert made.hold(lambda: False, lambda text: pytest.fail("nothing is held any more")) == 0.0


def test_a_held_publish_goes_on_at_the_deadline_and_at_a_wish_to_stop(tmp_path: Path) -> None:
    clock = Clock()
    made = evaluations(tmp_path, clock, every=1, deadline_s=50.0)
    made.published(export, 0, 0)

    def late(text: str) -> None:
        clock.now += 51.0

    made.hold(lambda: False, late)
    made.published(export, 1, 1)
    made.hold(lambda: True, lambda text: None)
    assert [due.step for due in EvalDesk(tmp_path).pending()] == [0, 1]


def test_evaluations_on_other_engines_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    made = evaluations(tmp_path, on="job")
    made.published(export, 0, 0)
    assert made.hold(lambda: False, lambda text: pytest.fail("it is not held")) == 0.0


# The supervisor's side.


class FakeRole:
    """A process that ends when a test says so."""

    name = "evaluator"

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def stop(self, timeout_s: float) -> int:
        return 0

    def kill(self) -> None:
        """Nothing to end."""

    def last_words(self) -> str:
        return "one line\nEnvError: it broke"


def test_an_evaluator_that_ends_is_started_again_then_given_up_and_publishes_go_on(tmp_path: Path) -> None:
    desk, roles, said = EvalDesk(tmp_path), list[FakeRole](), list[str]()

    def launch() -> FakeRole:
        roles.append(FakeRole())
        return roles[-1]

    watch = EvalWatch(tmp_path, EvalConfig(), "E", launch, said.append)
    watch.start()
    desk.ask(due_of(3, on="hold"))
    for _ in itertools.repeat(None, RESTARTS + 1):
        assert not watch.over()
        roles[-1].status = 1
        watch.look()
    assert len(roles) == 1 + RESTARTS
    assert watch.role is None
    assert watch.over()
    done = desk.done(3)
    assert done is not None
    assert done.state is EvalState.FAILED
    assert "EnvError: it broke" in done.reason
    assert "started again (1 of 2)" in said[0]
    assert "eval step 3 (version 7) failed: the evaluator ended" in said[-1]
    desk.ask(due_of(4, on="hold"))
    watch.look()
    assert desk.pending() == [], "no later publish waits for it either"


def test_a_run_waits_for_what_is_due_until_it_is_done(tmp_path: Path) -> None:
    desk = EvalDesk(tmp_path)
    watch = EvalWatch(tmp_path, EvalConfig(deadline_s=100.0), "E", FakeRole, lambda text: None)
    watch.start()
    assert watch.over()
    desk.ask(due_of(3))
    desk.ask(due_of(6))
    assert not watch.over()
    assert watch.waits() == "waits for the evaluation of step 3, 6"
    for due in desk.pending():
        desk.finish(done_of(due))
    assert watch.over()


def test_an_outcome_in_one_line() -> None:
    line = {
        "eval/train_step": 4,
        "eval/version": 5,
        "state": "late",
        "reason": "too slow",
        "eval/E/mean": 0.25,
        "eval/E/stderr": None,
        "eval/E/k": 2.0,
        "eval/E/pass_at_k": 0.5,
        "eval/E/scored": 8.0,
        "eval/E/void": 1.0,
        "eval/E/owed": 0.0,
    }
    assert outcome_line(json.loads(json.dumps(line)), "E") == (
        "eval step 4 (version 5) E 0.250 +- -  pass@2 0.500  scored 8  void 1  late: too slow"
    )
