"""A checkpoint's own chat template.

In: a model folder's `chat_template.jinja`, or the `chat_template` of its tokenizer_config.json. Out: the text that it makes of messages.
The template is a program of others: it runs in a sandbox, compiled once. Nothing here waits but for the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from palestra.server.renderer.types import RenderOptions
from palestra.server.types import RenderError

DEFAULT_DATE = "2025-01-01"
"""For a template that prints a date whether it is given one or not, where the caller names none: any day, but always the same."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says; here it only has to be read over."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: blocks leave no white space, JSON is not escaped for HTML, and nothing outside can be reached."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _refuse
    return made


class ChatTemplate:
    """A compiled template with the folder's named tokens."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        if "default" not in sources:
            raise RenderError(f"the chat templates are named {', '.join(sources)}: one must be named default")
        environment = _environment()
        try:
            self._compiled = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template does not compile: {error}") from error
        self.source = "\n".join(sources.values())
        self._tokens = dict(tokens)

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder; None where it has none.

        Raises:
            RenderError: a file is damaged, or the template does not compile.
        """
        about = read_json(folder / "tokenizer_config.json")
        given: Any = about.get("chat_template")
        own = folder / "chat_template.jinja"
        if own.is_file():
            given = own.read_text(encoding="utf-8")
        if not given:
            return None
        try:
            sources = {"default": given} if isinstance(given, str) else {e["name"]: e["template"] for e in given}
        except (TypeError, KeyError) as error:
            raise RenderError(f"{folder}: chat_template is neither text nor a list of named templates") from error
        tokens = {name: token_text(value) for name, value in about.items() if name.endswith("_token") and value}
        return cls(sources, tokens)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: RenderOptions | None = None,
        *,
        generate: bool = True,
    ) -> str:
        """The rendered conversation, with the generation prompt if `generate`.

        Raises:
            RenderError: the template refuses these messages or breaks on them.
        """
        chosen = "tool_use" if tools and "tool_use" in self._compiled else "default"
        given: dict[str, Any] = {
            "messages": list(messages),
            "add_generation_prompt": generate,
            "tools": list(tools) or None,
        }
        try:
            return self._compiled[chosen].render(self._tokens, **self._options(options or RenderOptions()), **given)
        except Exception as error:  # a template is a program of others: it can fail in any way
            reason = str(error) or type(error).__name__
            raise RenderError(f"the chat template refuses these messages: {reason}") from error

    def _options(self, options: RenderOptions) -> dict[str, Any]:
        given: dict[str, Any] = {}
        day = options.date
        if not day and "strftime_now" in self.source and "strftime_now is defined" not in self.source:
            day = DEFAULT_DATE
        if day:
            given["strftime_now"] = date.fromisoformat(day).strftime
        if options.thinking is not None:
            given |= {"enable_thinking": options.thinking, "thinking": options.thinking}
        if options.effort is not None:
            given["reasoning_effort"] = options.effort
        return given


def token_text(value: Any) -> str:
    """A token of tokenizer_config.json: its text, or an object with the text as `content`."""
    return str(value["content"] if isinstance(value, Mapping) else value)


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object: empty where the file is missing.

    Raises:
        RenderError: it is there, but holds no object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RenderError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RenderError(f"{path} holds no JSON object")
    return value
