"""Words of the renderer: messages and tools go in, token ids come out, completion ids come back as a message. Nothing heavy is imported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from palestra.server.renderer.tokens import TokenCodec
from palestra.server.types import RenderedRow, RenderError

Message: TypeAlias = Mapping[str, Any]
"""One chat message in OpenAI's form."""
ToolSpec: TypeAlias = Mapping[str, Any]
"""One tool in OpenAI's form: {"type": "function", "function": {...}}."""


class ExtendRefused(RenderError):
    """The family cannot say these messages after what the engine has seen: the request is rendered whole, as a recorded fork.

    `reason` is a short word for the record, such as `system_after_reply`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What of a prompt is no message."""

    date: str = ""
    """ISO date of the session's opening: templates that print a date print this one, so that midnight changes nothing."""
    thinking: bool | None = None
    """Whether the model shall reason before it answers; None: the family's default."""
    effort: str | None = None
    """Reasoning effort, where the family has levels: low, medium or high."""
    call: str | None = None
    """A tool call that the reply must begin with: its opening is put into the prompt. "" for any tool, a name for that one; None: free."""
    prefill: str = ""
    """Text that the assistant's turn already holds: the reply goes on from it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The end of what the engine has seen: the turn that an extension follows."""

    completion: Sequence[int]
    """The ids of the last completion, its end token included, if one was sampled."""
    reply: Message
    """The completion as it was parsed."""
    opened: Sequence[int] = ()
    """Ids at the end of its prompt that already belonged to the assistant's turn."""
    tools: Sequence[ToolSpec] = ()
    """The tools that the conversation's first prompt listed."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids of a prompt: the whole of it, or what comes after a snapshot."""

    ids: Sequence[int]
    close_tokens: int = 0
    """Leading ids that close a turn which its length limit or a stop string cut: never trained."""
    opened: int = 0
    """How many trailing ids belong to the assistant's turn already, after its header (an open think block, the opening of a forced call,
    a prefill): `parse` needs them."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A completion as an assistant message."""

    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": ""})
    """role, content, tool_calls, reasoning_content: only the keys that apply."""
    ill_formed: str | None = None
    """Why what looks like a tool call is none (or one with broken arguments), for the record; None where all is well."""

    @property
    def has_calls(self) -> bool:
        """Whether the message calls tools."""
        return bool(self.message.get("tool_calls"))


class Renderer(ABC):
    """One chat family on one tokenizer. The proof obligation (law 1): what `extend` gives, put after the snapshot's ids, is the next
    prompt; where the family cannot promise that, it raises `ExtendRefused`. Stateless and thread-safe."""

    family: ClassVar[str] = ""
    codec: TokenCodec
    stop_ids: tuple[int, ...]
    """Ids on which the model ends its turn."""
    call_end: int | None = None
    """The id that ends one tool call, where the family has one: stopping there forbids parallel calls."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: RenderOptions | None = None
    ) -> Rendered:
        """The whole prompt, generation prompt included.

        Raises:
            RenderError: the messages cannot be expressed (unknown role, content that is not text).
        """

    @abstractmethod
    def extend(self, last: Snapshot, new: Sequence[Message], options: RenderOptions | None = None) -> Rendered:
        """The ids that follow the snapshot, up to and including the next generation prompt.

        Raises:
            ExtendRefused: these messages cannot follow without changing what was seen.
            RenderError: as for `render`.
        """

    @abstractmethod
    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        """A completion as a message; `opened` as `Rendered.opened` counted them. The end token may be there or not; special tokens are
        matched by id. Never raises: what cannot be read stays text."""

    @abstractmethod
    def transcript(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedRow:
        """A finished conversation for supervised training: mask 1 on what the assistant's turns hold, their end tokens included.

        Raises:
            RenderError: as for `render`, and where no assistant message is in it.
        """
