"""The wire: SGLang's JSON in and out. What is asked for and not built is refused by name, never ignored.

In: JSON bodies. Out: a `GenerateCall`, or the answer of a `GenerateResult`. Waits for nothing.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.server.embedded.types import GenerateCall, GenerateResult, RequestRefused

DEFAULT_NEW_TOKENS = 128
FIXED = {
    (name,)
    for name in (
        *(
            "n",
            "top_p",
            "top_k",
            "min_p",
            "min_new_tokens",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        ),
        *(
            "stream",
            "logprob_start_len",
            "top_logprobs_num",
            "return_text_in_logprobs",
            "abort_all_requests",
            "load_format",
        ),
    )
}
"""Fields of which only one value is built."""


class Wire(BaseModel):
    """A body that may have no other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingBody(Wire):
    """`sampling_params`. Fields with one allowed value are there because clients send them: the distribution is never cut."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    max_new_tokens: int = Field(default=DEFAULT_NEW_TOKENS, ge=1)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    sampling_seed: int | None = None
    no_stop_trim: bool = True
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = True
    n: Literal[1] = 1
    top_p: float = Field(default=1, ge=1, le=1)
    top_k: Literal[-1] = -1
    min_p: float = Field(default=0, ge=0, le=0)
    min_new_tokens: Literal[0] = 0
    frequency_penalty: float = Field(default=0, ge=0, le=0)
    presence_penalty: float = Field(default=0, ge=0, le=0)
    repetition_penalty: float = Field(default=1, ge=1, le=1)


class GenerateBody(Wire):
    """POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    rid: str = ""
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: Literal[0] = 0
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


class DiskBody(Wire):
    """POST /update_weights_from_disk. `flush_cache` may be anything: the cache of old weights is never used again."""

    model_path: str
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False


class TensorBody(Wire):
    """POST /update_weights_from_tensor."""

    serialized_named_tensors: list[str]
    load_format: Literal["safetensors"]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False


class VersionBody(Wire):
    """POST /begin_weight_update, POST /end_weight_update."""

    weight_version: str | None = None
    flush_cache: bool = True


class EmptyBody(Wire):
    """POST /continue_generation, POST /flush_cache."""


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
        RequestRefused: ids outside the vocabulary, a prompt that leaves no room, a test option that is not enabled.
    """
    params, prompt = body.sampling_params, body.input_ids
    if bad := [i for i in (*prompt, *body.forced_ids) if not 0 <= i < vocab_size]:
        raise RequestRefused(f"ids outside the vocabulary of {vocab_size}: {bad[:5]}")
    if len(prompt) >= context_length:
        raise RequestRefused(
            f"the prompt has {len(prompt)} tokens, but the context window of {context_length} leaves room for a completion only "
            f"after at most {context_length - 1}"
        )
    if body.forced_ids and not allow_forced:
        raise RequestRefused("forced_ids is a test option: start the engine with --allow-forced-ids")
    return GenerateCall(
        rid=body.rid or secrets.token_hex(16),
        prompt=tuple(prompt),
        temperature=params.temperature,
        max_new_tokens=min(params.max_new_tokens, context_length - len(prompt)),
        # As SGLang has it, ignore_eos switches off every stop id.
        stop_ids=frozenset() if params.ignore_eos else end_ids | frozenset(params.stop_token_ids),
        seed=secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,
        forced_ids=tuple(body.forced_ids),
        want_experts=body.return_routed_experts,
        extra_key=body.extra_key or "",
    )


def to_answer(
    call: GenerateCall, result: GenerateResult, version: str, seconds: float, *, logprobs: bool
) -> Mapping[str, Any]:
    """The body of the answer. `text` is empty: this engine has no tokenizer."""
    meta: dict[str, Any] = {
        "id": call.rid,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(call.prompt),
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.cached_tokens,
        "weight_version": result.versions[-1][0] if result.versions else version,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in result.versions],
        "e2e_latency": seconds,
    }
    if logprobs:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(result.logprobs, result.token_ids, strict=True)
        ]
    if result.experts is not None:
        meta["routed_experts"] = base64.b64encode(result.experts.tobytes()).decode()
        meta["routed_experts_shape"] = list(result.experts.shape)
    return {"text": "", "output_ids": list(result.token_ids), "meta_info": meta}
