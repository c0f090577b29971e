"""The prefix law for every chat family, on real tokenizers where a package has one, by sessions that hypothesis makes up.

A session goes on from what an engine might have sampled: a family's own way to say a message, the same cut anywhere, or any ids at all.
Each extension must add exactly the template's special tokens and hold each new text; nothing that was seen changes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from palestra.server.renderer.conversations import TOOLS, call, reply, result, system, user
from palestra.server.renderer.families.generic import GenericRenderer
from palestra.server.renderer.jinja import ChatTemplate
from palestra.server.renderer.proof import Verdict, check_extension, completion_of, prove, some_special
from palestra.server.renderer.registry import FAMILIES
from palestra.server.renderer.text import text_of
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import ExtendRefused, Message, Rendered, Renderer, RenderOptions, Snapshot
from palestra.server.types import RenderError
from tests import templates, tokenizers

REAL: dict[str, Callable[[Path], Path]] = {
    **dict.fromkeys(("qwen2.5", "qwen3", "qwen3-instruct", "qwen3-thinking", "qwen3.5"), tokenizers.qwen_folder),
    **dict.fromkeys(("deepseek-v3", "deepseek-v3.1", "deepseek-r1"), tokenizers.deepseek_folder),
    "mistral": tokenizers.mistral_folder,
    "chatml": tokenizers.smollm2_folder,
}
TEMPLATES = {
    "generic: chatml": (templates.CHATML, ("<|im_end|>", "<|endoftext|>")),
    "generic: llama": (templates.LLAMA, ("<|eot|>",)),
    "generic: glm": (templates.GLM, ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "generic: mistral": (templates.MISTRAL, ("</s>",)),
    "generic: numbered": (templates.NUMBERED, ("<|im_end|>",)),
}
EVERY = [*FAMILIES, *TEMPLATES]
NOT_HELD = {
    "chatml": {"call after text": Verdict.MISREAD},
    "qwen3.5": {"system message later": Verdict.REFUSED, "odd argument names": Verdict.MISREAD},
    "minimax": {"system message later": Verdict.REFUSED},
    # Their calls are one JSON list: arguments that are none stand in it as quoted text, which reads as text.
    "mistral-v3": {"broken arguments": Verdict.MISREAD, "system message later": Verdict.FORKS},
    "mistral-v7": {"broken arguments": Verdict.MISREAD},
    **{name: {"system message later": Verdict.FORKS} for name in ("deepseek-v3", "deepseek-v3.1", "deepseek-r1")},
}
"""Kinds of conversation in which a family does not hold, and what becomes of them."""


@functools.cache
def small_codec(special: tuple[str, ...]) -> TokenCodec:
    """A tiny tokenizer with these special tokens; its folder is needed only while it loads."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizers.added_codec(special, Path(folder))


@functools.cache
def renderer_of(name: str) -> Renderer:
    """One renderer a family, for the process."""
    if name in TEMPLATES:
        source, stops = TEMPLATES[name]
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        return GenericRenderer(small_codec(templates.SPECIAL), template, stops)
    kind = "mistral" if name.startswith("mistral-") else name  # its versions share the special tokens
    codec = tokenizers.codec(REAL[kind]) if kind in REAL else small_codec(tokenizers.FAMILY_SPECIAL[kind])
    return FAMILIES[name].make(codec)


@pytest.mark.parametrize("name", EVERY)
def test_sessions_go_on_from_whatever_was_sampled(name: str) -> None:
    renderer = renderer_of(name)
    words = [" ", "\n", "x", "é", "北京", "🌍🏽", '"', "{", "</", "|>", "\ud83c", *some_special(renderer)]
    texts = st.lists(st.sampled_from(words), max_size=4).map("".join) | st.text(max_size=8)

    @settings(
        max_examples=8,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # shrinking a session takes minutes
    )
    @given(st.data())
    def session(data: st.DataObject) -> None:
        _play(renderer, data.draw, texts)

    session()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_corpus_holds_but_for_what_a_family_cannot_say(name: str) -> None:
    proof = prove(renderer_of(name))
    assert proof.broken == ()
    found = {outcome.kind: outcome.verdict for outcome in proof.outcomes if outcome.verdict is not Verdict.HOLDS}
    assert found == NOT_HELD.get(name, {}), [outcome for outcome in proof.outcomes if outcome.kind in found]
    assert all(outcome.detail for outcome in proof.outcomes if outcome.kind in found)


def test_a_template_that_breaks_the_prefix_forks_everywhere() -> None:
    proof = prove(renderer_of("generic: numbered"))
    assert proof.broken == ()
    assert not [outcome for outcome in proof.outcomes if outcome.verdict is Verdict.HOLDS]
    assert {outcome.detail for outcome in proof.outcomes if outcome.verdict is Verdict.FORKS} == {"depends_on_history"}


class Loose(GenericRenderer):
    """A renderer that writes texts as if they were the template's own words: what `prove` is there to find."""

    def extend(self, last: Snapshot, new: Sequence[Message], options: RenderOptions | None = None) -> Rendered:
        done = super().extend(last, new, options)
        return Rendered(
            self.codec.encode(self.special.split(self.codec.decode(list(done.ids)))), done.close_tokens, done.opened
        )


def test_a_renderer_that_lets_texts_be_special_tokens_is_found_out() -> None:
    loose = Loose(small_codec(templates.SPECIAL), ChatTemplate({"default": templates.CHATML}, {}), ["<|im_end|>"])
    broken = {outcome.kind: outcome.detail for outcome in prove(loose).broken}
    assert broken.keys() == {"odd text", "odd calls"}
    assert "special tokens of the extension" in broken["odd text"]


def _play(renderer: Renderer, draw: Callable[..., Any], texts: st.SearchStrategy[str]) -> None:
    tools = TOOLS if draw(st.booleans()) else ()
    options = RenderOptions(date="2026-01-31", thinking=draw(st.sampled_from([None, True, False])))
    messages = [*([system(draw(texts))] if draw(st.booleans()) else []), user(draw(texts))]
    try:
        prompt = renderer.render(messages, tools, options)
    except RenderError:  # a family without system messages
        messages = messages[-1:]
        prompt = renderer.render(messages, tools, options)
    _same_special(renderer, prompt, renderer.render(_harmless(messages), tools, options))
    seen, reason = list(prompt.ids), "none"
    for turn in range(draw(st.integers(1, 3))):
        opened = seen[len(seen) - prompt.opened :]
        completion = _sampled(renderer, draw, texts, tools, opened)
        read = renderer.parse(completion, opened).message
        assert read["role"] == "assistant"
        new = _answers(draw, texts, read, turn)
        last = Snapshot(tuple(completion), read, tuple(opened), tools)
        try:
            prompt = renderer.extend(last, new, options)
        except ExtendRefused as refused:
            reason = refused.reason
            break
        check_extension(renderer, last, new, prompt, renderer.extend(last, _harmless(new), options))
        assert (prompt.close_tokens > 0) <= (not completion or completion[-1] not in renderer.stop_ids)
        seen += [*completion, *prompt.ids]
    assert reason.replace("_", "").isalpha(), reason


def _sampled(
    renderer: Renderer,
    draw: Callable[..., Any],
    texts: st.SearchStrategy[str],
    tools: Sequence[Any],
    opened: Sequence[int],
) -> list[int]:
    """Ids that an engine might have sampled."""
    how = draw(st.sampled_from(["said", "said", "cut", "noise"]))
    if how == "noise":
        special = st.sampled_from(sorted(renderer.codec.special.values()))
        return draw(st.lists(st.integers(0, renderer.codec.vocab_size - 1) | special, max_size=12))  # type: ignore[no-any-return]
    calls = [
        call("get_weather", {"city": draw(texts)}, number) for number in range(draw(st.integers(0, 2)) if tools else 0)
    ]
    message = reply(draw(texts), calls, draw(texts))
    try:
        whole = completion_of(renderer, message, tools, opened)
    except RenderError:  # a template without parallel calls, or without any
        whole = completion_of(renderer, reply("x"), tools, opened)
    return whole[: draw(st.integers(0, len(whole)))] if how == "cut" else whole


def _answers(draw: Callable[..., Any], texts: st.SearchStrategy[str], read: Message, turn: int) -> list[Message]:
    """What an agent may send after a reply."""
    results = [result(draw(texts), one) for one in read.get("tool_calls") or ()]
    more = [user(draw(texts))] if not results or draw(st.booleans()) else []
    later = [system(draw(texts))] if turn and not draw(st.integers(0, 3)) else []
    return [*results, *later, *more]


def _harmless(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": "ok" if text_of(message).strip() else ""} for message in messages]


def _same_special(renderer: Renderer, one: Rendered, other: Rendered) -> None:
    special = frozenset(renderer.codec.special.values())
    assert [t for t in one.ids if t in special] == [t for t in other.ids if t in special]
