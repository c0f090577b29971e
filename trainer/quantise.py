"""Writes a model folder with its linear weights in float8 blocks.

In: a Hugging Face folder with safetensors of 16 or 32 bits. Out: another one with the same files, `quantization_config` in its config.json,
there whole or not at all. One tensor is in memory at a time. Nothing is waited for but the disk.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from palestra.trainer.durable import folder_aside
from palestra.trainer.weights.hostcopy import DTYPES, bytes_of
from palestra.trainer.weights.quantised import FP8, SCALE, BlockForm, QuantiseError, quantise
from palestra.trainer.weights.weightfiles import Damaged, TensorSpot, read_header

INDEX = "model.safetensors.index.json"
BESIDE = (".json", ".jinja", ".model", ".txt")
"""Endings of files that are copied as they are: tokenizer, templates, generation settings."""
TORCH = {word: dtype for dtype, word in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of a folder."""

    tensors: int
    quantised: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a file that is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def quantise_folder(
    model: Path, out: Path, block: tuple[int, int] = (128, 128), progress: Callable[[str], None] = lambda name: None
) -> Converted:
    """Writes `out`; `progress` hears the name of each file that is done.

    Raises:
        QuantiseError: `out` exists, or `model` is no folder that can be quantised; names the file or tensor.
        OSError: the disk is full, or a file cannot be read.
    """
    if out.exists():
        raise QuantiseError(f"{out} is there already: name a folder that is not")
    config = _config(model)
    try:
        sources = {path.name: read_header(path)[0] for path in _weight_files(model)}
    except Damaged as error:
        raise QuantiseError(str(error)) from error
    form = BlockForm(*block)
    spots = [spot for file in sources.values() for spot in file]
    taken = {spot.name for spot in spots if form.takes(spot.name, spot.shape)}
    if not taken:
        raise QuantiseError(f"{model} has no weight of a linear layer: there is nothing to quantise")
    for spot in spots:
        if spot.dtype not in TORCH or spot.dtype.startswith("F8"):
            raise QuantiseError(f"{spot.name} in {model / spot.file} is {spot.dtype}: 16 or 32 bits are wanted")
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as aside:
        _copy_beside(model, aside)
        config["quantization_config"] = quantization_config(block, spots, taken)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        where, after = {}, 0
        for file, inside in sources.items():
            places = _places(inside, taken, form)
            _write_file(aside / file, places, _converted(model / file, inside, taken, form))
            where.update({place.name: file for place in places})
            after += sum(place.size for place in places)
            progress(file)
        if (model / INDEX).is_file():
            index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(where.items()))}
            (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Converted(len(spots), len(taken), sum(spot.size for spot in spots), after)


def quantization_config(block: tuple[int, int], spots: Sequence[TensorSpot], taken: set[str]) -> dict[str, Any]:
    """What config.json says of the folder: engines read the form from it, and so does a publish."""
    modules = {
        spot.name.removesuffix(".weight") for spot in spots if spot.name.endswith(".weight") and spot.name not in taken
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": sorted(modules | {"lm_head"}),
    }


def _config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        nested = config.get("text_config") or {}
        before = config.get("quantization_config") or nested.get("quantization_config")
    except FileNotFoundError:
        raise QuantiseError(f"{model} has no config.json: a Hugging Face folder is wanted") from None
    except (ValueError, AttributeError) as error:
        raise QuantiseError(f"{path} cannot be read: {error}") from None
    if before:
        raise QuantiseError(f"{model} is quantised already ({path} says quant_method {before.get('quant_method')!r})")
    return config


def _weight_files(model: Path) -> list[Path]:
    """Those of the index; without one all that are there."""
    if not (model / INDEX).is_file():
        found = sorted(model.glob("*.safetensors"))
        if not found:
            raise QuantiseError(f"{model} has no *.safetensors")
        return found
    try:
        names = sorted(set(json.loads((model / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise QuantiseError(f"{model / INDEX} cannot be read: {type(error).__name__}: {error}") from None
    for name in names:
        if Path(name).name != name or not (model / name).is_file():
            raise QuantiseError(f"{model / INDEX} names {name}, which is not there")
    return [model / name for name in names]


def _copy_beside(model: Path, out: Path) -> None:
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix in BESIDE and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, out / path.name)


def _places(spots: Sequence[TensorSpot], taken: set[str], form: BlockForm) -> list[_Place]:
    """The tensors of a new file, wide numbers first so that each lies at a multiple of its width."""
    places = []
    for spot in spots:
        if spot.name in taken:
            rows, columns = spot.shape
            places.append(_Place(spot.name, FP8, spot.shape))
            blocks = -(-rows // form.rows), -(-columns // form.columns)
            places.append(_Place(spot.name + SCALE, torch.float32, blocks))
        else:
            places.append(_Place(spot.name, TORCH[spot.dtype], spot.shape))
    return sorted(places, key=lambda place: (-place.dtype.itemsize, place.name))


def _converted(
    path: Path, spots: Sequence[TensorSpot], taken: set[str], form: BlockForm
) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(str(path), framework="pt") as handle:
        for spot in spots:
            tensor = handle.get_tensor(spot.name)
            if spot.name in taken:
                packed, scales = quantise(spot.name, tensor, form)
                yield spot.name, packed
                yield spot.name + SCALE, scales
            else:
                yield spot.name, tensor


def _write_file(path: Path, places: Sequence[_Place], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """A safetensors file whose header is known before its tensors are: they are put into their places as they come."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for place in places:
        header[place.name] = {"dtype": DTYPES[place.dtype], "shape": place.shape, "data_offsets": [at, at + place.size]}
        starts[place.name] = at
        at += place.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for name, tensor in tensors:
            file.seek(8 + len(text) + starts[name])
            file.write(bytes_of(tensor).data)
