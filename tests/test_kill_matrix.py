"""kill -9 of each part at random points of a real tiny run, resumed each time: laws 3 and 6 at every point, and no task lost or repeated.

The points follow from a seed, which is printed: PALESTRA_SEED=N repeats them, as far as two runs are alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.jobs import Job
from tests.killing import DATABASE, ROLES, Campaign, seed_of
from tests.tinyrun import tiny_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is; every job has a folder of its own beside it."""
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def database() -> Iterator[postgres.Server]:
    """A PostgreSQL server that is killed and started again."""
    yield from postgres.started()


def make_job(base: Path, name: str, **tables: dict[str, Any]) -> Job:
    """A run without a warm start whose episodes have three turns each, whatever the model says: three malformed guesses end the game."""
    tables = {
        "run": {"name": name, "save_every": 2},
        "env": {"id": "palestra/GuessTheNumber-v0", "args": {}, "concurrency": 32},
        "algo": {
            "max_turns": 4,
            "max_response": 12,
            "groups_per_step": 2,
            "group_size": 2,
            "drop_zero_variance": False,
        },
        **tables,
    }
    return Job(tiny_config(base, **tables).model_copy(update={"sft": None}))


def run_campaign(job: Job, victims: list[str], seed: int, server: postgres.Server | None = None) -> Campaign:
    """Kills the victims in a random order, one a life, then lets the run come to its end."""
    print(f"PALESTRA_SEED={seed}", flush=True)
    campaign = Campaign(job, random.Random(seed), server)
    campaign.draw.shuffle(victims)
    for victim in victims:
        campaign.strike(victim)
    campaign.finish()
    print(f"{campaign.replays} turns were given again", flush=True)
    return campaign


@pytest.mark.walk
@pytest.mark.timeout(1200)
def test_every_role_killed_twice_in_one_run(base: Path) -> None:
    seed = seed_of(1)
    run_campaign(make_job(base, "roles"), [*ROLES, *ROLES], seed)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_database_killed_twice_in_one_run(base: Path, database: postgres.Server) -> None:
    url = database.make_database("kills")
    job = make_job(base, "database", buffer={"url": url}, schedule={"kind": "one_step_off"})
    run_campaign(job, [DATABASE, DATABASE], seed_of(2), database)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
@pytest.mark.parametrize("part", range(2))
def test_many_kills_of_every_role(base: Path, kind: str, part: int) -> None:
    """Together twenty of each."""
    seed = seed_of(10 + part)
    job = make_job(base, f"many-{kind}-{part}", schedule={"kind": kind})
    campaign = run_campaign(job, [*ROLES] * 5, seed)
    assert campaign.replays, "no point lay within an episode"


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_many_kills_of_the_database(base: Path, database: postgres.Server) -> None:
    job = make_job(
        base, "many-database", buffer={"url": database.make_database("many")}, schedule={"kind": "one_step_off"}
    )
    run_campaign(job, [DATABASE] * 20, seed_of(20), database)
