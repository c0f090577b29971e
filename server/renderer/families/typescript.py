"""Tools as TypeScript-like types, the form in which harmony lists them.

In: tools in OpenAI's form, their parameters as JSON schema. Out: one `namespace functions { ... }`. Layout and comments follow the format's
own renderer (github.com/openai/harmony); where that writes `any` for `anyOf`, as pydantic spells optional fields, this writes the union.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.server.renderer.text import json_text
from palestra.server.renderer.types import ToolSpec
from palestra.server.types import RenderError

Schema = Mapping[str, Any]
_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def functions_namespace(tools: Sequence[ToolSpec]) -> str:
    """The namespace of all tools: a comment and a type for each, an empty line between them.

    Raises:
        RenderError: parameters that are nested without end.
    """
    lines = ["namespace functions {", ""]
    for tool in tools:
        function = tool["function"]
        lines += [f"// {line}" for line in (function.get("description") or "").splitlines()]
        parameters = function.get("parameters") or {}
        try:
            taken = f"(_: {_type(parameters, '')})" if parameters.get("properties") else "()"
        except RecursionError:
            raise RenderError(f"tool {function['name']!r}: its parameters are nested too deeply") from None
        lines += [f"type {function['name']} = {taken} => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _type(schema: Any, indent: str) -> str:
    """The type that a schema spells; lines of an object's fields begin with `indent`."""
    if not isinstance(schema, Mapping):
        return "any"
    for key in ("oneOf", "anyOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return " | ".join(_nullable(variant, indent) for variant in schema[key])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_SIMPLE.get(str(name), str(name)) for name in kind) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema.get("items"), indent)
    words = [word for word in schema.get("enum") or () if isinstance(word, str)]
    if kind == "string" and words:
        return " | ".join(f'"{word}"' for word in words)
    return _SIMPLE.get(str(kind), "any")


def _nullable(schema: Any, indent: str) -> str:
    text = _type(schema, indent)
    return f"{text} | null" if isinstance(schema, Mapping) and schema.get("nullable") and "null" not in text else text


def _array(items: Any, indent: str) -> str:
    if items is None:
        return "Array<any>"
    inner = _type(items, indent)
    return f"({inner})[]" if isinstance(items, Mapping) and "anyOf" in items else f"{inner}[]"


def _object(schema: Schema, indent: str) -> str:
    about = schema.get("description")
    required = schema.get("required") or ()
    lines = [f"{indent}// {about}", "{"] if about else ["{"]
    for name, field in (schema.get("properties") or {}).items():
        lines += _field(name, field if isinstance(field, Mapping) else {}, name in required, indent)
    return "\n".join([*lines, f"{indent}}}"])


def _field(name: str, schema: Schema, required: bool, indent: str) -> list[str]:
    """A field's comments and its line: title, description and examples above it, its default behind it."""
    title = [schema["title"], ""] if schema.get("title") else []
    about = [schema["description"]] if schema.get("description") else []
    examples = [f'- "{example}"' for example in schema.get("examples") or () if isinstance(example, str)]
    shown = ["Examples:", *examples] if examples else []
    default = [_default(schema)] if "default" in schema else []
    mark = "" if required else "?"
    if isinstance(schema.get("oneOf"), list):
        above = [f"{indent}// {note}".rstrip() for note in (*title, *shown, *about, *default)]
        return [*above, f"{indent}{name}{mark}:", *_variants(schema, indent), f"{indent},"]
    above = [f"{indent}// {note}".rstrip() for note in (*title, *about, *shown)]
    behind = f" // {default[0]}" if default else ""
    return [*above, f"{indent}{name}{mark}: {_nullable(schema, indent + '    ')},{behind}"]


def _variants(schema: Schema, indent: str) -> list[str]:
    """The lines of a field that is one of several types. What the field's own comment says is not said again."""
    lines = []
    for number, variant in enumerate(schema["oneOf"]):
        known = variant if isinstance(variant, Mapping) else {}
        about = known.get("description")
        said = number == 0 and schema.get("description")
        notes = [about] if about and not said and about != schema.get("description") else []
        notes += [_default(known)] if "default" in known else []
        lines.append(f"{indent} | {_nullable(known, indent + '   ')}" + (f" // {' '.join(notes)}" if notes else ""))
    return lines


def _default(schema: Schema) -> str:
    """`default: "text"`; without quotes where the values are listed, as the format has it."""
    value = schema["default"]
    return f"default: {value}" if isinstance(value, str) and schema.get("enum") else f"default: {json_text(value)}"
