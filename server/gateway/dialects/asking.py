"""The fields that requests of several dialects share, and what they mean in a `ModelCall`. Pure.

Ranges stand in the types, so that the decoder checks them and the API's description shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from palestra.server.gateway.dialects.reading import need, need_text
from palestra.server.gateway.types import SamplingAsk
from palestra.server.types import SessionError

_MAX = 2**31 - 1

Count: TypeAlias = Annotated[int, Meta(ge=1, le=_MAX)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX)]
Replies: TypeAlias = Annotated[int, Meta(ge=1, le=128)]
Top: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1)]
StopTexts: TypeAlias = Annotated[list[StopText], Meta(max_length=16)]
BiasedId: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
Objects: TypeAlias = list[dict[str, Any]]
RawArray: TypeAlias = Annotated[
    msgspec.Raw, Meta(extra_json_schema={"type": "array", "minItems": 1, "items": {"type": "object"}})
]
RawObjects: TypeAlias = Annotated[
    msgspec.Raw, Meta(extra_json_schema={"type": ["array", "null"], "items": {"type": "object"}})
]


class TemplateWish(msgspec.Struct):
    """`chat_template_kwargs`, as far as it means something to every family: other keys have no effect."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class Sampled(msgspec.Struct, kw_only=True):
    """How tokens are to be drawn. Every dialect takes all of these, whether its API names them or not."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[BiasedId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    chat_template_kwargs: TemplateWish | None = None
    forced_ids: list[TokenId] | None = None


class StreamOptions(msgspec.Struct):
    """`stream_options`: whether a last event carries the usage."""

    include_usage: bool | None = None


_NOTHING_ASKED = SamplingAsk()


def sampling_of(asked: Sampled) -> SamplingAsk:
    """How a request wants its tokens drawn. A top_k of 0 means no bound, as -1 does."""
    bias = asked.logit_bias
    ask = (
        asked.temperature,
        asked.top_p,
        -1 if asked.top_k == 0 else asked.top_k,
        asked.min_p,
        asked.frequency_penalty,
        asked.presence_penalty,
        asked.repetition_penalty,
        {str(int(token)): value for token, value in bias.items()} if bias else None,
        asked.seed,
    )
    return _NOTHING_ASKED if ask.count(None) == len(ask) else SamplingAsk(*ask)


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts that end a reply."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def thinking_of(wish: TemplateWish | None, effort: str | None, where: str) -> tuple[bool | None, str | None]:
    """Whether to reason, and how hard: (`ModelCall.thinking`, `ModelCall.effort`). Levels beyond low, medium and high are the nearest of
    them; "none" forbids reasoning. What the template is told outright wins.

    Raises:
        SessionError: 400 for an effort of another name.
    """
    thinking: bool | None = None
    level: str | None = None
    if effort == "none":
        thinking = False
    elif effort is not None and (level := _EFFORTS.get(effort)) is None:
        raise SessionError(f"{where} is {effort!r:.80}; known: none, {', '.join(_EFFORTS)}")
    if wish is not None:
        told = wish.thinking if wish.enable_thinking is None else wish.enable_thinking
        thinking = thinking if told is None else told
    return thinking, level


def schema_of(wanted: Mapping[str, Any] | None, where: str, nested: bool) -> Mapping[str, Any] | None:
    """The schema that a reply's text must fit: None for free text, {} for any object. `nested`: it stands below `json_schema`, as in chat.

    Raises:
        SessionError: 400 for a format of another name, and a schema that is no object.
    """
    if wanted is None:
        return None
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return {}
        case "json_schema":
            here = f"{where}.json_schema" if nested else where
            holder = need(wanted.get("json_schema"), dict, here, "an object") if nested else wanted
            schema = holder.get("schema")
            return {} if schema is None else need(schema, dict, f"{here}.schema", "an object")
        case other:
            raise SessionError(f"{where}.type is {other!r:.80}; known: text, json_object, json_schema")


def name_of(tool: Mapping[str, Any]) -> Any:
    """The name in a tool or in a reference to one, in the chat form (below `function`) or the flat form of Responses."""
    inner = tool.get("function")
    return (inner if isinstance(inner, Mapping) else tool).get("name")


def choose_tools(choice: Any, tools: Objects) -> tuple[str | None, Objects]:
    """`ModelCall.tool_choice`, and the tools that stay on offer: `allowed_tools` leaves the others out of the prompt.

    Raises:
        SessionError: 400 for a choice of another form, and one that names a tool which the request does not hold.
    """
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise SessionError(f"tool_choice is {choice!r:.80}; known: auto, none, required, or an object")
        if choice == "required" and not tools:
            raise SessionError("tool_choice is 'required', but the request holds no tools")
        return choice, tools
    if choice is None:
        return None, tools
    need(choice, dict, "tool_choice", "a string or an object")
    if choice.get("type") == "function":
        return "=" + _known(name_of(choice), tools, "tool_choice"), tools
    if choice.get("type") != "allowed_tools":
        raise SessionError(f"tool_choice.type is {choice.get('type')!r:.80}; known: function, allowed_tools")
    inner = choice.get("allowed_tools", choice)
    allowed = need(
        need(inner, dict, "tool_choice.allowed_tools", "an object").get("tools"), list, "tool_choice.tools", "an array"
    )
    names = set()
    for at, tool in enumerate(allowed):
        where = f"tool_choice.tools[{at}]"
        names.add(_known(name_of(need(tool, dict, where, "an object")), tools, where))
    if inner.get("mode") not in ("auto", "required") or not names:
        raise SessionError("tool_choice: allowed_tools needs mode 'auto' or 'required', and at least one tool")
    return inner["mode"], [tool for tool in tools if name_of(tool) in names]


def _known(name: Any, tools: Objects, where: str) -> str:
    need_text(name, f"{where}: the function's name", empty=False)
    if all(name_of(tool) != name for tool in tools):
        raise SessionError(f"{where} names {name!r:.80}, which is none of the request's tools")
    return str(name)
