"""Tries a renderer on a corpus: does each prompt go on from what the engine has seen, and do texts stay texts?

In: a renderer. Out: a `Proof`: per kind of conversation whether the prefix law holds, is given up as a fork with a reason, cannot be said
by the family at all, or is broken. A session is played as the gateway plays it: the first prompt, a completion, the extension, at every
reply. Nothing here waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from palestra.server.renderer.conversations import Conversation, corpus, user
from palestra.server.renderer.text import arguments_value, text_of
from palestra.server.renderer.types import ExtendRefused, Message, Rendered, Renderer, Snapshot
from palestra.server.renderer.veil import shared_beginning
from palestra.server.types import RenderError


class Verdict(StrEnum):
    """What became of one kind of conversation."""

    HOLDS = "holds"
    FORKS = "forks"
    REFUSED = "cannot be said"
    MISREAD = "misread"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One kind of conversation."""

    kind: str
    verdict: Verdict
    detail: str = ""
    """The fork's reason, the refusal, what was misread, or the law that is broken."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A renderer on the whole corpus."""

    family: str
    stop_ids: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The kinds in which a law is broken."""
        return tuple(outcome for outcome in self.outcomes if outcome.verdict is Verdict.BROKEN)


@dataclass(frozen=True, slots=True)
class Compared:
    """A first prompt beside what the checkpoint's own template makes of it."""

    kind: str
    same: bool
    detail: str = ""
    """Where they differ, or why one of them cannot be rendered."""


class LawBroken(Exception):
    """A renderer did what none may; the message says which law and shows the text."""


def prove(renderer: Renderer) -> Proof:
    """Tries every kind of conversation."""
    conversations = corpus(some_special(renderer))
    return Proof(renderer.family, renderer.stop_ids, tuple(try_out(renderer, one) for one in conversations))


def try_out(renderer: Renderer, conversation: Conversation) -> Outcome:
    """One conversation, at every reply of it."""
    try:
        found = list(_session(renderer, conversation))
    except LawBroken as error:
        return Outcome(conversation.kind, Verdict.BROKEN, str(error))
    except RenderError as error:
        return Outcome(conversation.kind, Verdict.REFUSED, str(error))
    for verdict in (Verdict.MISREAD, Verdict.FORKS):
        if details := dict.fromkeys(detail for kind, detail in found if kind is verdict):
            return Outcome(conversation.kind, verdict, ", ".join(details))
    return Outcome(conversation.kind, Verdict.HOLDS)


def compare(renderer: Renderer, own: Renderer) -> tuple[Compared, ...]:
    """First prompts of the corpus beside those of another renderer of the same checkpoint, `own`, as text."""
    told = {"question": "question", "system message": "system message", "one call": "tools"}
    out = []
    for one in corpus(()):
        if one.kind not in told:
            continue
        first = next(at for at, message in enumerate(one.messages) if message["role"] == "assistant")
        try:
            ours, theirs = (
                each.codec.decode(list(each.render(one.messages[:first], one.tools, one.options).ids))
                for each in (renderer, own)
            )
        except RenderError as error:
            out.append(Compared(told[one.kind], False, str(error)))
            continue
        at = len(shared_beginning(ours, theirs))
        detail = "" if ours == theirs else f"at {at}: {ours[at : at + 40]!r}, the template {theirs[at : at + 40]!r}"
        out.append(Compared(told[one.kind], ours == theirs, detail))
    return tuple(out)


def some_special(renderer: Renderer, most: int = 12) -> list[str]:
    """Texts of the special tokens that mean most to a renderer: those of a prompt with everything in it, and its stops."""
    codec = renderer.codec
    (rich,) = [one for one in corpus(()) if one.kind == "question after calls"]
    try:
        used = list(renderer.transcript(rich.messages[:-1], rich.tools).token_ids.tolist())
    except RenderError:
        used = list(renderer.render([user("x")]).ids)
    names = {token: text for text, token in codec.special.items()}
    found = dict.fromkeys(names[token] for token in (*renderer.stop_ids, *used) if token in names)
    return list(found)[:most]


def completion_of(
    renderer: Renderer, message: Message, tools: Sequence[Any] = (), opened: Sequence[int] = ()
) -> list[int]:
    """The ids that a model would sample for a message, its end included, after a prompt that holds `opened` of its turn.

    Raises:
        RenderError: the family cannot say it.
    """
    row = renderer.transcript([user("x"), message], tools)
    ids: list[int] = row.token_ids[row.loss_mask == 1].tolist()
    if opened and ids[: len(opened)] == list(opened):
        ids = ids[len(opened) :]
    return ids


def check_extension(
    renderer: Renderer, last: Snapshot, new: Sequence[Message], done: Rendered, again: Rendered
) -> None:
    """Holds an extension to the law. `again`: the extension by the same messages with other, harmless texts.

    Raises:
        LawBroken: a text became a special token or is not there, or the counts of the extension are impossible.
    """
    codec = renderer.codec
    special = frozenset(codec.special.values())
    got, right = ([token for token in one.ids if token in special] for one in (done, again))
    if got != right:
        raise LawBroken(
            f"texts changed the special tokens of the extension: {_words(renderer, got)} for {_words(renderer, right)}"
        )
    text = codec.decode(list(done.ids))
    for message in new:
        said = codec.decode(codec.encode_text(text_of(message).strip())).strip()
        if said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text:
            raise LawBroken(f"the extension does not hold the message {said[:80]!r}")
    ended = bool(last.completion) and last.completion[-1] in renderer.stop_ids
    if ended and done.close_tokens:
        raise LawBroken("a reply that ended by itself was ended again")
    if not 0 <= done.close_tokens + done.opened <= len(done.ids) or not done.ids:
        raise LawBroken("the extension counts more ids than it has")


def _session(renderer: Renderer, conversation: Conversation) -> Iterator[tuple[Verdict, str]]:
    """Plays a conversation and yields the reason of every fork in it, and every completion that is not read back."""
    messages, tools, options = list(conversation.messages), conversation.tools, conversation.options
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if conversation.kind == "answer among the new":
        replies = replies[:1]
    prompt = renderer.render(messages[: replies[0]], tools, options)
    seen = list(prompt.ids)
    for number, at in enumerate(replies):
        opened = seen[len(seen) - prompt.opened :] if prompt.opened else []
        whole = completion_of(renderer, messages[at], tools, opened)
        if wrong := _misread(renderer, messages[at], whole, opened):
            yield Verdict.MISREAD, wrong
        new = messages[at + 1 : replies[number + 1] if number + 1 < len(replies) else None]
        for completion in _cuts(whole) if conversation.cut else [whole]:
            last = Snapshot(tuple(completion), renderer.parse(completion, opened).message, tuple(opened), tools)
            if not last.reply.get("tool_calls"):  # cut before there was a call: nobody answers it
                new = [user("Go on.") if message["role"] == "tool" else message for message in new]
            try:
                prompt = renderer.extend(last, new, options)
                check_extension(renderer, last, new, prompt, renderer.extend(last, _harmless(new), options))
                seen = [*seen, *completion, *prompt.ids]
            except ExtendRefused as refused:
                if not refused.reason.replace("_", "").isalnum():
                    raise LawBroken(f"a fork's reason must be a word, not {refused.reason!r}") from refused
                yield Verdict.FORKS, refused.reason
                prompt = renderer.render([*messages[:at], last.reply, *new], tools, options)
                seen = list(prompt.ids)


def _cuts(whole: Sequence[int]) -> list[list[int]]:
    """A completion cut at its beginning, in its middle and before its end."""
    return [list(whole[:at]) for at in sorted({1, len(whole) // 2, len(whole) - 1}) if 0 < at < len(whole)]


def _harmless(messages: Sequence[Message]) -> list[Message]:
    """The same messages with other texts."""
    return [{**message, "content": "ok" if text_of(message).strip() else ""} for message in messages]


def _misread(renderer: Renderer, message: Message, completion: Sequence[int], opened: Sequence[int]) -> str:
    """How a completion is read back as another message than it was written from; "" where it is the same."""
    codec = renderer.codec
    read = renderer.parse(completion, opened if message.get("reasoning_content") else ()).message
    said = codec.decode(codec.encode_text(text_of(message).strip())).strip()
    if text_of(read).strip() != said:
        return f"the content {said[:80]!r} is read as {text_of(read)[:80]!r}"
    wrote, got = (_plain(renderer, one.get("tool_calls") or ()) for one in (message, read))
    if wrote != got:
        return f"the calls {wrote[:120]} are read as {got[:120]}"
    return ""


def _plain(renderer: Renderer, calls: Sequence[Message]) -> str:
    """Calls as text, as the tokenizer can say it: some put letters and their accents together. Arguments that are no JSON do not count:
    what is missing in them cannot be told from what follows."""
    values = [(call["function"]["name"], arguments_value(call)) for call in calls]
    told = [(name, None if isinstance(value, str) else value) for name, value in values]
    return renderer.codec.decode(renderer.codec.encode_text(json.dumps(told, ensure_ascii=False, sort_keys=True)))


def _words(renderer: Renderer, ids: Sequence[int]) -> str:
    return " ".join(map(renderer.codec.token_text, ids[:20]))
