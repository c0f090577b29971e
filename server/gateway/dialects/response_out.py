"""OpenAI's Responses API on the wire: answers out, as an object and as events. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from palestra.server.gateway.dialects.shapes import logprobs_of
from palestra.server.gateway.dialects.sse import TokenDealer, pieces
from palestra.server.gateway.types import Choice, ModelCall, ModelReply, Usage

Item: TypeAlias = dict[str, Any]
Named: TypeAlias = tuple[str, dict[str, Any]]
"""An event's name, and its body without type and number."""


def output_of(call: ModelCall, reply: ModelReply) -> list[Item]:
    """The items of the reply's one choice: reasoning, message, function calls, as far as there are any; at least an empty message."""
    choice, reply_id = reply.choices[0], reply.reply_id
    said, done = choice.message, {"status": "completed"}
    found: list[Item] = []
    if said.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": said["reasoning_content"]}]
        found.append({"id": f"rs_{reply_id}", "type": "reasoning", "summary": [], "content": content, **done})
    if said.get("content") or not (found or said.get("tool_calls")):
        part = _text_part(said.get("content") or "", logprobs_of(choice.tokens) if call.logprobs else [])
        found.append({"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "content": [part], **done})
    for at, made in enumerate(said.get("tool_calls") or ()):
        function = {"name": made["function"]["name"], "arguments": made["function"]["arguments"]}
        about = {"id": f"fc_{reply_id}_{at}", "type": "function_call", "call_id": made["id"]}
        found.append({**about, **function, **done})
    if choice.finish_reason == "length":
        found[-1]["status"] = "incomplete"
    return found


def finished(call: ModelCall, reply: ModelReply, output: list[Item]) -> dict[str, Any]:
    """The response object of a whole reply."""
    cut = reply.choices[0].finish_reason == "length"
    return {
        **_response(call, reply, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": _usage(reply.usage),
    }


def events_of(call: ModelCall, reply: ModelReply) -> Iterator[Named]:
    """All events of a reply, in the API's order."""
    begun = _response(call, reply, "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    output = output_of(call, reply)
    for index, item in enumerate(output):
        hollow: dict[str, Item] = {
            "message": {"content": []},
            "reasoning": {"content": []},
            "function_call": {"arguments": ""},
        }
        opened = {**item, **hollow[item["type"]], "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": opened}
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield from _message(call, reply.choices[0], item, at)
        elif item["type"] == "reasoning":
            yield from _reasoning(item, at)
        else:
            yield from _call(item, at)
        yield "response.output_item.done", {"output_index": index, "item": item}
    whole = finished(call, reply, output)
    yield f"response.{whole['status']}", {"response": whole}


def _message(call: ModelCall, choice: Choice, item: Item, at: Item) -> Iterator[Named]:
    at, part = {**at, "content_index": 0}, item["content"][0]
    yield "response.content_part.added", {**at, "part": _text_part("", [])}
    dealer = TokenDealer(choice.tokens if call.logprobs else ())
    dealer.take(choice.message.get("reasoning_content") or "")
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": logprobs_of(dealer.take(piece))}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
    yield "response.content_part.done", {**at, "part": part}


def _reasoning(item: Item, at: Item) -> Iterator[Named]:
    at, part = {**at, "content_index": 0}, item["content"][0]
    yield "response.content_part.added", {**at, "part": {"type": "reasoning_text", "text": ""}}
    for piece in pieces(part["text"]):
        yield "response.reasoning_text.delta", {**at, "delta": piece}
    yield "response.reasoning_text.done", {**at, "text": part["text"]}
    yield "response.content_part.done", {**at, "part": part}


def _call(item: Item, at: Item) -> Iterator[Named]:
    for piece in pieces(item["arguments"]):
        yield "response.function_call_arguments.delta", {**at, "delta": piece}
    yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _response(call: ModelCall, reply: ModelReply, status: str) -> dict[str, Any]:
    """A response object without its outcome."""
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": reply.model,
        "output": [],
        "usage": None,
        **call.extra,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
