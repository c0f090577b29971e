"""Text to ids without ever matching a special token, and ids back to text.

In: a folder with `tokenizer.json`. Out: `TokenCodec`. A format writes its special tokens by id; everything that a person, a tool or a model
wrote goes through a tokenizer that knows no added token, so the text `<|im_end|>` inside a tool's result stays ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from palestra.server.renderer.words import WordMemory, cuts_at_spaces
from palestra.server.types import RenderError


class Break:
    """A place in a list of pieces where text must not merge: what follows was, or will be, sampled on its own."""


BREAK: Final = Break()
SHORT = 16
"""Characters of a text whose ids are remembered: templates put the same few words around every turn."""
SHORT_TEXTS = 4096
Piece = int | str | Break


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can carry: pairs of surrogates are joined, lone ones become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TokenCodec:
    """One model's tokenizer, split into its special ids and its plain text."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise RenderError(f"{path} is missing: the model folder needs a fast tokenizer (tokenizer.json)")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        self._full = Tokenizer.from_str(text)
        self._byte_level = "ByteLevel" in json.dumps(data.get("decoder"))
        self.special: dict[str, int] = {entry["content"]: entry["id"] for entry in data.get("added_tokens", [])}
        self._special_text = {token: name for name, token in self.special.items()}
        names = sorted(self.special, key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._short: dict[str, tuple[int, ...]] = {}
        self._plain = _without_added(self._full)
        self._words = WordMemory(self.encode_whole) if cuts_at_spaces(data) else None

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive; a model's table may be larger."""
        return int(self._full.get_vocab_size())

    @property
    def remembers_words(self) -> bool:
        """Whether words that were encoded before are not encoded again: for tokenizers where that is known to change nothing."""
        return self._words is not None

    def special_id(self, text: str) -> int:
        """The id of an added token.

        Raises:
            RenderError: this tokenizer has none of that name.
        """
        try:
            return self.special[text]
        except KeyError:
            raise RenderError(f"the tokenizer has no token {text!r}") from None

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; special tokens in it are spelled out. A lone surrogate, which JSON can carry and UTF-8 cannot, becomes
        U+FFFD."""
        if len(text) > SHORT:
            text = without_surrogates(text)
            return self.encode_whole(text) if self._words is None else self._words.ids(text)
        if (known := self._short.get(text)) is None:
            known = tuple(self.encode_whole(without_surrogates(text))) if text else ()
            if len(self._short) < SHORT_TEXTS:
                self._short[text] = known
        return list(known)

    def encode_whole(self, text: str) -> list[int]:
        """Ids of plain text without lone surrogates, from the encoder itself."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def wording(self, text: str) -> list[Piece]:
        """A format's own fixed wording as pieces: the special tokens that it spells become ids, as a chat template's do. Never for what a
        person, a tool or a model wrote."""
        pieces: list[Piece] = []
        at = 0
        for found in self._special_names.finditer(text):
            pieces += [*([text[at : found.start()]] if found.start() > at else []), self.special[found[0]]]
            at = found.end()
        return [*pieces, text[at:]] if at < len(text) else pieces

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of a list of pieces: neighbouring texts are joined before they are encoded, except across a BREAK."""
        ids: list[int] = []
        held: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                held.append(piece)
                continue
            ids += self.encode_text("".join(held))
            held.clear()
            if isinstance(piece, int):
                ids.append(piece)
        return ids + self.encode_text("".join(held))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """Text of one id, for the reader."""
        return self._special_text.get(token) or self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id: a part of a character, where the token is one. Exact for byte-level vocabularies, else those of its text."""
        name = self._full.id_to_token(token)
        if name is None or token in self._special_text or not self._byte_level:
            return self.token_text(token).encode("utf-8", "replace")
        return bytes(_BYTE_OF[char] for char in name if char in _BYTE_OF)


def _without_added(full: Tokenizer) -> Tokenizer:
    """The same tokenizer, knowing no added token: its vocabulary is shared, not read a second time."""
    plain = Tokenizer(full.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(full, part)) is not None:
            setattr(plain, part, value)
    return plain


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters: printable bytes stand for themselves, the others for the letters from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


_BYTE_OF: Final = _byte_alphabet()
