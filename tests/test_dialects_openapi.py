"""The service's own description: every reference resolves, model and control routes stand in it, and it says what the reader enforces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from palestra.server.gateway.openapi import MODEL_ROUTES, describe


class OpenBody(msgspec.Struct):
    """The body of POST /v1/sessions."""

    rollout_id: str
    attempt: int = 0


async def answer(request: Request) -> JSONResponse:
    return JSONResponse({})


def described() -> dict[str, Any]:
    app = FastAPI(title="Palestra rollout service")
    app.get("/health")(answer)
    app.post("/v1/sessions")(answer)
    app.get("/v1/sessions/{rollout_id}")(answer)
    for prefix in ("", "/sessions/{part}"):
        for path in MODEL_ROUTES:
            app.add_route(prefix + path, answer, methods=["POST"])
    return describe(app, {"/v1/sessions": OpenBody})


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_it_is_json_and_every_reference_resolves() -> None:
    document = orjson.loads(orjson.dumps(described()))
    assert document["openapi"].startswith("3.1")
    found = set(references(document))
    assert {"#/components/schemas/ChatRequest", "#/components/schemas/OpenBody"} <= found
    for reference in found:
        at = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_model_routes_and_control_routes_with_errors_and_keys() -> None:
    paths = described()["paths"]
    for path in MODEL_ROUTES:
        plain, named = paths[path]["post"], paths[f"/sessions/{{part}}{path}"]["post"]
        assert {"200", "400", "401", "404", "408", "409", "413", "503", "507"} <= plain["responses"].keys()
        assert [p["name"] for p in named["parameters"]] == ["part"]
        assert (plain["security"], named["security"]) == ([{"bearer": []}, {"api_key": []}], [])
        error = plain["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith("AnthropicError" if path == "/v1/messages" else "/Error")
    opened = paths["/v1/sessions"]["post"]
    assert opened["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/OpenBody")
    assert "409" in opened["responses"]
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/sessions/{rollout_id}"]["get"]["security"]
    ids = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(set(ids)) == len(ids)


def test_ranges_of_the_reader_stand_in_the_schema() -> None:
    fields = described()["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert fields["messages"]["type"] == "array"
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0}
