"""Any checkpoint that brings a chat template, driven by the template itself.

In: a model folder with a chat template. Out: ids. A whole prompt is one rendering of the template. An extension renders a short
conversation of the same shape (a question, the last reply with its calls, the new messages) and takes what comes after the reply, so that
nothing seen is rendered again. Whether that is what the template would say in a long conversation is tried out once per shape; where it
is not, the extension is refused and the request becomes a recorded fork. Texts of messages are hidden from the template and put in as
plain text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from palestra.server.renderer.callform import learn_form
from palestra.server.renderer.habits import (
    PROBE_TOOL,
    call_message,
    check_shown,
    dress,
    generation,
    learn,
    veiled_tools,
)
from palestra.server.renderer.jinja import ChatTemplate, read_json
from palestra.server.renderer.shapes import ShapeProof, shape_of
from palestra.server.renderer.text import strip_end
from palestra.server.renderer.tokens import Piece, TokenCodec
from palestra.server.renderer.types import (
    ExtendRefused,
    Message,
    ParsedReply,
    Rendered,
    Renderer,
    RenderOptions,
    Snapshot,
    ToolSpec,
)
from palestra.server.renderer.veil import SpecialText, Veil
from palestra.server.types import RenderedRow, RenderError

PLAIN = RenderOptions()
Pieces: TypeAlias = list[Piece]


class GenericRenderer(Renderer):
    """A chat template as a renderer."""

    family: ClassVar[str] = "generic"

    def __init__(
        self,
        codec: TokenCodec,
        template: ChatTemplate,
        stops: Sequence[str],
        flags: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`stops`: texts of the special tokens that end generation. `flags`: see `SpecialText`.

        Raises:
            RenderError: the template cannot render a question and an answer, or nothing ends a turn.
        """
        self.codec, self.template = codec, template
        self.special = SpecialText(codec.special, flags)
        self.habits = learn(template, self.special, stops)
        ends = [token for token in (self.habits.end, *stops) if token]
        self.stop_ids = tuple(dict.fromkeys(codec.special_id(token) for token in ends))
        if not self.stop_ids:
            raise RenderError("no special token ends a turn: neither the template nor generation_config.json names one")
        self.think: int | None = None
        self.think_end: int | None = None
        if (think := self.habits.think) is not None:
            self.think, self.think_end = codec.special_id(think[0]), codec.special_id(think[1])
        self._generation = functools.lru_cache(maxsize=64)(self._find_generation)
        self._shapes = ShapeProof(template, self.habits)
        self.form = self._learn_form()
        self.call_end = self.form.end if self.form is not None and isinstance(self.form.end, int) else None

    @classmethod
    def of(cls, folder: Path, codec: TokenCodec) -> GenericRenderer:
        """The renderer of a folder with a chat template.

        Raises:
            RenderError: there is none, or it cannot be used.
        """
        template = ChatTemplate.of(folder)
        if template is None:
            raise RenderError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        return cls(codec, template, _stops(folder, codec), _flags(folder))

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: RenderOptions | None = None
    ) -> Rendered:
        options = options or PLAIN
        veil = Veil(self.special)
        listed = veiled_tools(tools, veil, self.special)
        first = len(veil.texts)
        text = self.template.text(dress(messages, veil, self.habits), listed, options)
        check_shown(text, messages, first, veil, self.habits)
        return self._prompt([], text, veil, options)

    def extend(self, last: Snapshot, new: Sequence[Message], options: RenderOptions | None = None) -> Rendered:
        options = options or PLAIN
        stopped = last.completion[-1] if last.completion and last.completion[-1] in self.stop_ids else None
        text, veil, close = self._after(last.reply, new, bool(last.tools), options, stopped)
        if stopped is None and self._is_thinking(last):
            close = [self.think_end or 0, *close]
        return self._prompt(close, text, veil, options)

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        thought = False
        if self.think_end is not None and self.think_end in rest:
            at = rest.index(self.think_end)
            start = rest.index(self.think) + 1 if self.think in rest[:at] else 0
            if reasoning := self.codec.decode(rest[start:at]).strip("\n"):
                message["reasoning_content"] = reasoning
            rest, thought = rest[at + 1 :], True
        elif self.think is not None and rest and rest[0] == self.think:  # cut inside its reasoning
            return ParsedReply({**message, "content": "", "reasoning_content": self.codec.decode(rest[1:]).strip("\n")})
        text, calls, wrong = self.form.read(rest, self.codec) if self.form else (self.codec.decode(rest), [], None)
        if calls:
            message["tool_calls"] = calls
        content = text.strip("\n") if calls or thought else text
        message["content"] = content if content or not calls else None
        return ParsedReply(message, wrong)

    def transcript(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedRow:
        ids: list[int] = []
        mask: list[int] = []
        said: Message | None = None
        done = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if said is None:
                before = self.render(messages[:at], tools)
            else:
                stopped = self.codec.special_id(self.habits.end) if self.habits.end else None
                text, veil, close = self._after(said, messages[done:at], bool(tools), PLAIN, stopped)
                before = self._prompt(close, text, veil, PLAIN)
            prompt = list(before.ids[: len(before.ids) - before.opened])
            body = self.codec.encode(self.assistant_body(message))
            ids += prompt + body
            mask += [0] * len(prompt) + [1] * len(body)
            said, done = message, at + 1
        if said is None:
            raise RenderError("a transcript needs at least one assistant message")
        return RenderedRow(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))

    def assistant_body(self, message: Message) -> Pieces:
        """What an assistant's turn holds after its header, its end included where the template writes one.

        Raises:
            RenderError: the template writes the turn so that its header cannot be told from it.
        """
        veil = Veil(self.special)
        turns = dress([{"role": "user", "content": "x"}, message], veil, self.habits)
        tools = [PROBE_TOOL] if message.get("tool_calls") else []
        text = self.template.text(turns, tools, generate=False)
        header, opened = self._generation(PLAIN)
        asked = self.template.text(turns[:1], tools)
        head = asked.removesuffix(header + opened) + header
        if not text.startswith(head):
            raise RenderError(
                "the chat template writes an assistant's turn under another header than its generation prompt"
            )
        shown = veil.end_of_last(text, range(1, len(veil.texts))) or 0
        end = self.special.find(text, max(len(head), shown), self.habits.ends)
        return veil.pieces(text[len(head) : end[1] if end else len(text)], self.special)

    def _after(
        self, reply: Message, new: Sequence[Message], tools: bool, options: RenderOptions, stopped: int | None
    ) -> tuple[str, Veil, Pieces]:
        """The rendering that follows a reply, and the pieces that end it where it did not end by itself (`stopped` is None).

        Raises:
            ExtendRefused: the template would say these messages differently after another beginning, or cannot say them here.
        """
        shape = shape_of(reply, new, tools, options)
        if (reason := self._shapes.why_not(shape)) is not None:
            raise ExtendRefused(*reason)
        veil = Veil(self.special)
        try:
            text, after = self._shapes.after_reply([{"role": "user", "content": "x"}], reply, new, shape, veil, options)
        except RenderError as error:
            raise ExtendRefused("template_refuses", str(error)) from error
        found = self.special.find(text, after, self.habits.ends)
        if found is None:
            raise ExtendRefused("no_end", "the chat template does not end the assistant's turn with a special token")
        start, end, name = found
        token = self.codec.special_id(name)
        if self.habits.end is None:  # the next header ends the turn: it is there already if the model stopped on it
            return text[end if stopped == token else start :], veil, []
        return text[end:], veil, [] if stopped is not None else [token]

    def _prompt(self, close: Pieces, text: str, veil: Veil, options: RenderOptions) -> Rendered:
        header, opening = self._generation(RenderOptions(options.date, options.thinking, options.effort))
        if not text.endswith(header + opening):
            opening = ""  # a generation prompt of another shape: all of it counts as header
        before = veil.pieces(text.removesuffix(opening), self.special, header)
        extra = self.special.split(opening)
        if options.call is not None:
            extra += self._call_opening(options.call)
        if options.prefill:
            extra.append(options.prefill)
        opened = self.codec.encode(extra)
        return Rendered([*self.codec.encode([*close, *before]), *opened], len(close), len(opened))

    def _call_opening(self, name: str) -> Pieces:
        """The beginning of a call, up to its arguments, or up to its name where `name` is "".

        Raises:
            RenderError: the template's calls are no JSON, or it shows none.
        """
        probe = self._body_of_calls(1)
        if self.form is None or probe is None:
            raise RenderError("a tool call cannot be forced in this template's form; leave tool_choice to the model")
        words = "".join(
            self.codec.token_text(p) if isinstance(p, int) else p for p in probe if isinstance(p, int | str)
        )
        at = words.index("probe_0")
        if not name:
            return self.special.split(words[:at])
        middle = words[at + len("probe_0") : words.index("{", at)].rstrip(" ")
        return [*self.special.split(words[:at]), name, *self.special.split(middle)]

    def _is_thinking(self, last: Snapshot) -> bool:
        for token in (*reversed(last.completion), *reversed(last.opened)):
            if self.think is not None and token in (self.think, self.think_end):
                return token == self.think
        return False

    def _find_generation(self, options: RenderOptions) -> tuple[str, str]:
        return generation(self.template, self.special, self.habits, options)

    def _learn_form(self) -> Any:
        one = self._body_of_calls(1)
        return None if one is None else learn_form(one, self._body_of_calls(2), "probe_0", self.codec)

    def _body_of_calls(self, number: int) -> Pieces | None:
        """The pieces of a turn of that many calls of tool probe_0, without its end; None where the template refuses them."""
        calls = [call_message("probe_0", {"key": "v"}, i)["tool_calls"][0] for i in range(number)]
        if self.habits.arguments == "none":
            return None
        try:
            body = self.assistant_body({"role": "assistant", "content": None, "tool_calls": calls})
        except RenderError:
            return None
        return body[:-1] if body and body[-1] in self.stop_ids else body


def _stops(folder: Path, codec: TokenCodec) -> list[str]:
    """Texts of the special tokens that end generation: of generation_config.json, else config.json, and the tokenizer's end of sentence."""
    names = {token: text for text, token in codec.special.items()}
    given = read_json(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        given = read_json(folder / "config.json").get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    about = read_json(folder / "tokenizer_config.json").get("eos_token")
    end = about.get("content") if isinstance(about, Mapping) else about
    return list(dict.fromkeys(text for text in (*map(names.get, ids), end) if text in codec.special))


def _flags(folder: Path) -> dict[str, Mapping[str, Any]]:
    """By special token: whether white space beside it belongs to it, as tokenizer_config.json says."""
    listed = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {entry["content"]: entry for entry in listed.values() if isinstance(entry, Mapping)}
