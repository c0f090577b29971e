"""The LangGraph example as it is, one compiled graph and one base URL for 32 sessions at once: exact tokens, also across weight updates.

The ids are forced by the engine's test option; logprobs, batching, tools, streaming and the clients are real.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from palestra.agents.session import playing
from palestra.agents.types import AgentContext, SessionHandle
from palestra.envs.types import Task
from palestra.server.client import ServiceClient
from palestra.server.renderer.registry import load_renderer
from palestra.server.rows import trajectory_rows
from palestra.server.types import TokenSource, Trajectory
from tests.live import TOKEN, LiveService, engine_process, settings
from tests.tiny import make_tiny_moe

pytestmark = [pytest.mark.walk, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "langgraph_agent" / "agent.py"
SESSIONS = 32
TOOL_TURNS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of weights of one shape, with a window for long conversations."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_moe(folder / str(seed), seed, max_position_embeddings=4096) for seed in range(3)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Iterator[LiveService]:
    limits = {"max_turns": 16, "max_response": 200, "max_context": 4000, "staleness": 1000, "drop_zero_variance": False}
    flags = ("--context-length", "4096", "--allow-forced-ids", "--max-running", "32")
    with (
        engine_process(models[0], *flags) as engine,
        LiveService(settings(tmp_path_factory.mktemp("graph") / "store", engine, **limits), models[0]) as service,
    ):
        yield service


@pytest.fixture
def service(live: LiveService) -> Iterator[ServiceClient]:
    client = ServiceClient(live.url, TOKEN)
    yield client
    client.close()


@pytest.fixture
def example(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, imported once with the one base URL in its environment."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{live.url}/v1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    spec = importlib.util.spec_from_file_location("langgraph_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(model: Path, number: int, filler: int) -> list[list[int]]:
    """Six calls whose arguments name the session, split byte by byte (no text round trip gives these ids), then the answer."""
    renderer = load_renderer(model)
    codec, end = renderer.codec, renderer.stop_ids[0]
    assert renderer.call_end is not None
    call = codec.special_id("<tool_call>")
    turns = []
    for turn in range(TOOL_TURNS):
        text = f'\n{{"name":  "calculator", "arguments": {{"expression": "{number}*1000+{turn}"}}}}\n'
        thought = codec.encode_text("thinking " * filler)
        split = [token for char in text for token in codec.encode_text(char)]
        turns.append([*thought, call, *split, renderer.call_end, end])
    return [*turns, [*codec.encode_text(f"session {number} is done"), end]]


def play(example: ModuleType, handle: SessionHandle, number: int, streaming: bool, folder: Path) -> str:
    prompt = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": f"I am session {number}"}]
    task = Task(prompt[1]["content"], id=str(number))
    context = AgentContext(task, tuple(prompt), (), handle, folder, time.monotonic() + 120)
    with playing(context):
        return str((example.run_streaming if streaming else example.run)(prompt))


def play_all(
    example: ModuleType,
    service: ServiceClient,
    scripts: Sequence[Sequence[Sequence[int]]],
    folder: Path,
    meanwhile: Callable[[Sequence[SessionHandle]], None] = lambda handles: None,
) -> list[SessionHandle]:
    """All sessions at once, half of them streaming; `meanwhile` runs beside them."""
    handles = [service.open(forced=script) for script in scripts]
    with ThreadPoolExecutor(len(scripts)) as pool:
        runs = [pool.submit(play, example, h, n, n % 2 == 0, folder) for n, h in enumerate(handles)]
        meanwhile(handles)
        assert [run.result(200) for run in runs] == [f"session {n} is done" for n in range(len(scripts))]
    return handles


def check(trajectory: Trajectory, number: int, script: Sequence[Sequence[int]], vocab: int) -> None:
    """One session: its own tokens, all of them, in one unbroken row, each trained once."""
    turns = trajectory.turns
    assert [turn.completion_ids.tolist() for turn in turns] == [list(ids) for ids in script]
    assert [(turn.parent, turn.fork_reason, turn.delivered) for turn in turns] == [
        (i - 1 if i else None, None, True) for i in range(TOOL_TURNS + 1)
    ]
    (row,) = trajectory_rows(trajectory)
    assert row.loss_mask.sum() == sum(map(len, script))
    assert (row.sources[row.loss_mask == 1] == TokenSource.SAMPLED).all()
    sampled = row.logprobs[row.loss_mask == 1]
    assert np.isfinite(sampled).all()
    assert sampled.std() > 0.1, "logprobs are not uniform"
    assert abs(sampled.mean() + np.log(vocab)) < 5
    said = json.dumps([message for turn in turns for message in turn.messages])
    for turn in range(TOOL_TURNS):
        assert f'"content": "{number * 1000 + turn}"' in said, "the tool's own result came back to its own session"
    assert f"I am session {number}" in said


def test_32_sessions_through_one_graph(
    example: ModuleType, live: LiveService, service: ServiceClient, models: list[Path], tmp_path: Path
) -> None:
    scripts = [script(models[0], number, 0) for number in range(SESSIONS)]
    vocab = load_renderer(models[0]).codec.vocab_size
    for number, handle in enumerate(play_all(example, service, scripts, tmp_path)):
        service.reward(handle, 1.0)
        service.close_with(handle)
        check(service.trajectory(handle), number, scripts[number], vocab)
    ledger = service.ledger()
    assert ledger["balanced"]
    assert ledger["sampled"] == sum(len(ids) for script in scripts for ids in script)


def test_weights_change_under_32_running_sessions(
    example: ModuleType, live: LiveService, service: ServiceClient, models: list[Path], tmp_path: Path
) -> None:
    """Two publishes in the middle: nobody sees an error, and every token has the version that sampled it."""
    scripts = [script(models[0], number, 12) for number in range(SESSIONS)]
    half = threading.Event()

    def publish(handles: Sequence[SessionHandle]) -> None:
        for version, share in ((1, 0.3), (2, 0.6)):
            wanted = share * SESSIONS * (TOOL_TURNS + 1)
            while sum(live.service.sessions.by_id(h.rollout_id).turns for h in handles) < wanted:
                half.wait(0.01)
            service.publish_begin(version, version)
            service.publish_end(version, str(models[version]))

    before = service.ledger()["sampled"]
    handles = play_all(example, service, scripts, tmp_path, publish)
    versions, mixed = set[int](), 0
    for number, handle in enumerate(handles):
        service.reward(handle, 0.0)
        service.close_with(handle)
        trajectory = service.trajectory(handle)
        check(trajectory, number, scripts[number], load_renderer(models[0]).codec.vocab_size)
        versions |= {span.version for turn in trajectory.turns for span in turn.spans}
        mixed += sum(len({span.version for span in turn.spans}) > 1 for turn in trajectory.turns)
        for turn in trajectory.turns:
            assert [span.version for span in turn.spans] == sorted(span.version for span in turn.spans)
    assert versions == {0, 1, 2}
    assert mixed > 0, "no reply was under way during an update"
    ledger = service.ledger()
    assert ledger["balanced"]
    assert ledger["sampled"] - before == sum(len(ids) for script in scripts for ids in script)
