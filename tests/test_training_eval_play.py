"""An evaluation of a run that trains, on a real service with a scripted engine: versions, repetitions, deadlines, the ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.evaluation.pinned import is_void
from palestra.agents.evaluation.records import latest, read_header, read_rows
from palestra.agents.evaluation.types import EvalError
from palestra.cli.config import RunConfig, check_config
from palestra.cli.eval import main as palestra_eval
from palestra.cli.evaluation.training import Course, Order, Played, plan_run, play_run, spec_of_run
from palestra.cli.roles.context import RoleContext
from palestra.cli.roles.evaluator import Evaluator, InForce
from palestra.server.buffer.reader import BufferReader
from palestra.server.eval_client import EvalClient
from palestra.server.evaluating.types import Due, EvalState
from palestra.server.ledger import Ledger, read_ledger
from tests.fakes.engine import Heard, Say, Stage, service_on_fake
from tests.live import TOKEN, wait_for

VERSION = 3
BASE: dict[str, dict[str, Any]] = {
    "model": {"path": "m"},
    "env": {"id": "palestra/Calculator-v0", "args": {"prompt": "plain"}},
    "algo": {"max_turns": 2, "max_response": 16, "episode_deadline_s": 20.0},
}


@dataclass
class Table:
    """A run folder with a service that has VERSION in force."""

    stage: Stage
    folder: Path
    client: EvalClient
    stopping: threading.Event = field(default_factory=threading.Event)

    def config(self, tables: Mapping[str, Any] | None = None, **section: Any) -> RunConfig:
        wanted = {"on": "hold", "n": 3, "k": 2, "concurrency": 6, **section}
        return check_config({**BASE, **(tables or {}), "eval": wanted}, "run.toml")

    @property
    def evals(self) -> Path:
        return self.folder / "evals" / "step_4"

    def play(
        self,
        fault: Callable[[], str | None] = lambda: None,
        deadline_s: float = 60.0,
        on_tick: Callable[[Any], None] = lambda standing: None,
        **section: Any,
    ) -> Played:
        config = self.config(**section)
        assert config.eval is not None
        due = Due(4, VERSION, "hold", time.time())
        header, source = plan_run(config, config.eval, due, self.folder, self.evals)
        course = Course(time.monotonic() + deadline_s, self.stopping, fault)
        order = Order(config, config.eval, due, self.evals, self.client, course, on_tick)
        return play_run(order, header, source)

    def ledger(self) -> Ledger:
        return read_ledger(self.folder / "store")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with service_on_fake(tmp_path) as stage:
        client = EvalClient(stage.live.url, TOKEN)
        client.publish_begin(VERSION, 4, "disk")
        client.publish_end(VERSION, "/weights/of/that/version")
        stage.engine.heard.clear()
        yield Table(stage, tmp_path, client)
        client.close()


def test_all_episodes_are_of_the_version_and_none_reaches_the_buffer(table: Table) -> None:
    played = table.play(temperature=0.0, top_p=0.5)
    assert played.state is EvalState.DONE, played.reason
    rows = latest(read_rows(table.evals))
    assert len(rows) == 6
    assert all(row.scored for row in rows.values())
    assert read_header(table.evals).provenance["training"] == {"train_step": 4, "version": VERSION, "on": "hold"}
    assert all((heard.params["temperature"], heard.params["top_p"]) == (0.0, 0.5) for heard in table.stage.engine.heard)
    reader = BufferReader(table.folder / "store")
    assert reader.entries() == ()
    reader.close()
    ledger = table.ledger()
    assert ledger.balanced
    assert ledger.sampled > 0
    assert ledger.discarded == {"evaluation": ledger.sampled}
    metrics = played.metrics
    assert metrics["eval/Calculator-v0/scored"] == 6
    assert metrics["eval/Calculator-v0/tokens"] == ledger.sampled
    assert metrics["eval/Calculator-v0/k"] == 2


def test_an_episode_with_a_second_version_is_void_and_repeated(table: Table) -> None:
    stops = [0]  # a text of one unknown token: the environment's answer ends it or asks again
    table.stage.engine.then(Say([30, 31, *stops], version="9"))
    played = table.play()
    assert played.state is EvalState.DONE
    rows = read_rows(table.evals)
    void = [row for row in rows if is_void(row)]
    assert len(void) == 1
    assert "version 9 had a part in it, and 3 is evaluated" in str(void[0].error)
    assert not any(row.scored for row in void)
    assert all(row.scored for row in latest(rows).values())
    assert len(rows) == 7
    assert (played.metrics["eval/Calculator-v0/voided"], played.metrics["eval/Calculator-v0/void"]) == (1, 0)


def test_what_stays_void_is_counted_apart_from_scores(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    table.stage.engine.version = "9"
    assert table.play(retries=0).metrics["eval/Calculator-v0/repeated"] == 0
    played = table.play(retries=1)  # as a role that was started again: the first pass has nothing to play
    assert played.state is EvalState.DONE
    name = "eval/Calculator-v0"
    assert [played.metrics[f"{name}/{what}"] for what in ("scored", "void", "repeated")] == [0, 6, 6]
    assert played.metrics[f"{name}/mean"] is None
    assert palestra_eval(["show", str(table.evals)]) == 0
    assert "6 errors, without a reward (Void: 6)" in capsys.readouterr().out


def test_a_deadline_ends_it_with_what_there_is_and_leaves_no_session_open(table: Table) -> None:
    def stuck(heard: Heard) -> bool:
        return table.stage.engine.heard.index(heard) >= 4

    table.stage.engine.stuck = stuck
    played = table.play(deadline_s=1.0)
    assert played.state is EvalState.LATE
    assert "had not ended when its time was over" in played.reason
    rows = read_rows(table.evals)
    assert played.metrics["eval/Calculator-v0/owed"] == 6 - len(rows) > 0
    assert all(row.scored for row in rows), "what was cut has no row: it is neither right nor wrong"
    wait_for(lambda: len(table.stage.live.service.sessions) == 0, "the cut sessions' end", 10)
    wait_for(lambda: not table.stage.engine.running, "the engine's requests' end", 10)
    assert table.ledger().balanced
    assert table.ledger().pending == 0


def test_a_fault_of_its_engines_ends_it_and_what_is_owed_can_be_played_later(table: Table) -> None:
    finished: list[int] = []
    played = table.play(
        fault=lambda: "the engine is gone" if finished and finished[-1] else None,
        on_tick=lambda standing: finished.append(standing.finished),
        concurrency=1,
    )
    assert (played.state, played.reason) == (EvalState.FAILED, "the engine is gone")
    before = len(read_rows(table.evals))
    assert 0 < before < 6
    assert table.play().state is EvalState.DONE
    assert len(read_rows(table.evals)) == 6
    assert len(latest(read_rows(table.evals))) == 6


FUNCTION = """
import asyncio

async def one(args, prompt):
    async with prompt.rollout() as rollout:
        await rollout.client.chat.completions.create(
            model="m", messages=prompt.messages, temperature=args.rollout_temperature, max_tokens=4
        )
        return await rollout.sample(float(prompt.n_samples == args.n_samples_per_prompt))

async def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    if not evaluation:
        raise RuntimeError("this is no training")
    prompts = data_buffer.get_samples(args.rollout_batch_size)
    return await asyncio.gather(*(one(args, p) for p in prompts for _ in range(p.n_samples)))
"""


def test_a_run_s_own_function_plays_its_evaluations_too(table: Table) -> None:
    (table.folder / "own.py").write_text(FUNCTION)
    rollout = {"function": f"{table.folder / 'own.py'}:generate_rollout"}
    table.stage.engine.then(Say([30, 31], version="9"))
    played = table.play(temperature=0.25, tables={"rollout": rollout})
    assert played.state is EvalState.DONE, played.reason
    rows = read_rows(table.evals)
    assert len(rows) == 7
    assert [is_void(row) for row in rows].count(True) == 1
    assert all(row.reward.value == 1.0 for row in rows[:6] if row.scored)
    assert len(latest(rows)) == 6
    assert {heard.params["temperature"] for heard in table.stage.engine.heard} == {0.25}
    ledger = table.ledger()
    assert ledger.balanced
    assert ledger.discarded == {"evaluation": ledger.sampled}


def test_versions_are_never_mixed_in_one_folder(table: Table) -> None:
    table.play()
    config = table.config()
    assert config.eval is not None
    with pytest.raises(EvalError, match="never mixed"):
        plan_run(config, config.eval, Due(4, VERSION + 1, "hold", 0.0), table.folder, table.evals)


def test_the_evaluation_s_own_environment_does_not_inherit_the_run_s_arguments() -> None:
    config = check_config({**BASE, "eval": {"env": "palestra/GuessTheNumber-v0", "n": 0, "max_turns": 5}}, "x")
    assert config.eval is not None
    spec = spec_of_run(config, config.eval, Path("/run"), tasks=7)
    assert (spec.env, spec.args, spec.n, spec.max_turns, spec.max_tokens) == (
        "palestra/GuessTheNumber-v0",
        {},
        7,
        5,
        16,
    )
    own = check_config({**BASE, "eval": {}}, "x")
    assert own.eval is not None
    assert spec_of_run(own, own.eval, Path("/run"), tasks=7).args == {"prompt": "plain"}


# The role.


def evaluator(table: Table, **section: Any) -> Evaluator:
    roles = table.folder / "roles"
    roles.mkdir(exist_ok=True)
    (roles / "admin.token").write_text(TOKEN)
    (roles / "service.json").write_text(f'{{"url": "{table.stage.live.url}", "pid": 1}}')
    config = table.config(**section)
    assert config.eval is not None
    return Evaluator(RoleContext("evaluator", table.folder, config, table.folder / "model"), config.eval)


def until_done(made: Evaluator, steps: int) -> None:
    """Runs the role until it has answered for so many steps."""
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: sum(made.desk.done(due.step) is not None for due in made.desk.asked()) == steps, "the end", 30)
    finally:
        made.stopping.set()
        thread.join(10)
    assert not thread.is_alive()


def test_the_role_plays_what_is_due_and_puts_down_what_came_of_it(table: Table) -> None:
    made = evaluator(table)
    made.desk.ask(Due(3, VERSION - 1, "hold", time.time()))  # not in force any more
    made.desk.ask(Due(4, VERSION, "hold", time.time()))
    made.desk.ask(Due(5, VERSION, "job", time.time(), refused="too many"))
    until_done(made, 3)
    states = {line["eval/train_step"]: (line["state"], line["reason"]) for line in made.desk.outcomes()}
    assert states[3] == ("failed", "version 3 was published before the evaluation of 2 was done")
    assert states[4] == ("done", "")
    assert states[5] == ("refused", "too many")
    assert read_rows(made.desk.folder(3)) == []


def test_what_an_environment_does_wrong_is_reported_and_the_next_one_is_played(table: Table, tmp_path: Path) -> None:
    made = evaluator(table, tasks=str(tmp_path / "gone.jsonl"))
    made.desk.ask(Due(4, VERSION, "hold", time.time()))
    until_done(made, 1)
    (line,) = made.desk.outcomes()
    assert line["state"] == "failed"
    assert "gone.jsonl" in line["reason"]


def test_a_wish_to_stop_leaves_what_is_owed(table: Table) -> None:
    made = evaluator(table)
    table.stage.engine.hold()
    made.desk.ask(Due(4, VERSION, "hold", time.time()))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    wait_for(lambda: table.stage.engine.running, "a request", 20)
    made.stopping.set()
    thread.join(20)
    assert not thread.is_alive()
    assert [due.step for due in made.desk.pending()] == [4]
    assert made.desk.outcomes() == []


def test_a_version_that_is_published_too_early_ends_the_evaluation(table: Table) -> None:
    force = InForce(table.client, VERSION)
    assert force() is None
    table.stage.live.service.buffer.record_publish(VERSION + 1, 5)
    assert InForce(table.client, VERSION)() == "version 4 was published before the evaluation of 3 was done"
