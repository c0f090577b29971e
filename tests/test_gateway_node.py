"""A Node program with OpenAI's official client: tools, streams, Responses and errors arrive as it expects them, and all is on record."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import Heard, Stage, service_on_fake

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]
OPENAI = "openai@6.10.0"
"""The newest major version runs on Node 22 and later only; Debian 12 has 18, Debian 13 has 20."""
SCRIPT = Path(__file__).parent / "node" / "client.mjs"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds the client."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.fail(f"this test needs {tool}: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true}')
    npm = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", OPENAI]
    done = subprocess.run(npm, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with service_on_fake(tmp_path, max_turns=20, max_context=4000) as stage:
        codec, (end, *_) = stage.live.service.renderer.codec, stage.live.service.renderer.stop_ids

        def speak(draw: random.Random, heard: Heard) -> list[int]:
            if len(stage.engine.heard) > 1:
                return [*codec.encode_text("a few \u2603 words"), end]
            call = codec.encode_text('\n{"name": "look", "arguments": {"x": 7}}\n')
            return [codec.special_id("<tool_call>"), *call, codec.special_id("</tool_call>"), end]

        stage.engine.speak = speak
        yield stage


def test_the_official_node_client(stage: Stage, package: Path) -> None:
    opened = stage.admin("POST", "/v1/sessions", {"rollout_id": "node"})
    command = ["node", "client.mjs", opened["base_url"], opened["api_key"], opened["session_url"]]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    words = "a few \u2603 words"
    assert seen["calls"] == [{"name": "look", "arguments": {"x": 7}}]
    assert [seen["reply"], seen["streamed"], seen["gathered"], *seen["responses"]] == [words] * 5
    assert seen["chunks"] > 3
    assert seen["streamedUsage"]["completion_tokens"] == seen["usage"]["completion_tokens"]
    assert seen["events"][0] == "response.created"
    assert seen["events"][-1] == "response.completed"
    assert seen["refused"] == ["BadRequestError", 400, "sampling_refused"]
    assert seen["unknown"] == ["AuthenticationError", 401]
    assert seen["models"] == ["tiny"]
    turns = stage.turns("node")
    assert [turn.parent for turn in turns] == [None, 0, 1, None, None, 4, 5]
    assert all(turn.delivered for turn in turns)
    assert turns[2].messages[0]["content"] == "and \ufffd"
    assert [one.ids for one in stage.engine.heard] == [turn.completion_ids.tolist() for turn in turns]
