"""A Python function in, its JSON schema and validated arguments out.

Types come from the hints (pydantic), descriptions from the docstring in Google, NumPy or Sphinx style. Parameters get
private field names with aliases, so that names which pydantic keeps for itself (`model_config`, `schema`, `json`,
`copy`) work like any other.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

ERRORS_SHOWN = 5
"""Of a call with many wrong arguments, as many are named."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model is told about a function, and what its arguments are checked with."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    model: type[BaseModel]


def read_signature(function: Callable[..., Any], *, skip_first: bool = False) -> Signature:
    """Reads hints and docstring. `skip_first` leaves out `self`.

    Raises:
        TypeError: a parameter without a hint, or one that has no name a model could use (`*args`, `**kwargs`,
            positional-only).
    """
    parameters = list(inspect.signature(function).parameters.values())[int(skip_first) :]
    hints = _hints(function)
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    about = {item.arg_name.lstrip("*"): item.description for item in doc.params}
    fields: dict[str, Any] = {}
    for parameter in parameters:
        hint, default = _field(function, parameter, hints)
        text = about.get(parameter.name)
        told = {"description": text} if text else {}  # None would hide what an Annotated hint says
        fields[f"f_{parameter.name}"] = (hint, Field(default, alias=parameter.name, **told))
    config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=False)
    model = create_model(function.__name__, __config__=config, **fields)
    full = without_titles(model.model_json_schema(by_alias=True))
    # Not BaseModel's own docstring, and not that extra arguments are refused: the schema stands in every prompt, so it is kept short.
    schema = {key: full[key] for key in ("type", "properties", "required", "$defs") if key in full}
    text = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
    return Signature(text, schema, model)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"tool {function.__qualname__}: a type hint cannot be resolved ({error}): "
            "define the type above the class, at module level"
        ) from error


def _field(function: Callable[..., Any], parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[Any, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise TypeError(
            f"tool {function.__qualname__}: parameter {parameter} has no name a model can use: "
            "declare a list or dict parameter"
        )
    if parameter.name not in hints:
        raise TypeError(f"tool {function.__qualname__}: parameter {parameter.name} needs a type hint")
    hint = hints[parameter.name]
    if parameter.default is parameter.empty:
        return hint, ...
    if parameter.default is None and hint is not Any and type(None) not in typing.get_args(hint):
        hint = hint | None  # `x: int = None` means optional
    return hint, parameter.default


def without_titles(schema: Any) -> Any:
    """Drops the titles that pydantic adds, but not a property that is called title."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            out[key] = {name: without_titles(item) for name, item in value.items()}
        elif not (key == "title" and isinstance(value, str)):
            out[key] = value if key in ("enum", "const", "default", "examples") else without_titles(value)
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def read_object(raw: Any) -> dict[str, Any]:
    """The arguments of a call before anybody checked them: JSON text (OpenAI) or an object (some servers). An empty
    text means none.

    A doubly encoded object stays an error: repairing it would reward it.

    Raises:
        ValueError: one line that a model can act on.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw or "{}", strict=False, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments are not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"arguments must be a JSON object, got {type(raw).__name__}")
    return raw


def parse_arguments(signature: Signature, raw: Any) -> dict[str, Any]:
    """The arguments of a call as the function takes them: read by `read_object`, then checked against its hints.

    Raises:
        ValueError: one line that a model can act on.
    """
    try:
        model = signature.model.model_validate(read_object(raw))
    except (ValidationError, RecursionError) as error:
        raise ValueError(_problems(error)) from None
    fields = type(model).model_fields.items()
    return {field.alias or name: getattr(model, name) for name, field in fields if name in model.model_fields_set}


def _problems(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "arguments are nested too deeply"
    shown = error.errors(include_url=False)[:ERRORS_SHOWN]
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}" for item in shown)
