"""Tools: methods that a model can call. Marked by `@tool`, described once per class, run with a deadline, answered in
text.

A call comes in as OpenAI's tool_call, a `Call` comes out. What a tool says to the model (`ToolError`), wrong arguments
and deadlines become text; anything else that a tool raises is a fault of the environment (`EnvError`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from palestra.envs import background
from palestra.envs.schema import Signature, parse_arguments, read_signature
from palestra.envs.types import EnvError, Message, ToolError, ToolSpec

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

RESULT_LIMIT = 20_000
"""Characters of a result that the model sees; the middle of a longer one is left out."""
IO_TIMEOUT_S = 30.0
"""Deadline of tools that wait for something (async, or marked `io`) and name none."""
_MARK = "__palestra_tool__"


class ToolTimeout(ToolError):
    """A tool ran past its deadline. The model is told."""


@dataclass(frozen=True, slots=True)
class Marked:
    """What `@tool` was given."""

    name: str | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of an environment class."""

    name: str
    attribute: str
    """The method's name on the environment."""
    signature: Signature
    timeout_s: float | None
    """None runs it inline, in the episode's own thread."""
    is_async: bool

    @property
    def spec(self) -> ToolSpec:
        """Its description in OpenAI's form."""
        function = {
            "name": self.name,
            "description": self.signature.description,
            "parameters": self.signature.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a policy made, and how it went."""

    name: str
    arguments: Mapping[str, Any] | None
    """As the tool got them; None where they could not be read."""
    result: Any
    """The tool's own return value; None after an error."""
    error: str | None
    """What the model was told instead of a result."""
    message: Message
    """The tool message that answered it."""


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, timeout_s: float | None = None, io: bool = False) -> Callable[[F], F]: ...
def tool(function: Any = None, /, *, name: str | None = None, timeout_s: float | None = None, io: bool = False) -> Any:
    """Marks a method as a tool. Its hints and docstring become the schema.

    A plain function without a deadline runs inline. With `timeout_s`, or `io=True` (30 s), it gets a thread of its own:
    a pool would be used up by tools that hang. Coroutine functions run on the process's loop thread, 30 s unless told
    otherwise.
    """

    def mark(marked: Any) -> Any:
        deadline = timeout_s
        if deadline is None and (io or inspect.iscoroutinefunction(inspect.unwrap(marked))):
            deadline = IO_TIMEOUT_S
        setattr(marked, _MARK, Marked(name, deadline))
        return marked

    return mark if function is None else mark(function)


def collect_tools(cls: type) -> dict[str, Tool]:
    """The marked methods of a class, inherited ones included, by the name that the model sees.

    Raises:
        TypeError: a signature that cannot be described, or two tools of one name.
    """
    tools: dict[str, Tool] = {}
    for attribute in dir(cls):
        member = inspect.getattr_static(cls, attribute)
        function = getattr(member, "__func__", member)
        marked = getattr(member, _MARK, None) or getattr(function, _MARK, None)
        if not isinstance(marked, Marked):
            continue
        name = marked.name or attribute
        if name in tools:
            raise TypeError(
                f"{cls.__qualname__}: two tools are called {name!r}: {tools[name].attribute} and {attribute}"
            )
        signature = read_signature(function, skip_first=not isinstance(member, staticmethod))
        tools[name] = Tool(name, attribute, signature, marked.timeout_s, inspect.iscoroutinefunction(function))
    return tools


def run_call(call: Mapping[str, Any], tools: Mapping[str, Tool], owner: object, beside: bool = False) -> Call:
    """Runs one tool_call of an assistant message against `owner`'s methods. `beside`: others run at the same time, so a
    tool without a deadline of its own gets 30 s.

    Raises:
        EnvError: the tool has a fault of its own; the episode cannot be scored.
    """
    name, raw = asked_of(call)
    arguments, result, error = None, None, None
    try:
        known = tools.get(name)
        if known is None:
            raise unknown_tool(name, tools)
        arguments = _arguments(known, raw)
        deadline = IO_TIMEOUT_S if beside and known.timeout_s is None else known.timeout_s
        result = _run(known, getattr(owner, known.attribute), arguments, deadline)
        text = result_text(result)
    except ToolError as refusal:
        error = str(refusal)
        text = result_text(f"Error: {error}")
    return Call(name, arguments, result, error, tool_message(call, name, text))


def run_beside(work: Sequence[Callable[[], Call]]) -> list[Call]:
    """Runs calls at the same time, each in a thread of its own, and waits for all; each of them keeps its own deadline.

    Returns:
        One `Call` for each, in their order.

    Raises:
        EnvError: as the first of them that did, once all have ended.
    """
    futures = [_in_thread(one, f"call-{position}") for position, one in enumerate(work)]
    concurrent.futures.wait(futures)
    return [future.result() for future in futures]


def asked_of(call: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the raw arguments of a tool_call, whatever a model wrote there."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    return str(function.get("name")), function.get("arguments")


def call_message(name: str, arguments: Any, call_id: str = "") -> Message:
    """An assistant message with one call of the tool `name`; `arguments` as they stand, text that need not be JSON. Without `call_id` the
    environment gives the call its id.
    """
    named = {"id": call_id} if call_id else {}
    call = {**named, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_message(call: Mapping[str, Any], name: str, text: str) -> Message:
    """The message that answers a tool_call."""
    return {"role": "tool", "tool_call_id": str(call.get("id") or ""), "name": name, "content": text}


def unknown_tool(name: str, known: Iterable[str]) -> ToolError:
    """What a model is told that calls a tool which is not there."""
    return ToolError(f"no tool named {name[:100]!r}; tools: {', '.join(known)}")


def refuse_calls(action: Message) -> list[Message]:
    """The answers to the calls of a message in an environment without tools: a chat format wants one for each."""
    text = "Error: there are no tools here; answer in text"
    return [tool_message(call, asked_of(call)[0], text) for call in action.get("tool_calls") or ()]


def read_call(asked: Mapping[str, Any], answer: Message) -> Call:
    """A call that somebody else ran, from the message that asked and the one that answered it. A text that is JSON is
    taken as the value it writes; one that begins with `Error` as a refusal.
    """
    name, raw = asked_of(asked)
    content = answer.get("content")
    text = content if isinstance(content, str) else result_text(content)
    error = text.removeprefix("Error: ") if text.startswith("Error") else None
    arguments = _json(raw)
    return Call(
        name=name,
        arguments=arguments if isinstance(arguments, Mapping) else None,
        result=None if error is not None else _json(text),
        error=error,
        message=dict(answer),
    )


def _json(text: Any) -> Any:
    """The value that a text writes; anything else as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _arguments(known: Tool, raw: Any) -> dict[str, Any]:
    try:
        return parse_arguments(known.signature, raw)
    except ValueError as error:
        raise ToolError(str(error)) from None


def _run(known: Tool, method: Callable[..., Any], arguments: dict[str, Any], timeout_s: float | None) -> Any:
    try:
        if known.is_async:
            return _run_async(known, method, arguments, IO_TIMEOUT_S if timeout_s is None else timeout_s)
        if timeout_s is None:
            return method(**arguments)
        return _run_in_thread(known, method, arguments, timeout_s)
    except (ToolError, EnvError):
        raise
    except Exception as error:
        raise EnvError(f"tool {known.name}: {type(error).__name__}: {error}") from error


def _run_async(known: Tool, method: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Any:
    try:
        return background.call(method(**arguments), timeout_s)
    except background.DeadlineError:
        raise ToolTimeout(f"tool {known.name} ran past {timeout_s:g} s") from None


def _run_in_thread(known: Tool, method: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Any:
    future = _in_thread(lambda: method(**arguments), f"tool-{known.name}")
    done, _ = concurrent.futures.wait([future], timeout_s)
    if not done:  # a thread cannot be stopped: its late result is dropped
        raise ToolTimeout(f"tool {known.name} ran past {timeout_s:g} s")
    return future.result()


def _in_thread(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Runs `work` in a daemon thread of its own: a pool would be used up by what hangs."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again in the episode's thread
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def result_text(value: Any, limit: int = RESULT_LIMIT) -> str:
    """What the model reads: text as it is, the rest as JSON in its own letters; the middle of a long result is left
    out.

    Raises:
        EnvError: the value cannot be written as JSON.
    """
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvError(f"a tool's result cannot be written as JSON: {type(error).__name__}: {error}") from error
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates break JSON clients
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n...[{len(text) - 2 * half} characters left out]...\n{text[-half:]}"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
