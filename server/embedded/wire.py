"""The wire: SGLang's JSON in and out. What is asked for and not built is refused by name, never ignored.

In: JSON bodies. Out: a `GenerateCall`, or the answer of a `GenerateResult`. Waits for nothing.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from palestra.server.embedded.types import GenerateCall, GenerateResult, RequestRefused, Shaping

DEFAULT_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6
"""Temperatures under it are greedy, as SGLang has it: dividing by them leaves no numbers."""
MAX_BIAS = 1e6
"""Larger ones would swallow the logits' own digits, or overflow."""
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
FIXED = {
    (name,)
    for name in (
        "n",
        "stream",
        "is_async",
        "keep_pause",
        "action",
        "selector",
        "return_text_in_logprobs",
        "abort_all_requests",
        "load_format",
    )
}
"""Fields of which only one value is built."""


class Wire(BaseModel):
    """A body that may have no other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingBody(Wire):
    """`sampling_params`, with SGLang's bounds. `n` has one allowed value and is there because clients send it."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    max_new_tokens: int = Field(default=DEFAULT_NEW_TOKENS, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=MAX_STOPS)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    sampling_seed: int | None = None
    no_stop_trim: bool = True
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = True
    n: Literal[1] = 1
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, given: object) -> object:
        """A text alone is a list of one; null is none."""
        if given is None:
            return []
        return [given] if isinstance(given, str) else given

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, given: int) -> int:
        if given == 0:
            raise ValueError("0 leaves no token: -1 keeps all")
        return given

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        return self


class GenerateBody(Wire):
    """POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    rid: str = ""
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    """Logprobs of the prompt from this place on, with `return_logprob`; the first of them is always null."""
    top_logprobs_num: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Reported with `return_logprob` only, as SGLang has it."""
    return_text_in_logprobs: Literal[False] = False
    stream: Literal[False] = False
    return_routed_experts: bool = False
    extra_key: str | None = None
    forced_ids: list[int] = Field(default_factory=list)


class AbortBody(Wire):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class PauseBody(Wire):
    """POST /pause_generation."""

    mode: str = "abort"


class EmptyBody(Wire):
    """POST /continue_generation, POST /flush_cache."""

    torch_empty_cache: bool = True
    """SGLang's; there is nothing to empty here."""


def explain(fault: ValidationError) -> str:
    """One line per wrong field, named by its path."""
    lines = []
    for error in fault.errors(include_url=False):
        where = ".".join(str(part) for part in error["loc"]) or "body"
        text = "unknown field" if error["type"] == "extra_forbidden" else error["msg"]
        # Fields of one allowed value exist only to say that the others are not built.
        built = "" if error["loc"][-1:] not in FIXED else f"{error['input']!r} is not built: "
        lines.append(f"{where}: {built}{text}")
    return "; ".join(lines)


def to_call(
    body: GenerateBody, *, vocab_size: int, context_length: int, end_ids: frozenset[int], allow_forced: bool
) -> GenerateCall:
    """Checks a request against the model.

    Raises:
        RequestRefused: ids outside the vocabulary, a prompt that leaves no room, wishes that leave no token to draw, a test option
            that is not enabled.
    """
    params, prompt = body.sampling_params, body.input_ids
    if bad := [i for i in (*prompt, *body.forced_ids) if not 0 <= i < vocab_size]:
        raise RequestRefused(f"ids outside the vocabulary of {vocab_size}: {bad[:5]}")
    if len(prompt) >= context_length:
        raise RequestRefused(
            f"the prompt has {len(prompt)} tokens, but the context window of {context_length} leaves room for a completion only "
            f"after at most {context_length - 1}"
        )
    if body.return_logprob and body.logprob_start_len > len(prompt):
        raise RequestRefused(f"logprob_start_len {body.logprob_start_len} is beyond the prompt's {len(prompt)} tokens")
    scored = body.return_logprob and 0 <= body.logprob_start_len < len(prompt)
    if scored and body.top_logprobs_num:
        raise RequestRefused(
            "top_logprobs_num with logprob_start_len: alternatives of the prompt's tokens are not built"
        )
    if body.forced_ids and not allow_forced:
        raise RequestRefused("forced_ids is a test option: start the engine with --allow-forced-ids")
    stop_ids = end_ids | frozenset(params.stop_token_ids)
    return GenerateCall(
        rid=body.rid or secrets.token_hex(16),
        prompt=tuple(prompt),
        temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
        max_new_tokens=min(params.max_new_tokens, context_length - len(prompt)),
        # As SGLang has it, ignore_eos switches off every stop id.
        stop_ids=frozenset() if params.ignore_eos else stop_ids,
        seed=secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,
        forced_ids=tuple(body.forced_ids),
        want_experts=body.return_routed_experts,
        extra_key=body.extra_key or "",
        stop=tuple(params.stop),
        top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
        shaping=to_shaping(params, stop_ids, vocab_size),
        input_from=body.logprob_start_len if scored else -1,
    )


def to_shaping(params: SamplingBody, stop_ids: frozenset[int], vocab_size: int) -> Shaping | None:
    """What the request changes of the distribution; None where it changes nothing, so that plain requests cost no more.

    Raises:
        RequestRefused: a bias for no id of the vocabulary, or every id held back.
    """
    # Only ids that the model has can be held back.
    held = tuple(sorted(i for i in stop_ids if 0 <= i < vocab_size)) if params.min_new_tokens else ()
    if len(held) == vocab_size:
        raise RequestRefused("min_new_tokens: every id of the vocabulary is a stop id, so there is none to draw")
    shaping = Shaping(
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=_bias(params.logit_bias or {}, vocab_size),
        min_new_tokens=params.min_new_tokens,
        held_ids=held,
    )
    return None if shaping == Shaping() else shaping


def _bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Ids as numbers, each once: of "7" and "07" the last one counts."""
    found: dict[int, float] = {}
    for key, value in given.items():
        try:
            token = int(key)
        except ValueError as fault:
            raise RequestRefused(f"logit_bias: {key[:40]!r} is no id") from fault
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"logit_bias: id {key[:40]} is outside the vocabulary of {vocab_size}")
        found[token] = value
    return tuple(found.items())


def _input_logprobs(call: GenerateCall, result: GenerateResult) -> list[list[Any]]:
    """Empty where none were asked for, or the request was aborted before its prompt was read."""
    if result.input_logprobs is None:
        return []
    start = call.input_from
    return [
        [logprob, token, None]
        for logprob, token in zip((None, *result.input_logprobs), call.prompt[start:], strict=True)
    ]


def to_answer(
    call: GenerateCall, result: GenerateResult, version: str, seconds: float, *, logprobs: bool
) -> Mapping[str, Any]:
    """The body of the answer. `text` is empty: this engine decodes nothing but what stop texts are looked for in."""
    meta: dict[str, Any] = {
        "id": call.rid,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(call.prompt),
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.cached_tokens,
        "weight_version": result.versions[-1][0] if result.versions else version,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in result.versions],
        "queue_time": result.queue_s,
        "num_retractions": result.retractions,
        "e2e_latency": seconds,
    }
    if logprobs:
        meta["input_token_logprobs"] = _input_logprobs(call, result)
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(result.logprobs, result.token_ids, strict=True)
        ]
        if call.top_logprobs:
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for logprob, token in top] for top in result.top_logprobs
            ]
    if result.experts is not None:
        meta["routed_experts"] = base64.b64encode(result.experts.tobytes()).decode()
        meta["routed_experts_shape"] = list(result.experts.shape)
    return {"text": "", "output_ids": list(result.token_ids), "meta_info": meta}
