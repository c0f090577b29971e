"""One request on its way through the engine, as the generation loop keeps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.server.embedded.sampling import Top, Wish, uniform
from palestra.server.embedded.stops import StopWatch
from palestra.server.embedded.types import GenerateCall, GenerateResult


@dataclass(slots=True, eq=False)
class Job:
    """Tokens so far, and where their keys and values are."""

    call: GenerateCall
    order: int
    """Order of arrival; the queue is kept in it, so a retracted request comes first again."""
    watch: StopWatch | None = None
    """Looks for the call's stop texts; None where it has none."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and completion."""
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    """Likeliest tokens at each place of the completion, where the call asks for them."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    filled: int = 0
    """Leading tokens whose keys and values are in the slot."""
    epoch: int = 0
    """Weight epoch of the oldest of them."""
    reading: bool = False
    """Runs, and has not been read to its end yet: siblings wait for its pages."""
    cached: int | None = None
    """Prompt tokens found in the prefix store when it first ran."""
    names: list[bytes] = field(default_factory=list)
    """Names of its whole pages, as far as they were needed."""
    scored: list[float] = field(default_factory=list)
    """Logprobs of the prompt's ids after `input_from`, as far as they were read."""
    arrived: float = field(default_factory=time.perf_counter)
    """When it came, seconds of `time.perf_counter`."""
    started: float | None = None
    """When it first ran."""
    retractions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.call.prompt)

    @property
    def completion(self) -> list[int]:
        """Ids after the prompt."""
        return self.tokens[len(self.call.prompt) :]

    @property
    def sampled(self) -> int:
        """Number of ids after the prompt."""
        return len(self.tokens) - len(self.call.prompt)

    @property
    def unscored(self) -> int:
        """The first place of the prompt whose id has no logprob yet but shall get one; behind the prompt's end where there is none."""
        start, end = self.call.input_from, len(self.call.prompt)
        return end if start < 0 else min(start + 1 + len(self.scored), end)

    def started_running(self) -> None:
        """Has a slot. A prompt that was scored in part is scored anew: pieces of it may have been read with older weights."""
        if self.started is None:
            self.started = time.perf_counter()
        if self.unscored < len(self.call.prompt):
            self.scored.clear()

    def wish(self) -> Wish:
        """How its next token is drawn."""
        call = self.call
        return Wish(
            call.temperature,
            uniform(call.seed, len(self.tokens)),
            forced=call.forced_ids[self.sampled] if self.sampled < len(call.forced_ids) else -1,
            top=call.top_logprobs,
            shaping=call.shaping,
            sampled=() if call.shaping is None else self.completion,
        )

    def append(self, token: int, logprob: float, version: str, top: Top = ()) -> dict[str, Any] | None:
        """Takes the next token. Returns the finish reason if it was the last one; a stop text comes before a stop id, as in SGLang."""
        at = self.sampled
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1], at + 1)
        else:
            self.versions.append((version, at, at + 1))
        if self.call.top_logprobs:
            self.tops.append(top)
        if self.watch is not None and (text := self.watch.check(self.tokens)) is not None:
            return {"type": "stop", "matched": text}
        if token in self.call.stop_ids:
            return {"type": "stop", "matched": token}
        if self.sampled >= self.call.max_new_tokens:
            return {"type": "length", "length": self.sampled}
        return None

    def result(self, reason: dict[str, Any], experts: NDArray[np.int16] | None = None) -> GenerateResult:
        """What is answered."""
        whole = self.call.input_from >= 0 and self.unscored == len(self.call.prompt)
        return GenerateResult(
            token_ids=tuple(self.completion),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            versions=tuple(self.versions),
            cached_tokens=self.cached or 0,
            experts=experts,
            top_logprobs=tuple(self.tops),
            input_logprobs=tuple(self.scored) if whole else None,
            queue_s=(self.started or time.perf_counter()) - self.arrived,
            retractions=self.retractions,
        )
