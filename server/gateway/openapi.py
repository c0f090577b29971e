"""The service's API as OpenAPI 3.1 describes it: FastAPI's own description of the control routes, with their bodies, errors and keys, and
the model routes, which are plain Starlette routes and unknown to FastAPI. Request schemas are those of the structs that read the bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import Route

from palestra.server.gateway.dialects.chat import ChatRequest
from palestra.server.gateway.dialects.completions import CompletionsRequest
from palestra.server.gateway.dialects.messages import MessagesRequest
from palestra.server.gateway.dialects.responses import ResponsesRequest

MODEL_ROUTES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionsRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
"""Ends of the paths that models answer on, and what their bodies hold."""

_REPLIES = {
    "/v1/chat/completions": ("chat.completion", ("id", "object", "created", "model", "choices", "usage")),
    "/v1/completions": ("text_completion", ("id", "object", "created", "model", "choices", "usage")),
    "/v1/responses": ("response", ("id", "object", "created_at", "model", "output", "status", "usage")),
    "/v1/messages": ("message", ("id", "type", "role", "model", "content", "stop_reason", "usage")),
}
_ERRORS = {
    "400": "The request is wrong; the message says where.",
    "401": "No key, or one that opens nothing here.",
    "404": "No such session or reply.",
    "408": "No answer within the deadline; it can be asked again.",
    "409": "The session is closed, or was opened before.",
    "413": "The body is too large.",
    "415": "The body is compressed, which is not understood.",
    "500": "A fault of the service.",
    "503": "The engine cannot be reached; it can be asked again.",
    "507": "The run's store cannot write.",
}
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "code": _TEXT, "param": {"type": ["string", "null"]}},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT, "code": _TEXT},
        },
    },
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"api_key": []}]
_OPEN_PATHS = frozenset({"/health", "/status"})
_FRAMED = frozenset({"/admin/put"})
"""Routes whose body is no JSON."""
_REF = "#/components/schemas/"


def describe(app: FastAPI, bodies: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """The whole description. `bodies` says what the POST bodies of control routes hold, by path as FastAPI knows it."""
    described = get_openapi(title=app.title, version=app.version, openapi_version="3.1.0", routes=app.routes)
    paths: dict[str, Any] = described.setdefault("paths", {})
    structs = [*MODEL_ROUTES.values(), *bodies.values()]
    references, schemas = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    reference_of = dict(zip(structs, references, strict=True))
    for path, operations in paths.items():
        for method, operation in operations.items():
            body = reference_of[bodies[path]] if method == "post" and path in bodies else None
            _describe_control(operation, body, path not in _OPEN_PATHS)
            if path in _FRAMED:
                operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    for route in app.routes:
        if isinstance(route, Route) and (end := _end_of(route.path)) is not None:
            paths[route.path] = {"post": _model_operation(route.path, end, reference_of[MODEL_ROUTES[end]])}
    components = described.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas, Error=_ERROR, AnthropicError=_ANTHROPIC_ERROR)
    components["securitySchemes"] = _KEYS
    return described


def _end_of(path: str) -> str | None:
    return next((end for end in MODEL_ROUTES if path.endswith(end)), None)


def _describe_control(operation: dict[str, Any], body: dict[str, Any] | None, needs_key: bool) -> None:
    """Adds to FastAPI's own description what it cannot know of a route that reads its request itself."""
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if needs_key:
        operation["security"] = _SECURITY
    for status, answer in _errors("Error").items():
        operation["responses"].setdefault(status, answer)


def _errors(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + schema}}}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}


def _model_operation(path: str, end: str, body: dict[str, Any]) -> dict[str, Any]:
    kind, required = _REPLIES[end]
    schema = {
        "type": "object",
        "required": list(required),
        "properties": {"type" if end == "/v1/messages" else "object": {"const": kind}},
    }
    answers = {"application/json": {"schema": schema}, "text/event-stream": {}}
    named = re.findall(r"{(\w+)(?::\w+)?}", path)
    return {
        "summary": f"One call of the model, as {kind}",
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The reply; events where `stream` is true.", "content": answers},
            **_errors("AnthropicError" if end == "/v1/messages" else "Error"),
        },
        # A path that names the session holds its key already.
        "security": [] if named else _SECURITY,
    }
