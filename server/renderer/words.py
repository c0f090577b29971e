"""Ids of words that were encoded before: most of a text is words that came up already, and an encoder takes microseconds for each.

In: plain text. Out: the very ids that the encoder gives for the whole text. It holds for pre-tokenizers that always cut between a visible
character and a single space before another one, and whose pieces are encoded by themselves, as those of byte-level BPE do: `cuts_at_spaces`
says of which that is known. Nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

WORDS = 32_768
"""Words that are remembered; then all are forgotten, and it begins again."""
LONGEST = 48
"""Characters of a word that is worth remembering."""

SPACE_LED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|",
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
)
"""How the patterns of Qwen and Llama, of tekken and o200k, and of DeepSeek begin: a space stands only where a match of theirs begins."""
BEFORE = ("\\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+")
"""Patterns that cut out digits and ideographs first: no space in them."""


class WordMemory:
    """Encodes through `encode`, one word at a time, each once."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._led: dict[str, tuple[int, ...]] = {}
        """Words behind a space."""

    @property
    def known(self) -> int:
        """Words that are remembered."""
        return len(self._led)

    def ids(self, text: str) -> list[int]:
        """Ids of `text`, which must have no lone surrogates."""
        first, *rest = text.split(" ")
        if not rest or not (first and _visible(first[-1])):
            return self._encode(text)
        ids, known = self._encode(first), self._led
        for word in rest:
            try:
                ids += known[word]
            except KeyError:
                if not (word and _visible(word[0]) and _visible(word[-1])):
                    return self._encode(text)
                ids += self._learn(word)
        return ids

    def _learn(self, word: str) -> tuple[int, ...]:
        found = tuple(self._encode(f" {word}"))
        if len(word) <= LONGEST:
            if len(self._led) >= WORDS:
                self._led.clear()
            self._led[word] = found
        return found


def _visible(char: str) -> bool:
    """Surely no white space, in anybody's opinion, and nothing that a normalizer joins to a space."""
    return "!" <= char <= "~" or char.isalnum()


def cuts_at_spaces(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the tokenizer, as its JSON describes it, is one of those that `WordMemory` holds for."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    if normalizer is not None and normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return False
    outer = tokenizer.get("pre_tokenizer") or {}
    return _last_cuts(outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer])


def _last_cuts(steps: list[dict[str, Any]]) -> bool:
    """Whether one of these steps cuts at spaces, and none does otherwise."""
    found = False
    for step in steps:
        if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            found = found or bool(step.get("use_regex", True))
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            pattern = str(step.get("pattern", {}).get("Regex", ""))
            if not pattern.startswith((*SPACE_LED, *BEFORE)):
                return False
            found = found or pattern.startswith(SPACE_LED)
        elif step.get("type") != "Digits":
            return False
    return found
