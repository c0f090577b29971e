"""What the benchmark's agents say and its engine answers: texts of exact lengths in tokens.

In: a model folder with a tokenizer. Out: `Texts`, stored as one JSON file, so that neither the load generator nor the mock needs a
tokenizer. A first prompt has FIRST tokens, each later one GROWTH more: REPLY of them sampled, the others a user's message and the
template's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.server.renderer.tokens import TokenCodec
    from palestra.server.renderer.types import Renderer

BUILD = 1
"""Raised where what `make_texts` writes changes."""
FIRST = 597
"""Tokens of a session's first prompt."""
REPLY = 64
"""Tokens of a reply, its end token included."""
GROWTH = 200
"""Tokens from one prompt to the next."""
USERS = 512
"""Different user messages."""
REPLIES = 64
"""Different replies."""
SYSTEM = 180
"""Tokens of the system message, which all sessions share."""
WORDS = 512
"""Words that first prompts are told apart by."""


@dataclass(frozen=True, slots=True)
class Texts:
    """One benchmark's texts."""

    model: str
    """The model folder whose tokenizer counted them."""
    system: str
    task: str
    """The first user message, with `{}` where three words of `words` make it one that no service has seen."""
    words: tuple[str, ...]
    """Words that are one token each."""
    users: tuple[str, ...]
    """Later user messages."""
    replies: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    """Of the replies, the end token last."""

    def first(self, number: int) -> tuple[str, str]:
        """System and user message of first prompt `number`: equal numbers give equal prompts, others differ."""
        n = len(self.words)
        name = " ".join(self.words[digit % n] for digit in (number, number // n, number // n // n))
        return self.system, self.task.replace("{}", name, 1)

    @classmethod
    def load(cls, path: Path) -> Texts:
        """What `make_texts` wrote."""
        data: dict[str, Any] = json.loads(path.read_bytes())
        for name in ("words", "users", "replies"):
            data[name] = tuple(data[name])
        return cls(**{**data, "ids": tuple(map(tuple, data["ids"]))})


def make_texts(folder: Path, path: Path) -> None:
    """Writes the texts for the tokenizer in `folder` to `path`.

    Raises:
        ValueError: the lengths do not come out with this tokenizer and its chat family.
    """
    from palestra.server.renderer.registry import load_renderer

    renderer = load_renderer(folder)
    codec, reader = renderer.codec, _Reader(renderer.codec)
    system = reader.passage(SYSTEM)
    ids = [[*codec.encode_text(reader.passage(REPLY - 1)), renderer.stop_ids[0]] for _ in range(REPLIES)]
    replies = [codec.decode(reply[:-1]) for reply in ids]
    words = _words(codec)
    task = _task(renderer, reader, system, words)
    room = GROWTH - _growth(renderer, ids[0], "x") + 1
    users = [reader.passage(room) for _ in range(USERS)]
    found = Texts(str(folder), system, task, words, tuple(users), tuple(replies), tuple(map(tuple, ids)))
    _check(renderer, found)
    path.write_text(json.dumps(asdict(found)), encoding="utf-8")


class _Reader:
    """Cuts passages of an exact number of tokens out of CPython's own documentation, one after the other."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        prose = " ".join(" ".join(topics.topics.values()).split())
        self._ids = codec.encode_text(prose)
        self._at = 0

    def passage(self, tokens: int) -> str:
        """The next passage that has `tokens` tokens on its own too."""
        while True:
            text = self._codec.decode(self._ids[self._at : self._at + tokens]).strip()
            if text.isascii() and len(self._codec.encode_text(text)) == tokens:
                self._at = (self._at + tokens) % (len(self._ids) - tokens)
                return text
            self._at = (self._at + 1) % (len(self._ids) - tokens)


def _words(codec: TokenCodec) -> tuple[str, ...]:
    """Ordinary words that are one token behind a space."""
    texts = (codec.token_text(token) for token in range(codec.vocab_size))
    words = [text[1:] for text in texts if text[:1] == " " and len(text) > 3]
    return tuple(word for word in words if word.isascii() and word.isalpha() and word.islower())[:WORDS]


def _prompt(renderer: Renderer, system: str, user: str) -> int:
    return len(renderer.render([{"role": "system", "content": system}, {"role": "user", "content": user}]).ids)


def _task(renderer: Renderer, reader: _Reader, system: str, words: Sequence[str]) -> str:
    """The first user message, whose prompt has FIRST tokens whichever words are put in."""
    begin = "Case {}:\n"
    room = FIRST - _prompt(renderer, system, begin.format(" ".join(words[:3])))
    return begin + reader.passage(room)


def _growth(renderer: Renderer, reply: Sequence[int], user: str) -> int:
    """Tokens from a prompt to the next, with this reply and this message between them."""
    from palestra.server.renderer.types import Snapshot

    said = {"role": "assistant", "content": renderer.codec.decode(reply[:-1])}
    new = renderer.extend(Snapshot(reply, said, (), ()), [{"role": "user", "content": user}])
    return len(reply) + len(new.ids)


def _check(renderer: Renderer, texts: Texts) -> None:
    """Raises:
    ValueError: a length is wrong.
    """
    for number in (0, 1, 511, 4711, 1 << 26):
        if (got := _prompt(renderer, *texts.first(number))) != FIRST:
            raise ValueError(f"first prompt {number} has {got} tokens instead of {FIRST}")
    for at, user in enumerate(texts.users):
        if (got := _growth(renderer, texts.ids[at % REPLIES], user)) != GROWTH:
            raise ValueError(f"user message {at} makes {got} tokens a turn instead of {GROWTH}")
