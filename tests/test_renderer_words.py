"""The memory of words gives the very ids that the encoder gives, on real tokenizers and nasty texts; where that is not known it is off."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import pytest

from palestra.server.renderer.tokens import TokenCodec, without_surrogates
from palestra.server.renderer.words import WordMemory, cuts_at_spaces
from tests import tokenizers

PLAIN = " ".join(topics.topics.values())
ODD = [
    *(
        "é",
        "à la",
        "日本語",
        "한국",
        "\u0301",
        "\u00a0",
        "\u3000",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        "  ",
        "   ",
        " \n",
        "\u200b",
    ),
    *(
        "\u2028",
        "\x1c",
        "\x85",
        "'s",
        " 's",
        "1234567",
        "٣٤٥",
        "½",
        "²",
        "🙂",
        "👨‍👩‍👧",
        "Å",
        "\x00",
        "\ufeff",
        "_",
        "-",
        "...",
    ),
    *("\u0600", "\u0627", "<|im_end|>", "A\u030a", "e\u0301", " \u0301x", "\u1680", "\u180e", "\uff21"),
]
RANGES = ((32, 127), (160, 0x250), (0x300, 0x700), (0x2000, 0x2100), (0x3000, 0x3100), (0x1F300, 0x1F600))
FOLDERS: list[Callable[[Path], Path]] = [
    tokenizers.smollm2_folder,
    tokenizers.qwen_folder,
    tokenizers.deepseek_folder,
    tokenizers.mistral_folder,
]


def nasty(draw: random.Random) -> str:
    """Documentation, odd characters, runs of white space and random letters of several scripts, in any order."""
    if draw.random() < 0.3:
        at = draw.randrange(len(PLAIN) - 900)
        return PLAIN[at : at + draw.randrange(17, 900)]
    parts = []
    for _ in range(draw.randrange(2, 60)):
        kind = draw.random()
        if kind < 0.45:
            at = draw.randrange(len(PLAIN) - 12)
            parts.append(PLAIN[at : at + draw.randrange(1, 12)])
        elif kind < 0.7:
            parts.append(draw.choice(ODD))
        elif kind < 0.9:
            parts.append(" ")
        else:
            parts.append("".join(chr(draw.randrange(*draw.choice(RANGES))) for _ in range(draw.randrange(1, 5))))
    return without_surrogates("".join(parts))


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.__name__)
def test_the_same_ids_as_without_it(folder: Callable[[Path], Path], count: int) -> None:
    codec = tokenizers.codec(folder)
    assert codec.remembers_words
    draw = random.Random(count)
    learned = WordMemory(codec.encode_whole)
    for _ in range(count):
        text = nasty(draw)
        assert learned.ids(text) == codec.encode_whole(text), repr(text)
    assert learned.known > count / 10, "it was used"


def test_it_forgets_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.server.renderer.words.WORDS", 10)
    codec = tokenizers.codec(tokenizers.smollm2_folder)
    memory = WordMemory(codec.encode_whole)
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    assert memory.ids(text) == memory.ids(text) == codec.encode_whole(text)
    assert 0 < memory.known <= 10


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": r"\s+"}}},
        {"pre_tokenizer": None},
    ],
)
def test_it_is_off_for_tokenizers_that_may_cut_elsewhere(change: dict[str, object]) -> None:
    good = {"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}}
    assert cuts_at_spaces(good)
    assert not cuts_at_spaces({**good, **change})


def test_the_tiny_tokenizer_uses_it(tmp_path: Path) -> None:
    from tests.tiny import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(), tmp_path)
    assert TokenCodec(tmp_path).remembers_words
    assert TokenCodec(tmp_path).encode_text("What is 12 plus 30, then?") == TokenCodec(tmp_path).encode_whole(
        "What is 12 plus 30, then?"
    )
