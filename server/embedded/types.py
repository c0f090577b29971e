"""Words of the embedded engine: its options, one call of /generate, what is answered, and its errors. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.server.types import ServerError


class EmbeddedError(ServerError):
    """Root of the embedded engine's errors. `status` is the HTTP status it is answered with."""

    status = 500


class RequestRefused(EmbeddedError):
    """The request cannot be served as it is: repeating it cannot help."""

    status = 400


class WeightsRefused(EmbeddedError):
    """New weights that do not fit or cannot be read. The model is as it was."""

    status = 400


class ModelRefused(EmbeddedError):
    """The model folder cannot be served: missing, or of an architecture that this engine does not know."""

    status = 400


class EngineDied(EmbeddedError):
    """The generation loop ended with a fault: nothing can be generated any more. Carries the cause."""

    status = 500


DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one engine process is set up. 0 means: derive it from the model."""

    model_path: str
    """A Hugging Face folder: config.json and safetensors."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    dtype: str = "float32"
    """One of DTYPES."""
    num_threads: int = 0
    """torch's threads; 0: torch's own choice."""
    context_length: int = 0
    """Prompt and completion together, tokens; 0: the model's max_position_embeddings."""
    max_running: int = 64
    """Requests in one batch; the others queue."""
    page_size: int = 16
    """Tokens per page of the prefix store: prefixes are shared in whole pages."""
    max_total_tokens: int = 0
    """Bounds the tokens of all running requests, and separately those of the prefix store; 0: 1 GiB of keys and values."""
    chunk_size: int = 512
    """Prompt tokens that one step reads at most, so that running requests go on while a long prompt is read."""
    allow_forced_ids: bool = False
    """Test option: requests may carry `forced_ids`."""
    update_timeout_s: int = 120
    """How long new weights that are broadcast are waited for, seconds: for the group to be complete, and for each broadcast."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not built: choose one of {', '.join(DTYPES)}")
        for name, least in (
            ("max_running", 1),
            ("page_size", 1),
            ("chunk_size", 2),
            ("context_length", 0),
            ("update_timeout_s", 1),
            ("port", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}")


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a request bends the distribution that it draws from. The logprobs that are reported know nothing of it."""

    top_p: float = 1.0
    """Tokens are kept from the likeliest on until their mass is more than this; in (0, 1]."""
    top_k: int = -1
    """Tokens kept, the likeliest; -1: all."""
    min_p: float = 0.0
    """Tokens under this share of the likeliest one's probability are dropped."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the completion has it already."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that the completion has."""
    repetition_penalty: float = 1.0
    """Positive logits of the completion's tokens are divided by it, negative ones multiplied; after the other two."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit); each id once."""
    min_new_tokens: int = 0
    """So many tokens are drawn before `held_ids` can be. A stop text may still end the completion earlier."""
    held_ids: tuple[int, ...] = ()
    """The model's end ids and the request's stop ids: those of a request that ignores them too."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One checked request."""

    rid: str
    prompt: tuple[int, ...]
    temperature: float
    """0 is greedy; logprobs are then those of temperature 1."""
    max_new_tokens: int
    """Already cut to what the context window leaves; 0: only the prompt is read."""
    stop_ids: frozenset[int]
    seed: int
    """A token's draw depends on the seed and the token's position only, so a resumed request draws what it would have drawn."""
    forced_ids: tuple[int, ...] = ()
    """Emitted instead of sampled ones; logprobs stay the model's."""
    want_experts: bool = False
    extra_key: str = ""
    """Requests share cached prefixes only within one key."""
    stop: tuple[str, ...] = ()
    """Texts: the completion ends with the token after which its text contains one."""
    top_logprobs: int = 0
    """Likeliest tokens to report at every place."""
    shaping: Shaping | None = None
    """None: drawn from the model's own distribution at the temperature."""
    input_from: int = -1
    """Logprobs of the prompt's ids after this place are reported; -1: of none."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What became of a call."""

    token_ids: tuple[int, ...]
    """The end token included, if one came."""
    logprobs: tuple[float, ...]
    """log softmax(logits / temperature) of each id, over the whole vocabulary, before any penalty, bias or filter."""
    finish_reason: dict[str, Any]
    """{"type": "stop", "matched": id or stop text}, {"type": "length", "length": n} or {"type": "abort", "message": text}."""
    versions: tuple[tuple[str, int, int], ...]
    """(version, start, end) within token_ids, run-length coded."""
    cached_tokens: int
    """Prompt tokens whose keys and values were taken from the prefix store when the request first ran."""
    experts: NDArray[np.int16] | None = None
    """[prompt + completion - 1, layers, top-k]; -1 in layers without experts. Where the request asked for it."""
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()
    """Per id (logprob, id) of the likeliest tokens, best first, of the distribution of `logprobs`. Where the request asked for it."""
    input_logprobs: tuple[float, ...] | None = None
    """log softmax(logits) of the prompt's ids after place `input_from`, without any temperature, as in SGLang. None where none were asked
    for, or the prompt was not read to its end."""
    queue_s: float = 0.0
    """From the request's arrival until it first ran, seconds."""
    retractions: int = 0
    """How often it was put back into the queue."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of an update, before its numbers are there."""

    name: str
    """Hugging Face name."""
    dtype: str
    """As torch spells it: float32, bfloat16, float16."""
    shape: tuple[int, ...]
    offset: int = 0
    """Where it begins in a buffer that holds several, bytes."""
