"""The processes that `buffer.py` starts from itself: `--role service|crash|claim ARGUMENT...`.

In: a role's arguments. Out: the service's URL in a file; of the others, a line of JSON on stdout for each thing that is done for good.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from benchmarks.buffer_groups import LENGTHS, SIZE, make_group
from benchmarks.buffer_stores import LEASE_S, OWNER
from palestra.server.buffer.embedded import EmbeddedBuffer

AT_A_TIME = 8
"""Groups that the role `crash` puts in one call; it takes half as many, so that there is always something left."""


def play(role: str, *arguments: str) -> int:
    """Runs one role; the exit status."""
    if role == "service":
        store, token, ready = arguments
        return 0 if serve(Path(store), token, Path(ready)) else 1
    (store,) = arguments
    return {"crash": work, "claim": claim}[role](Path(store))


def serve(store: Path, token: str, ready: Path) -> bool:
    """The rollout service on a store folder, without an engine; False where it did not start."""
    from palestra.server.app import build_app
    from palestra.server.app import serve as serve_app
    from palestra.server.gateway.session import SessionLimits
    from palestra.server.listen import bind, url_of
    from palestra.server.plan.types import PlanSettings
    from palestra.server.renderer.registry import load_renderer
    from palestra.server.service import RolloutService, ServiceSettings
    from palestra.server.types import PublishMode
    from palestra.server.workers.types import EnginePlace
    from tests.tokenizers import cached, smollm2_folder

    class WithoutEngine(RolloutService):
        """Groups come and go; nobody samples."""

        async def start(self) -> None:
            """Picks up what a former process left, and connects to nothing."""
            await self.plan.recover()

    plan = PlanSettings(
        groups_per_step=AT_A_TIME,
        group_size=SIZE,
        staleness=1 << 40,
        last_step=1,
        drop_zero_variance=False,
        retries=0,
        seed=0,
        shuffle=False,
        rollout_deadline_s=3600.0,
    )
    settings = ServiceSettings(
        store=store,
        engine=EnginePlace("http://127.0.0.1:9"),
        model="bench",
        limits=SessionLimits(max_turns=8, max_response=1024, max_context=65_536, temperature=1.0),
        plan=plan,
        update_mode=PublishMode.RETRACT,
        deadline_s=60.0,
    )
    app = build_app(WithoutEngine(settings, load_renderer(cached(smollm2_folder))), token)
    listener = bind("127.0.0.1", 0)

    def say() -> None:
        aside = ready.with_suffix(".new")
        aside.write_text(url_of(listener))
        aside.replace(ready)

    return serve_app([(app, listener)], say)


def work(store: Path) -> int:
    """Puts groups, takes some, and commits some of those, until it is killed."""
    buffer = EmbeddedBuffer(store)
    held: list[str] = []
    for number in itertools.count():
        names = [f"k{number}-{index}" for index in range(AT_A_TIME)]
        buffer.put([make_group(name, LENGTHS[0], index) for index, name in enumerate(names)])
        _say("put", names)
        held += [group.group_id for group in buffer.claim(AT_A_TIME // 2, OWNER, LEASE_S)]
        done, held = held[:3], held[3:]
        buffer.commit(number, "benchmark", done, OWNER)
        _say("committed", done)
    raise AssertionError("unreachable")


def claim(store: Path) -> int:
    """Opens what a killed process left, and takes one group."""
    began = time.perf_counter()
    buffer = EmbeddedBuffer(store)
    groups = buffer.claim(1, OWNER, LEASE_S)
    seconds = time.perf_counter() - began
    _say("claimed", [group.group_id for group in groups])
    _say("seconds", seconds)
    buffer.close()
    return 0


def _say(what: str, value: object) -> None:
    print(json.dumps({what: value}), flush=True)
