"""Stop texts: the window over the last tokens finds what a decoding of the whole completion would find, at the same token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from palestra.server.embedded.stops import UNDECIDED, Decode, StopWatch, Texts
from palestra.server.embedded.types import RequestRefused
from tests.tiny import save_tokenizer, train_tokenizer

WORDS = ["answer", " the", "<stop>", "\n\n", "é", "日本語", "👩‍🚀", "ß", " ", "42", "</a>", "\u00a0"]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return train_tokenizer()


def byte_fallback() -> Tokenizer:
    """As of SentencePiece models: pieces with a word mark, bytes for what has none, and a decoder that drops the first space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "n", "s", "w", "e", "r", "▁the", "<", ">"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def decoder(tokenizer: Tokenizer) -> Decode:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def first_match(ids: Sequence[int], texts: tuple[str, ...], decode: Decode) -> tuple[int, str] | None:
    """By decoding everything again after every token."""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        for stop in texts:
            if stop in text:
                return end, stop
    return None


def watched(
    ids: Sequence[int], texts: tuple[str, ...], decode: Decode, prompt: Sequence[int]
) -> tuple[int, str] | None:
    watch = StopWatch(texts, decode, len(prompt))
    for end in range(1, len(ids) + 1):
        stop = watch.check([*prompt, *ids[:end]])
        if stop is not None:
            return end, stop
    return None


def in_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for every byte of the text."""
    if isinstance(tokenizer.decoder, decoders.Sequence):
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [token for char in text for token in tokenizer.encode(char, add_special_tokens=False).ids]


def random_completion(tokenizer: Tokenizer, draws: random.Random, noise: bool) -> list[int]:
    """Words in several tokenisations, with some ids of no meaning between them."""
    ids: list[int] = []
    for _ in range(draws.randrange(5, 60)):
        word = draws.choice(WORDS)
        kind = draws.random()
        if noise and kind < 0.15:
            ids += [draws.randrange(tokenizer.get_vocab_size()) for _ in range(draws.randrange(1, 5))]
        elif kind < 0.6:
            ids += in_bytes(tokenizer, word)
        else:
            ids += tokenizer.encode(word, add_special_tokens=False).ids
    return ids


# Not byte_fallback with noise: there one byte that fits nowhere turns a whole run of bytes into marks, wherever the run began.
@pytest.mark.parametrize(("family", "noise"), [("byte_level", False), ("byte_level", True), ("byte_fallback", False)])
def test_the_window_sees_what_the_whole_shows(family: str, noise: bool, byte_level: Tokenizer) -> None:
    tokenizer = byte_level if family == "byte_level" else byte_fallback()
    decode, draws, found = decoder(tokenizer), random.Random(7), 0
    for _ in range(150):
        ids = random_completion(tokenizer, draws, noise)
        joined = [a + b for a, b in zip(draws.choices(WORDS, k=2), draws.choices(WORDS, k=2), strict=True)]
        texts = tuple(part[draws.randrange(2) :] or part for part in [*joined, draws.choice(WORDS) * 2])
        wanted = first_match(ids, texts, decode)
        found += wanted is not None
        prompt = tokenizer.encode(texts[0], add_special_tokens=False).ids
        assert watched(ids, texts, decode, prompt) == wanted
    assert 30 < found < 145


def test_a_text_may_begin_and_end_within_tokens(byte_level: Tokenizer) -> None:
    decode = decoder(byte_level)
    ids = byte_level.encode("The answer is 42.", add_special_tokens=False).ids
    pieces = [decode([token]) for token in ids]
    place = next(i for i in range(len(pieces) - 1) if len(pieces[i]) > 2 and len(pieces[i + 1]) > 2)
    seam = pieces[place][-2:] + pieces[place + 1][:2]
    assert watched(ids, (seam,), decode, []) == (place + 2, seam)


def test_a_character_in_pieces_matches_at_its_last_one(byte_level: Tokenizer) -> None:
    decode = decoder(byte_level)
    ids = in_bytes(byte_level, "ab👩é")
    assert len(ids) == 2 + 4 + 2
    assert watched(ids, ("👩",), decode, []) == (6, "👩")
    assert watched(ids, ("b👩é",), decode, []) == (8, "b👩é")
    assert watched(ids[:5], ("👩",), decode, []) is None


def test_the_first_text_of_the_list_is_named_and_the_prompt_does_not_count(byte_level: Tokenizer) -> None:
    decode = decoder(byte_level)
    prompt = byte_level.encode("stop", add_special_tokens=False).ids
    ids = in_bytes(byte_level, "xyz")
    assert watched(ids, ("yz", "z", "stop"), decode, prompt) == (3, "yz")
    assert watched(ids, ("z", "yz", "stop"), decode, prompt) == (3, "z")
    assert watched(in_bytes(byte_level, "op"), ("stop",), decode, in_bytes(byte_level, "st")) is None


def test_special_tokens_are_text(byte_level: Tokenizer) -> None:
    ids = [*in_bytes(byte_level, "a"), byte_level.token_to_id("<|im_end|>"), *in_bytes(byte_level, "b")]
    assert watched(ids, ("<|im_end|>",), decoder(byte_level), []) == (2, "<|im_end|>")


@pytest.mark.parametrize("what", ["words", "one word again", "bytes that are no text", "characters in pieces"])
def test_the_window_stays_small(what: str, byte_level: Tokenizer) -> None:
    draws, sizes = random.Random(3), []
    make: dict[str, Callable[[], list[int]]] = {
        "words": lambda: byte_level.encode(draws.choice(WORDS), add_special_tokens=False).ids,
        "one word again": lambda: byte_level.encode(" the", add_special_tokens=False).ids,
        "bytes that are no text": lambda: [byte_level.token_to_id("ÿ")],
        "characters in pieces": lambda: in_bytes(byte_level, "👩"),
    }
    ids = [token for _ in range(1000) for token in make[what]()][:1000]
    assert decoder(byte_level)(make["bytes that are no text"]()) == UNDECIDED

    def decode(window: Sequence[int]) -> str:
        sizes.append(len(window))
        return decoder(byte_level)(window)

    watch = StopWatch(("never to be seen", "nor this"), decode, 0)
    assert all(watch.check(ids[:end]) is None for end in range(1, len(ids) + 1))
    assert max(sizes) <= 8 * (16 + 3) + 1
    assert sum(sizes) < 2.5 * 1000 * max(sizes)


def test_a_folder_without_a_tokenizer_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"tokenizer\.json is missing"):
        Texts(str(tmp_path)).load()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RequestRefused, match="tokenizer"):
        Texts(str(tmp_path)).load()


def test_the_tokenizer_is_read_once(tmp_path: Path, byte_level: Tokenizer) -> None:
    save_tokenizer(byte_level, tmp_path)
    texts = Texts(str(tmp_path))
    assert texts.decode(in_bytes(byte_level, "é日")) == "é日"
    (tmp_path / "tokenizer.json").unlink()
    assert texts.load() is texts.load()
