"""What a session does with what callers ask: the OpenAI parameters, sampling modes, budgets, keys, rewards and groups, on a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from palestra.server.client import ServiceClient, ServiceError
from palestra.server.renderer.registry import load_renderer
from palestra.server.renderer.types import Renderer
from palestra.server.rows import trajectory_rows
from palestra.server.types import Trajectory
from tests.live import TOKEN, LiveService, settings

pytestmark = pytest.mark.walk
QUESTION: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
    for name in ("echo", "twice")
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_engine: str, tiny_moe: Path) -> Iterator[LiveService]:
    store = tmp_path_factory.mktemp("semantics") / "store"
    limits = {"max_turns": 64, "staleness": 1000, "drop_zero_variance": False, "agent_key": "agents-key"}
    with LiveService(settings(store, tiny_engine, **limits), tiny_moe) as service:
        yield service


@pytest.fixture(scope="module")
def renderer(tiny_moe: Path) -> Renderer:
    return load_renderer(tiny_moe)


@pytest.fixture
def service(live: LiveService) -> Iterator[ServiceClient]:
    client = ServiceClient(live.url, TOKEN)
    yield client
    client.close()


class Talk:
    """One session and an official client on it."""

    def __init__(self, service: ServiceClient, **how: Any) -> None:
        self.service = service
        self.handle = service.open(**how)
        self.client = openai.OpenAI(base_url=self.handle.base_url, api_key=self.handle.api_key, max_retries=0)

    def say(self, messages: Sequence[Any] = QUESTION, **how: Any) -> Any:
        forced = how.pop("forced", None)
        extra = {"extra_body": {"forced_ids": list(forced)}} if forced is not None else {}
        how.setdefault("max_tokens", 24)
        return self.client.chat.completions.create(model="m", messages=list(messages), **how, **extra)

    def trajectory(self) -> Trajectory:
        return self.service.trajectory(self.handle)


def ids_of(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.codec.encode_text(text), renderer.stop_ids[0]]


def test_n_replies_are_siblings_and_each_is_recorded(service: ServiceClient) -> None:
    talk = Talk(service)
    done = talk.say(n=3, seed=7)
    turns = talk.trajectory().turns
    assert [turn.parent for turn in turns] == [None] * 3
    assert len({tuple(turn.completion_ids.tolist()) for turn in turns}) == 3, "one seed gave the same reply again"
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.usage.completion_tokens == sum(len(turn.completion_ids) for turn in turns)
    second = {"role": "assistant", "content": done.choices[1].message.content}
    if not done.choices[1].message.tool_calls:
        talk.say([*QUESTION, second, {"role": "user", "content": "and?"}])
        assert talk.trajectory().turns[-1].parent == 1


def test_one_seed_gives_siblings_of_a_group_other_numbers(service: ServiceClient) -> None:
    said = []
    for _ in range(2):
        talk = Talk(service)
        talk.say(seed=1)
        said.append(talk.trajectory().turns[0].completion_ids.tolist())
    assert said[0] != said[1]


def test_an_evaluation_repeats_what_its_seed_gave(service: ServiceClient) -> None:
    said = []
    for _ in range(2):
        talk = Talk(service, sampling="free")
        talk.say(seed=1, temperature=0.7)
        turn = talk.trajectory().turns[0]
        assert turn.temperature == pytest.approx(0.7)
        said.append(turn.completion_ids.tolist())
    assert said[0] == said[1]


def test_a_stop_text_is_sampled_kept_and_not_shown(service: ServiceClient, renderer: Renderer) -> None:
    talk = Talk(service)
    done = talk.say(stop=["END"], forced=ids_of(renderer, "one END two"), max_tokens=20)
    assert done.choices[0].message.content == "one "
    assert done.choices[0].finish_reason == "stop"
    first = talk.trajectory().turns[0]
    assert renderer.codec.decode(first.completion_ids.tolist()) == "one END"
    follow = [*QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    talk.say(follow)  # the agent trimmed what it got
    turn = talk.trajectory().turns[1]
    assert (turn.parent, turn.fork_reason) == (0, None)
    assert turn.close_tokens == 1
    assert turn.prompt_delta[0] == renderer.stop_ids[0]


def test_logprobs_are_the_sampled_ones_and_the_likeliest_stand_beside_them(service: ServiceClient) -> None:
    talk = Talk(service)
    done = talk.say(logprobs=True, top_logprobs=3)
    turn = talk.trajectory().turns[0]
    content = done.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(turn.logprobs.tolist(), abs=1e-6)
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-5
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token or "\ufffd" in entry.token


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0.2}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 2.0}}, "logit_bias"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
    ],
)
def test_what_changes_the_trained_distribution_is_refused_and_says_how_to_have_it(
    service: ServiceClient, wish: dict[str, Any], named: str
) -> None:
    strict = Talk(service)
    with pytest.raises(openai.BadRequestError) as refused:
        strict.client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4, **wish)
    assert refused.value.code == "sampling_refused"
    assert named in str(refused.value)
    assert "limits.sampling" in str(refused.value)
    assert strict.trajectory().turns == ()
    override = Talk(service, sampling="override")
    override.client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4, **wish)
    assert override.trajectory().turns[0].temperature == 1.0
    free = Talk(service, sampling="free")
    free.client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4, **wish)


def test_a_group_cannot_be_free(service: ServiceClient) -> None:
    with pytest.raises(ServiceError, match="sampling is free"):
        service.open(group_id="free-group", group_size=2, sampling="free")


def test_a_forced_call_begins_in_the_prompt_and_is_not_trained(service: ServiceClient, renderer: Renderer) -> None:
    talk = Talk(service)
    rest = [*renderer.codec.encode_text('{"x": "a"}}\n'), *_call_end(renderer), renderer.stop_ids[0]]
    choice = {"type": "function", "function": {"name": "twice"}}
    done = talk.say(tools=TOOLS, tool_choice=choice, forced=rest)
    (call,) = done.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("twice", {"x": "a"})
    (row,) = trajectory_rows(talk.trajectory())
    assert renderer.codec.decode(row.token_ids[row.sources == 19].tolist()).startswith('{"x"')
    messages = [
        *QUESTION,
        done.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "aa"},
    ]
    talk.say(messages, tools=TOOLS)
    assert talk.trajectory().turns[1].parent == 0
    with pytest.raises(openai.BadRequestError, match="none of the request's tools"):
        talk.say(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})


def _call_end(renderer: Renderer) -> list[int]:
    assert renderer.call_end is not None
    return [renderer.call_end]


def test_tool_choice_none_gives_text_and_keeps_the_prefix(service: ServiceClient, renderer: Renderer) -> None:
    talk = Talk(service)
    call = [
        renderer.codec.special_id("<tool_call>"),
        *renderer.codec.encode_text('\n{"name": "echo", "arguments": {}}\n'),
    ]
    done = talk.say(tools=TOOLS, tool_choice="none", forced=[*call, *_call_end(renderer), renderer.stop_ids[0]])
    message = done.choices[0].message
    assert message.tool_calls is None
    assert "echo" in message.content
    talk.say(
        [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": "x"}], tools=TOOLS
    )
    assert talk.trajectory().turns[1].parent == 0


def test_one_call_at_a_time_where_parallel_calls_are_off(service: ServiceClient, renderer: Renderer) -> None:
    talk = Talk(service)
    call = [
        renderer.codec.special_id("<tool_call>"),
        *renderer.codec.encode_text('\n{"name": "echo", "arguments": {}}\n'),
    ]
    two = [*call, *_call_end(renderer), *call, *_call_end(renderer), renderer.stop_ids[0]]
    done = talk.say(tools=TOOLS, parallel_tool_calls=False, forced=two, max_tokens=60)
    assert len(done.choices[0].message.tool_calls) == 1
    done = talk.say(tools=TOOLS, forced=two, max_tokens=60)
    assert len(done.choices[0].message.tool_calls) == 2


def test_a_schema_is_asked_for_in_the_prompt_and_leaves_the_history_alone(
    service: ServiceClient, renderer: Renderer
) -> None:
    talk = Talk(service)
    schema = {"name": "answer", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    done = talk.say(
        response_format={"type": "json_schema", "json_schema": schema},
        forced=ids_of(renderer, '{"a": 1}'),
        max_tokens=20,
    )
    assert json.loads(done.choices[0].message.content) == {"a": 1}
    asked = renderer.codec.decode(talk.trajectory().turns[0].prompt_delta.tolist())
    assert '"a": {"type": "integer"}' in asked
    talk.say([*QUESTION, {"role": "assistant", "content": '{"a": 1}'}, {"role": "user", "content": "x"}])
    assert talk.trajectory().turns[1].parent == 0


def test_budgets_of_turns_tokens_and_time(service: ServiceClient) -> None:
    talk = Talk(service, max_turns=1)
    talk.say()
    with pytest.raises(openai.BadRequestError, match="1 turns is spent"):
        talk.say()
    talk = Talk(service, max_tokens=10)
    talk.say(max_tokens=8)
    left = 10 - talk.trajectory().turns[0].completion_ids.size
    if left:
        talk.say(max_tokens=8)
    sampled = sum(turn.completion_ids.size for turn in talk.trajectory().turns)
    assert sampled <= 10
    talk = Talk(service, deadline_s=0.001)
    with pytest.raises(openai.BadRequestError, match="s are over"):
        talk.say()
    with pytest.raises(ServiceError, match=r"limits\.temperature"):
        service.open(temperature=0.0)
    with pytest.raises(ServiceError, match="unknown max_tokns"):
        service.open(max_tokns=3)


def test_every_way_to_name_a_session(live: LiveService, service: ServiceClient) -> None:
    handle, other = service.open(), service.open()
    key, url = handle.api_key, f"{live.url}/v1/chat/completions"
    body = {"messages": QUESTION, "max_tokens": 4}
    ways: list[tuple[str, dict[str, str]]] = [
        (url, {"Authorization": f"Bearer {key}"}),
        (url, {"x-api-key": key}),
        (url, {"X-Session-Id": key}),
        (url, {"X-Session-Id": handle.rollout_id, "Authorization": f"Bearer {key}"}),
        (url, {"X-Session-Id": handle.rollout_id, "Authorization": "Bearer agents-key"}),
        (f"{live.url}/sessions/{key}/v1/chat/completions", {}),
        (f"{live.url}/sessions/{handle.rollout_id}/v1/chat/completions", {"x-api-key": key}),
    ]
    for at, headers in ways:
        assert httpx.post(at, json=body, headers=headers, timeout=60).status_code == 200, (at, headers)
    assert len(service.trajectory(handle).turns) == len(ways)
    refused: list[tuple[str, dict[str, str]]] = [
        (url, {}),
        (url, {"X-Session-Id": handle.rollout_id}),
        (url, {"X-Session-Id": handle.rollout_id, "Authorization": f"Bearer {other.api_key}"}),
        (url, {"Authorization": "Bearer agents-key"}),
        (url, {"X-Session-Id": "nobody", "Authorization": "Bearer agents-key"}),
        (f"{live.url}/v1/sessions/{handle.rollout_id}/trajectory", {"Authorization": f"Bearer {key}"}),
        (f"{live.url}/v1/sessions/{handle.rollout_id}/reward", {"Authorization": "Bearer agents-key"}),
    ]
    for at, headers in refused:
        call = httpx.get if at.endswith("trajectory") else httpx.post
        assert call(at, headers=headers, **({} if call is httpx.get else {"json": body})).status_code == 401, (
            at,
            headers,
        )


def test_rewards_make_the_outcome_and_none_is_none(service: ServiceClient) -> None:
    talk = Talk(service)
    talk.say()
    service.reward(talk.handle, 0.25)
    service.reward(talk.handle, components={"right": 1.0, "short": -0.5})
    service.reward(talk.handle, 0.1, turn=0)
    assert service.close_with(talk.handle) == 0.5
    assert service.trajectory(talk.handle).turn_rewards == (0.1,)
    with pytest.raises(openai.AuthenticationError):
        talk.say()
    unscored = Talk(service)
    unscored.say()
    assert service.close_with(unscored.handle) is None
    assert service.trajectory(unscored.handle).reward is None
    with pytest.raises(ServiceError, match="no such turn"):
        service.reward(service.open(), 1.0, turn=3)


def test_outside_groups_are_claimed_whole(service: ServiceClient) -> None:
    handles = [service.open(group_id="mine", group_size=3, task={"q": 1}) for _ in range(3)]
    with pytest.raises(ServiceError, match="all of its 3"):
        service.open(group_id="mine", group_size=3)
    for number, handle in enumerate(handles):
        client = openai.OpenAI(base_url=handle.base_url, api_key=handle.api_key)
        client.chat.completions.create(model="m", messages=QUESTION, max_tokens=8)
        service.reward(handle, float(number))
        service.close_with(handle)
    (group,) = service.claim(1, "me", 60.0, 20.0)
    assert group.group_id == "mine"
    assert group.rewards == {handle.rollout_id: float(n) for n, handle in enumerate(handles)}
    assert all(row.loss_mask.sum() for row in group.samples)
    assert service.commit(1, "step_1", ["mine"], "me") == 1
    assert service.ledger()["balanced"]
    with pytest.raises(ServiceError, match="is complete"):
        service.open(group_id="mine", group_size=3)


def test_a_deleted_session_is_never_trained(service: ServiceClient) -> None:
    talk = Talk(service)
    talk.say()
    service.delete(talk.handle)
    with pytest.raises(openai.AuthenticationError):
        talk.say()
    assert service.ledger()["discarded"]["deleted"] > 0


def test_raw_completions_go_on_id_for_id(service: ServiceClient, renderer: Renderer) -> None:
    talk = Talk(service)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    first = talk.client.completions.create(model="m", prompt=prompt, max_tokens=12)
    turn = talk.trajectory().turns[0]
    assert turn.prompt_delta[0] == renderer.codec.special_id("<|im_start|>")
    whole = prompt + renderer.codec.decode(turn.completion_ids.tolist())
    assert whole.startswith(prompt + first.choices[0].text)
    talk.client.completions.create(model="m", prompt=f"{whole}\nmore", max_tokens=4)
    ids = [*turn.prompt_delta.tolist(), *turn.completion_ids.tolist(), 40, 41]
    talk.client.completions.create(model="m", prompt=ids, max_tokens=4)
    _, text, exact = talk.trajectory().turns
    assert (text.parent, exact.parent) == (0, 0)
    assert exact.prompt_delta.tolist() == [40, 41]


@pytest.mark.parametrize("bad", [-5, 10**6])
def test_ids_outside_the_vocabulary_never_reach_an_engine(service: ServiceClient, live: LiveService, bad: int) -> None:
    """One of them ends SGLang 0.5.23's process."""
    handle = service.open()
    headers = {"Authorization": f"Bearer {handle.api_key}"}
    body = {"model": "m", "prompt": [20, bad], "max_tokens": 4}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"]["message"]


def test_responses_go_on_from_an_earlier_one(service: ServiceClient) -> None:
    talk = Talk(service)
    first = talk.client.responses.create(model="m", instructions="s", input="hi", max_output_tokens=12)
    second = talk.client.responses.create(model="m", previous_response_id=first.id, input="more", max_output_tokens=8)
    assert second.id != first.id
    turns = talk.trajectory().turns
    assert (turns[1].parent, turns[1].fork_reason) == (0, None)
    with pytest.raises(openai.NotFoundError):
        talk.client.responses.create(model="m", previous_response_id="resp_nope-9", input="x")


def test_anthropics_client_and_its_prefill(service: ServiceClient, live: LiveService, renderer: Renderer) -> None:
    handle = service.open()
    client = anthropic.Anthropic(base_url=live.url, api_key=handle.api_key, max_retries=0)
    ask: list[Any] = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    extra = {"forced_ids": ids_of(renderer, " three")}
    done = client.messages.create(model="m", system="s", max_tokens=16, messages=ask, extra_body=extra)
    assert done.content[0].text == " three"
    assert done.stop_reason == "end_turn"
    echo: list[Any] = [ask[0], {"role": "assistant", "content": "one two three"}, {"role": "user", "content": "go on"}]
    with client.messages.stream(model="m", system="s", max_tokens=16, messages=echo) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    turns = service.trajectory(handle).turns
    assert (turns[1].parent, turns[1].fork_reason) == (0, None)
    with pytest.raises(anthropic.BadRequestError, match="sampling"):
        client.messages.create(model="m", max_tokens=4, messages=ask[:1], extra_body={"top_k": 3})


def test_streams_are_recorded_like_whole_replies(service: ServiceClient) -> None:
    talk = Talk(service)
    chunks = list(talk.say(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    turn = talk.trajectory().turns[0]
    assert turn.delivered
    assert chunks[-1].usage.completion_tokens == len(turn.completion_ids)
    follow = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    list(talk.say(follow, stream=True))
    assert talk.trajectory().turns[1].parent == 0
