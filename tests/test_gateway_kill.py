"""kill -9 of the service with 64 sessions in flight, twice: every acknowledged turn is there afterwards, once, and nobody was told."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live import wait_for
from tests.outsiders import check_acknowledged, play
from tests.served import Served

pytestmark = [pytest.mark.walk, pytest.mark.timeout(400)]
SESSIONS, TURNS = 64, 5


def test_kill_9_with_64_sessions_in_flight(tmp_path: Path, tiny_moe: Path) -> None:
    served = Served(tmp_path, tiny_moe)
    try:
        client = served.up()
        handles = [client.open(max_turns=TURNS) for _ in range(SESSIONS)]
        heard: list[tuple[int, str]] = []
        with ThreadPoolExecutor(SESSIONS) as pool:
            runs = [pool.submit(play, handle, n, heard, TURNS) for n, handle in enumerate(handles)]
            for share in (0.25, 0.6):
                wait_for(lambda share=share: len(heard) > share * SESSIONS * TURNS, "replies", 200)
                pid = served.pid("service")
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda pid=pid: served.ready() and served.pid("service") != pid, "the service's return", 100)
            acknowledged = [run.result(200) for run in runs]
        check_acknowledged(client, handles, acknowledged)
    finally:
        served.down()
