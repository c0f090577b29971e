"""The service's API under generated requests: everything that its own description allows, and much that it does not.

Nothing may be a fault of the service, no answer may differ from what the description says, and no route that needs a key may do without.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from palestra.server.gateway.openapi import MODEL_ROUTES
from palestra.server.publish_routes import publishing
from palestra.server.routes import control
from palestra.server.session_routes import sessions
from tests.fakes.engine import Stage, service_on_fake
from tests.live import TOKEN

pytestmark = [pytest.mark.walk, pytest.mark.timeout(300)]
EXAMPLES = {False: 8, True: 20}
"""Requests per route and mode, of control and of model routes: with two modes and two ways to name a session these are 40 for a dialect."""
FAULTS = 0.1
SOME = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SAID: list[Any] = [{"role": "user", "content": "q"}]
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": SAID,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
        "tool_choice": "required",
    },
    "/v1/completions": {"prompt": "q"},
    "/v1/responses": {
        "input": SAID,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        "tool_choice": "auto",
    },
    "/v1/messages": {
        "messages": SAID,
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
"""What the schemas leave open and the reader does not: put into half of the requests, so that they come as far as the engine."""
STRICT = {
    "functions",
    "function_call",
    "response_format",
    "reasoning_effort",
    "modalities",
    "audio",
    "suffix",
    "best_of",
}
STRICT |= {
    "echo",
    "thinking",
    "output_config",
    "previous_response_id",
    "conversation",
    "background",
    "text",
    "reasoning",
}
STRICT |= {"top_logprobs", "system"}
MODES = pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
numbers = itertools.count()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    limits = {"max_turns": 100_000, "max_context": 1_000_000, "staleness": 1000, "deadline_s": 20.0}
    with service_on_fake(tmp_path_factory.mktemp("fuzz"), **limits) as stage:
        stage.live.service.engine.retry_s = 0.0
        yield stage


class Caller:
    """Sends generated requests to the routes of one kind."""

    def __init__(self, stage: Stage, *, model: bool) -> None:
        self.stage, self.model = stage, model
        self.session = requests.Session()
        self.statuses: dict[str, set[int]] = {}
        self.rollout = self.key = ""
        document = stage.http.get("/openapi.json").json()
        routes = schemathesis.openapi.from_dict(document).get_all_operations()
        self.operations = [o for o in (found.ok() for found in routes) if o.path.endswith(tuple(MODEL_ROUTES)) == model]

    def fuzz(self, mode: GenerationMode) -> None:
        """Some requests for each route."""
        for operation in self.operations:
            if operation.path in ("/health", "/status") and mode is GenerationMode.NEGATIVE:
                continue  # they take nothing that could be wrong

            @settings(SOME, max_examples=EXAMPLES[self.model])
            @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans(), good=st.booleans())
            def check(case: Case, real: bool, good: bool) -> None:
                if good and self.model and mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                    _mend(case.path, case.body)
                self.send(case, real)

            check()

    def send(self, case: Case, real: bool) -> None:
        """One request; `real`: for a session that exists."""
        if not self.rollout or not self.stage.live.service.sessions.has(self.rollout, 0):
            self.rollout = f"fuzzed-{next(numbers)}"
            # Any sampling, so that what is refused is refused for being wrong.
            self.key = self.stage.open(self.rollout, sampling="free" if self.model else "strict")
        for name, value in (("rollout_id", self.rollout), ("part", self.key)):
            if real and name in case.path_parameters:
                case.path_parameters[name] = value
        self._hurry(case)
        how: dict[str, Any] = {
            "base_url": self.stage.live.url,
            "session": self.session,
            "headers": {"Authorization": f"Bearer {self.key if self.model else TOKEN}"},
            "timeout": 30,
        }
        response = case.call(**how)
        self.statuses.setdefault(case.operation.label, set()).add(response.status_code)
        if "freeze" in case.path or "publish" in case.path:  # the next calls shall go through
            self.stage.admin("POST", "/admin/thaw")
            self.stage.engine.release()
        # The reader checks more than a schema can say: what fits the schema may still be refused.
        excluded = [positive_data_acceptance]
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "engine_unavailable"
            assert self.model or "/publish/" in case.path, "only what needs an engine can find it unavailable"
            excluded.append(schemathesis.checks.not_a_server_error)
        case.validate_response(response, excluded_checks=excluded, headers=how["headers"], transport_kwargs=how)

    @staticmethod
    def _hurry(case: Case) -> None:
        """Waits that are allowed are made short."""
        wait = case.body.get("wait_s") if isinstance(case.body, dict) else None
        if type(wait) in (int, float) and 0 < wait <= 1e9:  # a boolean is to be refused
            case.body["wait_s"] = 0.001


def _mend(path: str, body: dict[str, Any]) -> None:
    end = next(end for end in MODEL_ROUTES if path.endswith(end))
    for name in STRICT & body.keys():
        del body[name]
    required = next(iter(GOOD[end]))
    body.update({name: value for name, value in GOOD[end].items() if name in body or name == required})
    if "tool_choice" in body and "tools" in GOOD[end]:
        body["tools"] = GOOD[end]["tools"]


@MODES
def test_control_routes(stage: Stage, mode: GenerationMode) -> None:
    caller = Caller(stage, model=False)
    caller.fuzz(mode)
    assert len(caller.operations) > 20
    assert all(200 in seen for label, seen in caller.statuses.items() if "GET" in label)
    assert stage.admin("GET", "/admin/ledger")["balanced"]


@MODES
def test_model_routes_on_an_engine_that_fails_at_times(stage: Stage, mode: GenerationMode) -> None:
    caller = Caller(stage, model=True)
    stage.engine.faults = FAULTS
    try:
        caller.fuzz(mode)
    finally:
        stage.engine.faults = 0.0
    assert len(caller.operations) == 2 * len(MODEL_ROUTES)
    answered = {end for end in MODEL_ROUTES for label, seen in caller.statuses.items() if end in label and 200 in seen}
    assert mode is GenerationMode.NEGATIVE or answered == set(MODEL_ROUTES), caller.statuses
    assert stage.admin("GET", "/admin/ledger")["balanced"]


def test_the_description_is_served_and_names_every_route(stage: Stage) -> None:
    document = stage.http.get("/openapi.json").json()
    ours = {
        (route.path, m.lower())
        for route in (*control.routes, *sessions.routes, *publishing.routes)
        for m in route.methods
    }
    ours |= {(prefix + path, "post") for prefix in ("", "/sessions/{part}") for path in MODEL_ROUTES}
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == ours
    bodies = [path for path, operations in document["paths"].items() if "requestBody" in operations.get("post", {})]
    without = {path for path, method in ours if method == "post"} - set(bodies)
    assert without == {"/admin/freeze", "/admin/thaw"}
