"""Embedded engines for tests: one in a process of its own, the ways in which it takes weights, and folders that it must refuse."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx2

from tests.conformance.engine_kit import DEADLINE_S, EngineUnderTest, stored, wait_until
from tests.tiny import make_tiny_llama, make_tiny_moe

PAGE = 8
WINDOW = 2048
SEGMENTS: list[SharedMemory] = []
"""Of `by_segment`; they are the sender's to remove."""


@contextmanager
def process(folder: Path, log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A served engine and its URL; it is gone at the end."""
    command = [
        sys.executable,
        "-m",
        "palestra.server.embedded",
        "--model-path",
        str(folder),
        "--num-threads",
        "1",
        *flags,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=env) as child,
    ):
        try:
            assert child.stdout is not None
            line = child.stdout.readline()  # ends with the process, if that dies first
            assert line, log.read_text()
            url = json.loads(line)["url"]
            wait_until(lambda: httpx2.get(f"{url}/health").status_code == 200, "health")
            yield child, url
        finally:
            child.kill()
            child.wait(DEADLINE_S)


def serve(family: str, tmp: Path) -> Iterator[EngineUnderTest]:
    """A tiny model of a family ("moe", "llama"), served, and other weights for it."""
    make = {"moe": make_tiny_moe, "llama": make_tiny_llama}[family]
    one = make(tmp / "one", seed=1, max_position_embeddings=WINDOW, initializer_range=0.1)
    other = make(tmp / "other", seed=2, max_position_embeddings=WINDOW, initializer_range=0.1)
    vocab = json.loads((one / "config.json").read_text())["vocab_size"]
    with process(one, tmp / "log", "--page-size", str(PAGE), "--allow-forced-ids", "--max-running", "64") as (_, url):
        yield EngineUnderTest(url, one, other, vocab, PAGE, payloads=WAYS)


def by_value(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """As safetensors within the body."""
    return {"serialized_named_tensors": [blob(dict(tensors))], "load_format": "safetensors"}


def by_segment(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Through a segment of shared memory that is overwritten as soon as it may be: before the next one is made."""
    for old in SEGMENTS:
        old.buf[:] = bytes(len(old.buf))
    slots, at = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": at})
        at += tensor.nbytes
    segment = SharedMemory(create=True, size=at)
    SEGMENTS.append(segment)
    for slot, tensor in zip(slots, tensors.values(), strict=True):
        segment.buf[slot["offset"] : slot["offset"] + tensor.nbytes] = tensor.contiguous().numpy().tobytes()
    told = {"shm": segment.name, "nbytes": at, "tensors": slots}
    text = base64.b64encode(json.dumps(told).encode()).decode()
    return {"serialized_named_tensors": [text], "load_format": "shared_memory"}


WAYS = {"safetensors": by_value, "shared memory": by_segment}


def blob(tensors: dict[str, Any]) -> str:
    """base64 of safetensors."""
    from safetensors.torch import save

    return base64.b64encode(save(tensors)).decode()


def split(folder: Path, parts: int) -> list[str]:
    """A model's weights as so many blobs."""
    items = list(stored(folder).items())
    return [blob(dict(items[part::parts])) for part in range(parts)]


def damaged(source: Path, target: Path, damage: str) -> Path:
    """A copy of a model folder with one fault."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = stored(source)
    name = "model.layers.1.self_attn.q_proj.weight"
    if damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["model.layers.9.self_attn.q_proj.weight"] = tensors[name].clone()
    elif damage == "nan":
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "empty":
        file.unlink()
    return target
