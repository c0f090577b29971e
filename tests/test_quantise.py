"""Block quantisation: bit for bit what other quantisers give, what is left alone, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from palestra.trainer.quantise import INDEX, quantise_folder
from palestra.trainer.weights.quantised import BlockForm, QuantiseError, quantise, quantised
from tests.tiny import make_tiny_moe

CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def float8_numbers() -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the bytes 0..126 mean, from the format's definition: 4 bits of exponent with bias 7, 3 of mantissa, no infinities."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def by_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[bytes, bytes]:
    """Written from the definitions, in numpy, one block after another: bytes of the weight and of its scales."""
    source = weight.float().numpy()
    packed = np.empty(source.shape, np.uint8)
    scales = np.empty((math.ceil(source.shape[0] / rows), math.ceil(source.shape[1] / columns)), np.float32)
    numbers, one, most = float8_numbers(), np.float32(1), np.float32(448)
    for i, j in np.ndindex(scales.shape):
        place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        largest = np.abs(source[place]).max()
        factor = one / largest * most if largest > 0 else one
        scaled = np.abs(source[place] * factor).astype(np.float64).clip(0, 448)
        above = np.searchsorted(numbers, scaled).clip(1, 126)
        low, high = scaled - numbers[above - 1], numbers[above] - scaled
        nearest = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
        packed[place] = nearest | (np.signbit(source[place]) << 7)
        scales[i, j] = one / factor
    return packed.tobytes(), scales.tobytes()


def transformers_quantiser(block: tuple[int, int]) -> Any:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    return Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float")))


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 17),
    st.integers(1, 17),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(-20, 4),
    st.integers(0, 2**20),
)
@settings(max_examples=80, deadline=None)
def test_any_shape_and_block_is_bit_equal_to_the_definition(
    rows: int, columns: int, down: int, across: int, dtype: torch.dtype, power: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=random) * 2.0**power).to(dtype)
    weight[torch.rand(rows, columns, generator=random) < 0.3] = 0
    packed, scales = quantise("w", weight, BlockForm(down, across))
    expected = by_blocks(weight, down, across)
    assert (packed.dtype, packed.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scales.shape == (math.ceil(rows / down), math.ceil(columns / across))
    assert bits(packed) == expected[0]
    assert bits(scales) == expected[1]
    assert torch.isfinite(packed.float()).all()
    assert (scales > 0).all()
    # what an engine makes of it lies within half a step of float8's three bits of mantissa
    spread = scales.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
    error = (packed.float() * spread - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 * 1.001 + spread * 2**-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_whole_blocks_are_bit_equal_to_transformers(dtype: torch.dtype, block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(256, 384) * torch.logspace(-6, 3, 384)).to(dtype)
    weight[:128, :128] = 0
    theirs = transformers_quantiser(block).convert({"x.weight": weight})
    packed, scales = quantise("x.weight", weight, BlockForm(*block))
    assert bits(packed) == bits(theirs["x.weight"])
    assert bits(scales) == bits(theirs["x.weight_scale_inv"])
    # DeepSeek-V3's amax / 448, but for the last bit of the division
    largest = weight.float().view(256 // block[0], block[0], 384 // block[1], block[1]).abs().amax((1, 3))
    torch.testing.assert_close(scales[largest > 0], largest[largest > 0] / 448, rtol=2e-7, atol=0)


def test_zeros_tiny_and_huge_numbers_keep_finite_scales() -> None:
    for value in (0.0, 1e-45, 1e-38, 5e-36, 1e-30, 1e30, 3.4e38):
        packed, scales = quantise("w", torch.full((3, 3), value), BlockForm(2, 2))
        assert torch.isfinite(packed.float()).all(), value
        assert (torch.isfinite(scales) & (scales >= torch.finfo(torch.float32).tiny)).all(), value
        if value == 0 or value >= 1e-35:
            torch.testing.assert_close(packed.float() * scales[0, 0], torch.full((3, 3), value), rtol=1e-5, atol=0)
        else:
            assert not packed.float().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_numbers_are_refused_by_the_tensors_name(bad: float) -> None:
    weight = torch.ones(5, 5)
    weight[4, 4] = bad
    with pytest.raises(QuantiseError, match=r"q_proj\.weight holds NaN or infinite"):
        quantise("model.layers.0.self_attn.q_proj.weight", weight, BlockForm(2, 2))


def test_a_pass_quantises_linear_weights_and_leaves_the_rest() -> None:
    shapes = {
        "model.embed_tokens.weight": (30, 20),
        "model.layers.0.input_layernorm.weight": (20,),
        "model.layers.0.self_attn.q_proj.weight": (24, 20),
        "model.layers.0.self_attn.q_proj.bias": (24,),
        "model.layers.0.mlp.gate.weight": (4, 20),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 20),
        "model.layers.0.mlp.experts.3.gate_proj.weight": (20, 20),
        "model.layers.0.mlp.router.weight": (4, 20),
        "model.layers.0.linear_attn.conv1d.weight": (8, 1, 4),
        "model.layers.1.mlp.gate_proj.weight": (20, 20),
        "model.layers.11.mlp.gate_proj.weight": (20, 20),
        "lm_head.weight": (30, 20),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    config = {**CONFIG, "modules_to_not_convert": ["model.layers.1", "lm_head"]}

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    passing = quantised(export, config)
    first, second = list(passing()), list(passing())
    assert [(name, t.dtype, t.shape) for name, t in first] == [(name, t.dtype, t.shape) for name, t in second]
    packed = [name for name, tensor in first if tensor.dtype == torch.float8_e4m3fn]
    assert packed == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.3.gate_proj.weight",
        "model.layers.11.mlp.gate_proj.weight",
    ]
    names = [name for name, _ in first]
    assert all(names[names.index(name) + 1] == f"{name}_scale_inv" for name in packed)
    assert len(names) == len(shapes) + len(packed)
    assert all(tensor is tensors[name] for name, tensor in first if name in tensors and name not in packed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"modules_to_not_convert": ["re:.*gate"]}, "no module path"),
    ],
)
def test_other_forms_are_refused_by_their_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(QuantiseError, match=says):
        quantised(lambda: iter(()), {**CONFIG, **change})


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("a.q_proj.weight", torch.ones(4, 4).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        ("a.q_proj.weight", torch.ones(4, 4, dtype=torch.int8), "int8"),
        ("a.q_proj.weight_scale_inv", torch.ones(1, 1), "quantised already"),
        ("a.mlp.experts.gate_up_proj", torch.ones(2, 4, 4), "all experts in one tensor"),
    ],
)
def test_tensors_that_cannot_be_quantised_are_refused_by_name(name: str, tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(QuantiseError, match=f"{name}.*{says}"):
        list(quantised(lambda: iter([(name, tensor)]), CONFIG)())


# -- folders ----------------------------------------------------------------------------------------------------------------------------


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """A folder in two files with names of odd sizes."""
    folder.mkdir()
    torch.manual_seed(1)
    first = {
        "model.embed_tokens.weight": torch.randn(31, 13).bfloat16(),
        "model.layers.0.q_proj.weight": torch.randn(7, 13).bfloat16(),
    }
    second = {
        "model.layers.0.norm.weight": torch.ones(13),
        "model.layers.0.o_proj.weight": torch.randn(13, 9),
        "lm_head.weight": torch.randn(31, 13),
    }
    save_file(first, str(folder / "model-00001-of-00002.safetensors"))
    save_file(second, str(folder / "model-00002-of-00002.safetensors"))
    where = dict.fromkeys(first, "model-00001-of-00002.safetensors") | dict.fromkeys(
        second, "model-00002-of-00002.safetensors"
    )
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    (folder / "config.json").write_text('{"architectures": ["X"], "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"other": torch.ones(1)}, str(folder / "consolidated.safetensors"))
    return first | second


def test_a_folder_is_sharded_as_its_source_and_a_publish_gives_the_same_bytes(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    heard: list[str] = []
    done = quantise_folder(tmp_path / "model", tmp_path / "deep" / "out", (4, 4), heard.append)
    out = tmp_path / "deep" / "out"
    assert (done.tensors, done.quantised) == (5, 2)
    assert heard == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *heard, INDEX, "tokenizer.json"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["X"]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [4, 4],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.norm"],
    }
    index = json.loads((out / INDEX).read_text())
    found = {name: load_file(str(out / file))[name] for name, file in index["weight_map"].items()}
    published = dict(quantised(lambda: iter(tensors.items()), config["quantization_config"])())
    assert found.keys() == published.keys()
    for name, tensor in published.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)
    assert index["metadata"]["total_size"] == done.bytes_after == sum(t.nbytes for t in published.values())
    for file in heard:
        with safe_open(str(out / file), framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_a_tiny_moe_is_loaded_by_transformers_as_what_it_was(tmp_path: Path) -> None:
    """transformers itself takes the folder for a quantised one, and undoes it to nearly the same weights."""
    model = make_tiny_moe(tmp_path / "moe", num_hidden_layers=1)
    done = quantise_folder(model, tmp_path / "out", (64, 64))
    assert done.quantised == 4 + 4 * 3
    before, after = load_file(str(model / "model.safetensors")), load_file(str(tmp_path / "out" / "model.safetensors"))
    gate = "model.layers.0.mlp.gate.weight"
    assert bits(after[gate]) == bits(before[gate])
    from transformers import AutoConfig
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    said = AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    read = FineGrainedFP8Config(**said)
    assert (read.weight_block_size, read.activation_scheme) == ([64, 64], "dynamic")
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    whole = Fp8Dequantize(SimpleNamespace(quantization_config=read))._dequantize_one(
        after[name], after[f"{name}_scale_inv"]
    )
    torch.testing.assert_close(whole.float(), before[name], rtol=0.07, atol=1e-4)


def test_a_folder_that_cannot_be_converted_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "model")
    model, out = tmp_path / "model", tmp_path / "out"

    def refused(says: str) -> None:
        with pytest.raises(QuantiseError, match=says):
            quantise_folder(model, out, (4, 4))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]

    config = model / "config.json"
    config.write_text('{"quantization_config": {"quant_method": "fp8"}}')
    refused("quantised already")
    config.write_text('{"text_config": {"quantization_config": {"quant_method": "awq"}}}')
    refused("quantised already")
    config.write_text("{")
    refused("cannot be read")
    config.unlink()
    refused(r"no config\.json")
    config.write_text("{}")
    file = model / "model-00002-of-00002.safetensors"
    good = file.read_bytes()
    broken = {name: tensors[name].clone() for name in load_file(str(file))}
    broken["model.layers.0.o_proj.weight"][0, 0] = math.nan
    save_file(broken, str(file))
    refused(r"o_proj\.weight holds NaN")
    file.write_bytes(good[:-1])
    refused("model-00002.*bytes, and its header speaks of")
    file.unlink()
    refused("names model-00002")
    file.write_bytes(good)
    with pytest.raises(QuantiseError, match="is there already"):
        quantise_folder(model, model, (4, 4))
    assert len(list(model.iterdir())) == 6
