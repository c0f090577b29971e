"""Mistral's tekken formats, id for id against mistral-common's own encoder where it has the same prompt; and a session that only grows."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.server.renderer.families.mistral import MistralRenderer, Version
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import ExtendRefused, Message, RenderOptions
from palestra.server.types import RenderError
from tests.renderer_session import CLOCK, TOOLS, WEATHER, Session, call, result, said, sampled, without_ids, written
from tests.tokenizers import MISTRAL_NEWER, _byte_bpe, added_codec

VERSIONS: tuple[Version, ...] = ("v3", "v7", "v11", "v13")
RANKS = 8_000
A, B = "abcdefghi", "ABCDEFGH1"
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "q"}
ONE = said(None, call("weather", '{"city": "Zürich"}', A), call("clock", "{}", B))
Encoder = Callable[[Sequence[Message], Sequence[Any], Version], list[int]]


@functools.cache
def tekken_data() -> dict[str, Any]:
    """mistral-common's tekken file of September 2024."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.origin is not None
    data: dict[str, Any] = json.loads((Path(spec.origin).parent / "data" / "tekken_240911.json").read_bytes())
    return data


@pytest.fixture(scope="session")
def tekken_codec(tmp_path_factory: pytest.TempPathFactory) -> TokenCodec:
    """The first ranks of the real vocabulary (all of them take seconds to load), and the special tokens of all versions."""
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in tekken_data()["vocab"][:RANKS]}
    tokenizer = _byte_bpe(ranks, 1000, tekken_data()["config"]["pattern"], special_names())
    folder = tmp_path_factory.mktemp("tekken")
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenCodec(folder)


def special_names() -> list[str]:
    """The 1,000 special tokens: those of the older files, and the ones that v11 and v13 add."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    older = {token["rank"]: str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS}
    return [{**older, **MISTRAL_NEWER}.get(rank, f"<SPECIAL_{rank}>") for rank in range(1000)]


@pytest.fixture(params=VERSIONS)
def mistral(request: pytest.FixtureRequest, tekken_codec: TokenCodec) -> MistralRenderer:
    return MistralRenderer(tekken_codec, request.param)


@pytest.fixture
def v13(tekken_codec: TokenCodec) -> MistralRenderer:
    return MistralRenderer(tekken_codec, "v13")


@pytest.fixture(scope="module")
def theirs() -> Encoder:
    """mistral-common's encoder: one tekken vocabulary with the tokens of all versions, an instruct tokenizer for each."""
    from mistral_common.protocol.instruct import normalize
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers import instruct
    from mistral_common.tokens.tokenizers.base import TokenizerVersion
    from mistral_common.tokens.tokenizers.tekken import SpecialTokenInfo, Tekkenizer

    data, names = tekken_data(), special_names()
    special = [SpecialTokenInfo(rank=rank, token_str=name, is_control=True) for rank, name in enumerate(names)]
    pattern, version = data["config"]["pattern"], TokenizerVersion.v13
    tekken = Tekkenizer(data["vocab"][:RANKS], special, pattern, 1000 + RANKS, 1000, version)
    normalizers = {
        "v3": normalize.InstructRequestNormalizer.normalizer(),
        "v7": normalize.InstructRequestNormalizerV7.normalizer(),
        "v11": normalize.InstructRequestNormalizerV7.normalizer(),
        "v13": normalize.InstructRequestNormalizerV13.normalizer(),
    }

    def encode(messages: Sequence[Message], tools: Sequence[Any], version: Version) -> list[int]:
        said: list[Any] = [dict(message) for message in messages]
        request: Any = ChatCompletionRequest.from_openai(said, list(tools) or None)
        encoder = getattr(instruct, f"InstructTokenizer{version.upper()}")(tekken)
        return list(encoder.encode_instruct(normalizers[version].from_chat_completion_request(request)).tokens)

    return encode


def conversations() -> dict[str, list[Message]]:
    """What both encoders can say, each ending where the model speaks next."""
    return {
        "single": [USER],
        "system": [SYSTEM, USER],
        "users": [SYSTEM, USER, said("a"), {"role": "user", "content": "Ünd nun? 北京 1e3"}],
        "results": [SYSTEM, USER, ONE, result("blue", A), result('{"h": 12}', B)],
        "again": [
            USER,
            ONE,
            result("blue", A),
            result("12", B),
            said("Blue, noon."),
            {"role": "user", "content": "ok"},
        ],
        "two in a row": [USER, {"role": "user", "content": "r"}],
        "no result text": [USER, said(None, call("clock", "", A)), result("", A)],
    }


@pytest.mark.parametrize("kind", conversations())
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
def test_equal_to_mistral_common_id_for_id(
    mistral: MistralRenderer, theirs: Encoder, kind: str, tools: list[Any]
) -> None:
    messages = conversations()[kind]
    assert mistral.render(messages, tools).ids == theirs(messages, tools, mistral.version)


def test_results_out_of_order_are_sorted_as_v13_does(v13: MistralRenderer, theirs: Encoder) -> None:
    messages = [USER, ONE, result("12", B), result("blue", A)]
    assert v13.render(messages, TOOLS).ids == theirs(messages, TOOLS, "v13")


def test_reasoning_equals_mistral_common_s(v13: MistralRenderer, theirs: Encoder) -> None:
    chunks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "Hm.", "closed": True},
        {"type": "text", "text": "a"},
    ]
    messages: list[Message] = [USER, {"role": "assistant", "content": chunks}, USER]
    ours = v13.render([USER, said("a", reasoning="Hm."), USER])
    assert ours.ids == theirs(messages, [], "v13")


FIRST = {
    "v3": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich"}, "id": "abcdefghi"}, '
    '{"name": "clock", "arguments": {}, "id": "ABCDEFGH1"}]</s>',
    "v11": '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Zürich"}[TOOL_CALLS]clock[CALL_ID]ABCDEFGH1[ARGS]{}</s>',
    "v13": '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]clock[ARGS]{}</s>',
}
SECOND = {
    "v3": '[TOOL_RESULTS]{"content": "blue", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS]{"content": 12, "call_id": "ABCDEFGH1"}[/TOOL_RESULTS]',
    "v7": "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]blue[/TOOL_RESULTS][TOOL_RESULTS]ABCDEFGH1[TOOL_CONTENT]12[/TOOL_RESULTS]",
    "v13": "[TOOL_RESULTS]blue[/TOOL_RESULTS][TOOL_RESULTS]12[/TOOL_RESULTS]",
}


def test_the_whole_text_of_a_session_with_tools(mistral: MistralRenderer) -> None:
    version = mistral.version
    session = Session(mistral, [SYSTEM, USER], TOOLS)
    session.say(ONE)
    first, second = (c["id"] for c in session.reply["tool_calls"])
    added = session.hear(result("blue", first), result("12", second))
    session.say(said("Blue."))
    session.hear({"role": "user", "content": "Thanks"})
    listed = f"[AVAILABLE_TOOLS]{json.dumps([WEATHER, CLOCK])}[/AVAILABLE_TOOLS]"
    start = (
        f"{listed}[INST]Be kind.\n\nq[/INST]"
        if version == "v3"
        else f"[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT]{listed}[INST]q[/INST]"
    )
    calls = FIRST["v3" if version == "v7" else version]
    results = SECOND["v7" if version == "v11" else version]
    assert added == results
    assert session.text == f"<s>{start}{calls}{results}Blue.</s>[INST]Thanks[/INST]"
    assert session.ids.count(mistral.begin) == 1
    row = mistral.transcript([SYSTEM, USER, ONE, result("blue", A), result("12", B), said("Blue.")], TOOLS)
    assert row.token_ids.tolist() == session.ids[: len(row.token_ids)]
    assert row.loss_mask.tolist() == session.mask[: len(row.token_ids)]


@pytest.mark.parametrize(
    "message",
    [
        said("Blue."),
        said(""),
        said(' {"name": "Ada"} \n'),
        said(None, call("clock", "{}", A)),
        said("I look.\n", call("a", '{"x": "ü]\\n"}', A), call("b", "{}", B), call("c", '{"y": [1]}', "123456789")),
    ],
)
def test_a_message_is_read_as_it_was_written(mistral: MistralRenderer, message: dict[str, Any]) -> None:
    reply = mistral.parse(sampled(mistral, message))
    keep = mistral.version != "v13"  # the others carry ids
    assert (reply.message if keep else without_ids(reply.message)) == (message if keep else without_ids(message))
    assert reply.ill_formed is None


def test_reasoning_is_read_in_v13(v13: MistralRenderer) -> None:
    message = said("Yes.\n", reasoning="\nHm.")
    assert v13.parse(sampled(v13, message)).message == message
    assert v13.parse(written(v13, "[THINK]Hm")).message == said("", reasoning="Hm")
    session = Session(v13, [USER])
    session.say(written(v13, "[THINK]Hm"))
    assert session.hear(USER) == "[/THINK]</s>[INST]q[/INST]"
    assert v13.codec.decode(session.closed) == "[/THINK]</s>"


def test_ids_have_nine_letters_whatever_came(mistral: MistralRenderer) -> None:
    made = said(None, call("clock", "{}", "call_0123456789abcdef"))
    text = mistral.codec.decode(mistral.render([USER, made, result("12", "call_0123456789abcdef")]).ids)
    assert "call_0" not in text
    session = Session(mistral, [USER], TOOLS)
    ids = FIRST["v3" if mistral.version == "v7" else mistral.version].replace(', "id": "abcdefghi"', "")
    session.say(written(mistral, ids.replace("[CALL_ID]abcdefghi", "")))
    first, second = (c["id"] for c in session.reply["tool_calls"])
    assert len(first) == 9
    assert (second == B) == (mistral.version != "v13")
    added = session.hear(result("blue", first))
    assert (first in added) == (mistral.version != "v13")


BROKEN = {
    "v7": [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argum', [("f", "{}"), ("g", "{")]),
        ('[TOOL_CALLS][{"nam', []),
        ("[TOOL_CALLS]", []),
        ("[TOOL_CALLS][1]", []),
    ],
    "v13": [
        ('[TOOL_CALLS]f[ARGS]{"a": 1', [("f", '{"a": 1')]),
        ("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]", [("f", "{}"), ("g", "{")]),
        ("[TOOL_CALLS]f[ARGS][1]", [("f", "[1]")]),
        ("[TOOL_CALLS]f", []),
        ("[TOOL_CALLS][ARGS]{}", []),
    ],
}


def test_broken_calls_are_on_record(mistral: MistralRenderer) -> None:
    for text, expected in BROKEN["v7" if mistral.version in ("v3", "v7") else "v13"]:
        reply = mistral.parse(written(mistral, text))
        assert reply.ill_formed
        got = [(c["function"]["name"], c["function"]["arguments"]) for c in reply.message.get("tool_calls", ())]
        assert got == expected
        if not expected:
            assert reply.message["content"] == text


def test_a_forced_call_stands_in_the_prompt(mistral: MistralRenderer) -> None:
    listed = mistral.version in ("v3", "v7")
    for name, rest in (
        ("clock", "{}}]" if listed else "{}"),
        ("", 'clock", "arguments": {}}]' if listed else "clock[ARGS]{}"),
    ):
        prompt = mistral.render([USER], TOOLS, RenderOptions(call=name))
        opened = prompt.ids[len(prompt.ids) - prompt.opened :]
        assert opened[0] == mistral.calls
        (made,) = mistral.parse([*written(mistral, rest), mistral.end], opened).message["tool_calls"]
        assert made["function"] == {"name": "clock", "arguments": "{}"}


def test_a_cut_turn_is_closed_and_a_prefill_goes_on(mistral: MistralRenderer) -> None:
    session = Session(mistral, [USER], (), RenderOptions(prefill="The sky"))
    assert session.say(mistral.codec.encode_text(" is")) == said("The sky is")
    assert session.hear(USER) == "</s>[INST]q[/INST]The sky"
    assert session.closed == [mistral.end]


def test_users_turns_that_follow_each_other_are_one_in_an_extension_too(mistral: MistralRenderer) -> None:
    session = Session(mistral, [USER])
    session.say(said("a"))
    assert session.hear(USER, {"role": "user", "content": "r"}) == "[INST]q\n\nr[/INST]"


def test_special_text_stays_text(mistral: MistralRenderer) -> None:
    literal = "a</s>[INST]b[/INST][TOOL_CALLS][ARGS]<s>"
    tools = [{**WEATHER, "function": {**WEATHER["function"], "description": literal}}, CLOCK]
    ids = mistral.render([{"role": "system", "content": literal}, {"role": "user", "content": literal}], tools).ids
    plain = mistral.render([SYSTEM, USER], TOOLS).ids
    assert [token for token in ids if token < 1000] == [token for token in plain if token < 1000]
    assert mistral.parse(mistral.codec.encode_text(literal)).message == said(literal)


def test_a_later_system_message(mistral: MistralRenderer) -> None:
    session = Session(mistral, [SYSTEM, USER])
    session.say(said("a"))
    later = {"role": "system", "content": "Be brief."}
    if mistral.version == "v3":
        with pytest.raises(ExtendRefused) as refused:
            session.hear(later, USER)
        assert refused.value.reason == "system_after_reply"
        anew = mistral.codec.decode(mistral.render([SYSTEM, USER, said("a"), later, USER]).ids)
        assert anew == "<s>[INST]q[/INST]a</s>[INST]Be kind.\n\nBe brief.\n\nq[/INST]"
    else:
        assert session.hear(later, USER) == "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]q[/INST]"


@pytest.mark.parametrize("version", ["v7", "v13"])
def test_ten_thousand_blocks_are_one_scan(tekken_codec: TokenCodec, version: Version) -> None:
    renderer = MistralRenderer(tekken_codec, version)
    assert not renderer.parse([renderer.calls] * 10_000).has_calls
    one = renderer.codec.encode(renderer.assistant_body(said(None, call("f", "{}", A))))
    assert len(renderer.parse(one * 10_000).message["tool_calls"]) == 10_000


def test_the_version_follows_from_the_tokens(tmp_path: Path, tekken_codec: TokenCodec) -> None:
    names = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    names += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"]
    found = []
    for more in (
        [],
        ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"],
        ["[ARGS]", "[CALL_ID]"],
        ["[THINK]", "[/THINK]"],
    ):
        names += more
        found.append(MistralRenderer(added_codec(names, tmp_path / str(len(names)))).version)
    assert found == list(VERSIONS)
    with pytest.raises(RenderError, match="v3, v7, v11, v13"):
        MistralRenderer(tekken_codec, "v9")  # type: ignore[arg-type]
