"""A model small enough to be checked by hand: embeddings, mixed with a decay over positions, and an output matrix; in numpy.

What follows a sequence is read off the sum of its ids' values, the nearer the heavier: logits = out @ sum over s of DECAY ** (t - s) *
tanh(mix @ embed[id at s]). A value is computed once per position with the weights of its time, and kept: the cache of this model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny import save_tokenizer, train_tokenizer

DECAY = 0.9
WIDTH = 16
Floats = NDArray[np.float32]


def make_tiny_numpy(folder: Path, seed: int) -> Path:
    """A model folder with a tokenizer, config.json and weights; returns it."""
    from safetensors.numpy import save_file

    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder)
    vocab = tokenizer.get_vocab_size()
    config = {"vocab_size": vocab, "max_position_embeddings": 2048, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    shapes = {"embed.weight": (vocab, WIDTH), "mix.weight": (WIDTH, WIDTH), "out.weight": (vocab, WIDTH)}
    # A flat distribution, so that what bends or cuts it shows in a few dozen draws.
    spread = {"embed.weight": 0.7, "mix.weight": 0.7, "out.weight": 0.3}
    weights = {name: draw.normal(0, spread[name], shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def values(weights: Mapping[str, Floats], ids: list[int]) -> Floats:
    """[len(ids), WIDTH] of what the cache keeps of ids."""
    result: Floats = np.tanh(weights["embed.weight"][ids] @ weights["mix.weight"].T)
    return result


def next_logits(weights: Mapping[str, Floats], cache: Floats) -> NDArray[np.float64]:
    """[vocabulary] of what follows cached positions."""
    decay = DECAY ** np.arange(len(cache) - 1, -1, -1, dtype=np.float64)
    result: NDArray[np.float64] = weights["out.weight"].astype(np.float64) @ (decay @ cache)
    return result


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """[vocabulary] logits to log probabilities."""
    shifted = row - row.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


class NumpyJudge:
    """The whole sequence at once, through one matrix of decays: nothing of the incremental path is in it."""

    def logits(self, folder: Path, ids: list[int]) -> NDArray[np.float64]:
        """See the protocol."""
        from safetensors.numpy import load_file

        weights: dict[str, Any] = {
            name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()
        }
        places = np.arange(len(ids))
        distance = places[:, None] - places[None, :]
        decays = np.where(distance >= 0, DECAY ** np.maximum(distance, 0), 0.0)
        hot = np.eye(len(weights["embed.weight"]))[ids]
        states = np.tanh(hot @ weights["embed.weight"] @ weights["mix.weight"].T)
        rows: NDArray[np.float64] = decays @ states @ weights["out.weight"].T
        return rows
