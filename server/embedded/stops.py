"""Stop texts: sampled ids in, the text that ended the completion out. Waits for the tokenizer's file, once.

Texts are looked for in what the ids decode to, so a stop text may begin and end within tokens, and a character may be spread over several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from palestra.server.embedded.types import RequestRefused
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.types import RenderError

Decode = Callable[[Sequence[int]], str]
UNDECIDED = "\ufffd"
"""What the bytes of an unfinished character decode to."""
PENDING = 3
"""Characters at a text's end that later tokens may still change: an unfinished character has at most so many bytes."""


class Texts:
    """The model folder's tokenizer, read when a request first needs it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._codec: TokenCodec | None = None

    def load(self) -> TokenCodec:
        """Reads `tokenizer.json`, unless it was read before.

        Raises:
            RequestRefused: there is none, or it cannot be read.
        """
        if self._codec is None:
            try:
                self._codec = TokenCodec(Path(self._folder))
            except (RenderError, OSError, ValueError) as fault:
                raise RequestRefused(f"stop: texts need the model's tokenizer: {fault}") from fault
        return self._codec

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out.

        Raises:
            RequestRefused: as for `load`.
        """
        return self.load().decode(ids)


class StopWatch:
    """Looks for stop texts in one completion as it grows, through a window over its last tokens."""

    def __init__(self, texts: tuple[str, ...], decode: Decode, start: int) -> None:
        """`start`: how many of the tokens are the prompt's, whose text does not count."""
        self._texts, self._decode, self._start = texts, decode, start
        # A match to come needs all but one character of the longest text. One more, because decoders drop a space at the window's edge.
        self._keep = max(map(len, texts)) + PENDING
        self._most = 8 * self._keep

    def check(self, tokens: Sequence[int]) -> str | None:
        """The first of the texts that the completion contains. To be asked after every token."""
        text = self._decode(tokens[self._start :])
        for stop in self._texts:
            if stop in text:
                return stop
        if len(text) >= 2 * self._keep:
            self._narrow(tokens, text)
        return None

    def _narrow(self, tokens: Sequence[int], text: str) -> None:
        """Drops the older half of the window, where enough stays and the cut does not go through a character."""
        held = len(tokens) - self._start
        if text.endswith(UNDECIDED) and held < self._most:
            return  # a run of bytes may be waiting for its last one; beyond `most` it is no text at all
        middle = self._start + held // 2
        rest = self._decode(tokens[middle:])
        if len(rest) >= self._keep and text.endswith(rest):
            self._start = middle
