"""Asking engines whether they have the weights that they should.

In: workers and the trainer's figures. Out: worker URL -> what is wrong with it. Waits for the engines, each call with a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.server.publishing.bodies import CanaryBody, EndBody
from palestra.server.publishing.calls import LOOK_S
from palestra.server.publishing.round import CONTROL_S, Round
from palestra.server.publishing.verify import canary_gap, comparable, tolerance, wrong_digests, wrong_versions
from palestra.server.types import EngineError
from palestra.server.workers.types import EngineKind, Fleet, Worker

log = logging.getLogger(__name__)


async def described(fleet: Fleet, kind: EngineKind, workers: Sequence[Worker]) -> Mapping[str, Mapping[str, Any]]:
    """What engines compute with: dtype, and of SGLang device and quantisation. Who does not answer is missing."""
    path = "/server_info" if kind == "sglang" else "/model_info"
    return (await fleet.look(workers, path, timeout_s=LOOK_S)).ok


async def wrong_weights(current: Round, body: EndBody) -> dict[str, EngineError | str]:
    """By version, and by content where the trainer gave digests."""
    fleet = current.engines.fleet
    infos = await fleet.look(current.workers, "/model_info", timeout_s=LOOK_S)
    wrong: dict[str, EngineError | str] = {**infos.failed, **wrong_versions(infos.ok, current.version)}
    asked = [worker for worker in current.workers if worker.url not in wrong]
    if body.digests is None or not asked:
        return wrong
    wanted = body.digests if comparable(current.kind, await described(fleet, current.kind, asked), body.dtype) else {}
    checked = await fleet.ask(asked, "/weights_checker", {"action": "checksum"}, timeout_s=current.deadline_s)
    return {**wrong, **checked.failed, **wrong_digests(checked.ok, wanted)}


async def canary_gaps(fleet: Fleet, kind: EngineKind, body: CanaryBody) -> tuple[dict[str, float], dict[str, str]]:
    """Largest difference of a logprob between trainer and engine, and what is wrong with those that are too far off.

    An engine that does not answer in time is not compared: it may have a long queue before the text, or be gone, which others find out.
    """
    workers = fleet.serving()
    allowed = tolerance(await described(fleet, kind, workers))
    asked = {
        "input_ids": body.ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answers = await fleet.ask(workers, "/generate", asked, timeout_s=CONTROL_S)
    for url, error in answers.failed.items():
        log.warning("worker %s: the logprobs of version %d were not compared: %s", url, body.version, error)
    gaps = {url: canary_gap(answer, body.logprobs) for url, answer in answers.ok.items()}
    wrong: dict[str, str] = {}
    for url, gap in gaps.items():
        if gap > allowed:
            off = f"{gap:.3g} off the trainer's, more than {allowed:g}"
            wrong[url] = f"{url}: logprobs of version {body.version} are {off}"
    return gaps, wrong
