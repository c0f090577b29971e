"""The supervised warm start: transcripts of a JSONL file, rendered by the service, learned by maximum likelihood.

In: the file and the backend. Out: trained weights and one metrics record per step. It waits for the service's rendering.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from palestra.server.types import RenderedRow
from palestra.trainer.batches import micro_batches, supervised_rows
from palestra.trainer.config import SftConfig
from palestra.trainer.losses import nll_loss
from palestra.trainer.schedule import SCHEDULES
from palestra.trainer.types import Backend, RolloutService, StepRecord, TrainerError

RENDER_AT_ONCE = 256
"""Transcripts per call of the service."""


def read_transcripts(path: Path) -> list[dict[str, Any]]:
    """The file's transcripts.

    Raises:
        TrainerError: it cannot be read, is empty, or a line is broken; the message has its number.
    """
    out: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    out.append(_transcript(line, f"{path}:{number}"))
    except OSError as error:
        raise TrainerError(f"sft.data cannot be read: {error}") from error
    if not out:
        raise TrainerError(f"sft.data {path} has no transcripts")
    return out


def _transcript(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise TrainerError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise TrainerError(f'{where} is not an object with "messages"')
    return value


def _batches(rows: list[RenderedRow], size: int, seed: int) -> Iterator[list[RenderedRow]]:
    """Batches without end: every row once per pass, each pass in an order of its own."""
    drawn = random.Random(seed)
    waiting: list[RenderedRow] = []
    while True:
        while len(waiting) < size:
            waiting += drawn.sample(rows, len(rows))
        yield waiting[:size]
        waiting = waiting[size:]


def warm_start(
    backend: Backend,
    service: RolloutService,
    settings: SftConfig,
    max_tokens: int,
    record: Callable[[StepRecord], None],
    stop: Callable[[], bool],
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Trains `settings.steps` steps, then forgets the optimizer's state. False where `stop` cut it short.

    Raises:
        TrainerError: the data is unusable.
    """
    transcripts = read_transcripts(settings.data)
    starts = range(0, len(transcripts), RENDER_AT_ONCE)
    rows = [row for start in starts for row in service.render(transcripts[start : start + RENDER_AT_ONCE])]
    rows = [row for row in rows if row.loss_mask[1:].any()]
    if not rows:
        raise TrainerError(f"sft.data {settings.data}: no assistant turn to learn from")
    drawn = _batches(rows, settings.batch_size, settings.seed)
    for step in range(1, settings.steps + 1):
        if stop():
            return False
        say(f"warms up: supervised step {step} of {settings.steps}")
        packings = micro_batches(supervised_rows(next(drawn)), max_tokens)
        stats = backend.forward_backward([packing.batch for packing in packings], nll_loss)
        rate = SCHEDULES[settings.schedule](step, settings.lr, settings.warmup_steps, settings.steps)
        update = backend.optim_step(rate)
        record(
            {
                "sft_step": step,
                "sft_steps": settings.steps,
                "sft/loss": stats.loss,
                "sft/grad_norm": update.grad_norm,
                "sft/lr": rate,
            }
        )
    backend.reset_optimizer()
    return True
