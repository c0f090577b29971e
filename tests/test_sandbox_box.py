"""What a box makes of an agent that code got at: whatever it answers, the caller gets one of our errors, or a result that says so."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.sandbox.box import AgentBox
from palestra.sandbox.types import BoxFileError, BoxProtocolError, BoxSpec

RESULT = {"why": "", "exit": 0, "stdout": b"", "stderr": b"", "total": 0, "truncated": 0, "wall_s": 0.1, "cpu_s": 0.1}
LISTING = {"names": ["a"], "kinds": ["file"], "sizes": [1], "modes": [0o644], "targets": [""]}


class Subverted:
    """A channel whose other end answers what it likes."""

    alive = True

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    async def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:  # noqa: ASYNC109 - the interface
        return dict(self.answer)

    async def close(self) -> None:
        self.alive = False


def box(answer: dict[str, Any]) -> AgentBox:
    async def destroy() -> None: ...

    nobody: Any = None
    return AgentBox("box", BoxSpec(), Subverted(answer), nobody, destroy)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stdout": 10**9},
        {"stdout": "text"},
        {"stderr": None},
        {"exit": "none"},
        {"exit": [0]},
        {"wall_s": b""},
        {"total": {}},
        {"oom": "many"},
        {"pids": [1]},
    ],
    ids=str,
)
async def test_a_result_that_is_none_ends_the_box(wrong: dict[str, Any]) -> None:
    made = box({**RESULT, **wrong})
    result = await made.exec(["true"])
    assert (result.status, made.alive) == ("session_lost", False)
    assert "agent" in result.message


@pytest.mark.parametrize("missing", sorted(RESULT))
async def test_half_a_result_ends_the_box(missing: str) -> None:
    made = box({name: value for name, value in RESULT.items() if name != missing})
    assert (await made.run_python("1")).status == "session_lost"
    assert not made.alive


async def test_a_peak_that_is_no_number_is_none() -> None:
    assert (await box({**RESULT, "peak": "much"}).exec("true")).usage.peak_bytes is None


async def test_a_run_that_the_agent_refuses_says_why() -> None:
    result = await box({"error": "something runs already"}).exec("true")
    assert (result.status, result.message) == ("nonzero", "not run: something runs already")


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": ["../../etc/passwd"]},
        {"names": [".."]},
        {"names": [""]},
        {"names": [7]},
        {"names": ["a", "b"]},
        {"kinds": ["door"]},
        {"sizes": ["large"]},
        {"modes": [None]},
        {"names": 1},
    ],
    ids=str,
)
async def test_a_listing_that_leads_elsewhere_is_not_believed(wrong: dict[str, Any]) -> None:
    with pytest.raises(BoxProtocolError):
        await box({**LISTING, **wrong}).list()
    with pytest.raises(BoxProtocolError):
        await box({**LISTING, **wrong}).export()


@pytest.mark.parametrize(
    "answer", [{}, {"data": 10**9, "size": 1}, {"data": b"", "size": "much"}, {"size": 1}], ids=str
)
async def test_a_file_that_is_none_is_not_believed(answer: dict[str, Any]) -> None:
    with pytest.raises(BoxProtocolError):
        await box(answer).get("x")


async def test_a_file_that_never_ends_is_cut() -> None:
    with pytest.raises(BoxFileError, match="at most 5 were asked for"):
        await box({"data": b"1234567890", "size": 10}).get("x", max_bytes=5)
    assert await box({"data": b"1234567890", "size": 3}).get("x", max_bytes=5) == b"12345"


async def test_a_session_needs_a_number() -> None:
    with pytest.raises(BoxProtocolError):
        await box({"session": "first"}).open_session("bash")


async def test_bad_wishes_are_refused_before_anything_is_sent() -> None:
    made = box(RESULT)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            await made.exec("true", timeout=wrong)
    with pytest.raises(ValueError, match="max_output"):
        await made.exec("true", max_output=-1)
    with pytest.raises(ValueError, match="empty command"):
        await made.exec([])
    kind: Any = "perl"
    with pytest.raises(ValueError, match="known: python, bash"):
        await made.open_session(kind)
