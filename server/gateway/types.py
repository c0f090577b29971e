"""Words of the gateway: one model call as every dialect says it, and one answer before a dialect spells it.

Flows: a dialect reads a body into a `ModelCall`; the turns' core makes a `ModelReply` of it, durably; the dialect writes that as JSON or as
server-sent events. Messages travel as raw JSON, since all but the newest were seen before and are only compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from palestra.server.types import EngineError, RenderError, ServerError, SessionError, StoreError

Message: TypeAlias = Mapping[str, Any]
"""One chat message in OpenAI's form."""
Recall: TypeAlias = Callable[[str], Sequence[Message]]
"""Reply id -> the whole conversation up to and with that reply, in OpenAI's form. Raises SessionError 404 for an id of no turn."""


@dataclass(frozen=True, slots=True)
class SamplingAsk:
    """How a caller wants tokens drawn; None: it did not say. A training session refuses what would change the trained distribution."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request of a caller, whatever its dialect. A dialect checks types and ranges; what a session allows is the core's business."""

    messages: bytes
    """A JSON array of messages in OpenAI's chat form, as they came where the dialect is OpenAI's chat. b"" where `prompt` is given."""
    tools: bytes = b""
    """A JSON array of tools in OpenAI's form; b"" for none."""
    prompt: str | tuple[int, ...] | None = None
    """Of /v1/completions: text (special tokens in it count as such) or ids."""
    echo: bool = False
    """Of /v1/completions: the prompt comes back before the reply."""
    model: str = ""
    n: int = 1
    """Replies to draw."""
    stream: bool = False
    include_usage: bool = False
    """A last event of a stream carries the usage."""
    max_tokens: int | None = None
    """Tokens of each reply; None: the session's own bound."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply; the reply is given without them."""
    sampling: SamplingAsk = SamplingAsk()
    logprobs: bool = False
    top_logprobs: int = 0
    """Alternatives per token, 0..20."""
    response_schema: Mapping[str, Any] | None = None
    """JSON schema that the reply's text must fit; {} for any JSON object."""
    tool_choice: str | None = None
    """None or "auto": the model's own; "none"; "required"; "=NAME" for that one tool."""
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    effort: str | None = None
    """Reasoning effort: low, medium or high."""
    forced_ids: tuple[int, ...] = ()
    """A test's wish; engines refuse it unless they were started for it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect itself wants to see again in its reply (Responses: instructions, metadata ...)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a reply, for callers that asked for logprobs."""

    text: str
    raw: bytes
    """Its bytes, where the text alone is no whole UTF-8."""
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """(text, logprob) of the likeliest tokens at this place, best first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply."""

    message: Mapping[str, Any]
    """role assistant; content, tool_calls, reasoning_content: only the keys that apply. Content is without stop text and prefill."""
    text: str
    """All that was sampled, as text, special tokens included but the end token; what /v1/completions gives."""
    finish_reason: str
    """stop, length or tool_calls."""
    stop_text: str | None = None
    """The one of the call's `stop` that ended it."""
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call, all its choices together."""

    prompt: int
    completion: int
    cached: int
    """Of the prompt, taken from the engine's cache."""
    reasoning: int = 0
    """Of the completion, inside reasoning."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What the core gives back, recorded durably by then."""

    reply_id: str
    """Without a dialect's prefix. `Recall` understands it, also behind a prefix of the form `word_` or `word-`."""
    model: str
    created: int
    """Unix seconds."""
    choices: tuple[Choice, ...]
    usage: Usage


class Dialect(Protocol):
    """One API, on the wire. Stateless and pure."""

    @property
    def name(self) -> str:
        """Short, for logs."""

    @property
    def ping(self) -> bytes:
        """What a stream sends while the model still works: something that clients ignore."""

    def read(self, body: bytes, recall: Recall) -> ModelCall:
        """A checked call.

        Raises:
            SessionError: 400 (or 404 from `recall`) with what is wrong and where.
        """

    def reply(self, call: ModelCall, reply: ModelReply) -> Mapping[str, Any]:
        """The answer as a JSON object."""

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[bytes]:
        """The answer as server-sent events, each whole with its blank line, the terminator of the dialect last. Deltas are of a size that a
        client sees as streaming (about a word); joined they are the answer, byte for byte."""

    def error(self, error: ServerError, status: int) -> Mapping[str, Any]:
        """An error's body, in the shape that this API's clients read."""

    def error_event(self, error: ServerError, status: int) -> bytes:
        """An error in the middle of a stream: the event(s) after which it ends."""


def status_of(error: ServerError) -> tuple[int, str]:
    """HTTP status and code of an error: whose fault it is, and whether repeating the call can help (5xx, 408)."""
    if isinstance(error, SessionError):
        return error.status, error.code
    if isinstance(error, RenderError):
        return 400, "cannot_render"
    if isinstance(error, EngineError):
        return 503, "engine_unavailable"
    if isinstance(error, StoreError):
        return 507, "store_failed"
    return 500, "internal_error"
