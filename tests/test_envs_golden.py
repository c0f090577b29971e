"""Golden episodes of the built-in environments: what was written down for each, played again.

A file of `tests/golden` holds episodes of one environment: a task, the policy's messages, and what has to come of them. Every built-in has
at least one that earns the full reward, one that earns nothing, one of malformed replies and one that a limit cuts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.registry import make_env

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))
KINDS = {"full", "zero", "malformed", "truncated"}
WALKS = {"code", "humaneval", "math", "reasoninggym"}
"""Their episodes start processes."""


def _cases() -> list[Any]:
    cases = []
    for path in FILES:
        marks = [pytest.mark.walk] if path.stem in WALKS else []
        content = json.loads(path.read_text())
        cases += [
            pytest.param(content, episode, id=f"{path.stem}-{episode['name']}", marks=marks)
            for episode in content["episodes"]
        ]
    return cases


@pytest.mark.parametrize(("content", "golden"), _cases())
def test_a_golden_episode_is_scored_as_it_was(content: dict[str, Any], golden: dict[str, Any]) -> None:
    env = make_env(content["env"], content.get("args", {}) | golden.get("args", {}))
    try:
        policy = ScriptedPolicy(golden["actions"])
        episode = play(env, policy, Limits(max_turns=golden["max_turns"]), task=golden["task"], seed=0)
    finally:
        env.close()
    assert episode.error is None
    assert (str(episode.stop_reason), episode.truncated) == (golden["stop"], golden["truncated"])
    assert episode.reward.value == pytest.approx(golden["reward"], abs=1e-6)
    assert dict(episode.reward.components) == pytest.approx(golden["components"], abs=1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kind_of_episode_is_there(path: Path) -> None:
    episodes = {episode["name"]: episode for episode in json.loads(path.read_text())["episodes"]}
    assert episodes.keys() >= KINDS
    assert episodes["full"]["reward"] == 1.0
    assert episodes["zero"]["reward"] <= 0.0
    assert episodes["truncated"]["truncated"]
