"""`palestra convert MODEL OUT --quantize fp8-block`: a model folder in another form.

In: a model and the name of a new folder. Out: that folder, whole or not at all, and a line on stdout. Exit status: 0; 1 where the disk
failed; 2 for bad input. Nothing is waited for but the disk.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

CACHE = "~/.cache/palestra"
"""Where packaged models are converted to, once: as in a run's `model.cache`."""


def main(argv: Sequence[str]) -> int:
    """Converts; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra convert", description="Write a model folder in another form.")
    parser.add_argument("model", metavar="MODEL", help="a folder, a packaged model (smollm2-135m), or a hub id")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder; it must not be there")
    parser.add_argument(
        "--quantize", required=True, choices=["fp8-block"], help="float8 weights with a scale per block"
    )
    parser.add_argument("--block", type=_block, default=(128, 128), metavar="RxC", help="size of a block (128x128)")
    options = parser.parse_args(argv)
    # Here, so that --help does not load torch.
    from palestra.trainer.packaged import resolve_model
    from palestra.trainer.quantise import quantise_folder
    from palestra.trainer.types import TrainerError

    try:
        model = resolve_model(options.model, Path(CACHE).expanduser())
        done = quantise_folder(model, options.out, options.block, lambda name: print(f"  {name}", flush=True))
    except TrainerError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{options.out} could not be written, nothing of it is kept: {error}", file=sys.stderr)
        return 1
    before, after = done.bytes_before / 2**20, done.bytes_after / 2**20
    print(
        f"{options.out}: {done.quantised} of {done.tensors} tensors quantised, {before:.1f} MiB became {after:.1f} MiB"
    )
    return 0


def _block(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: ROWSxCOLUMNS is wanted, such as 128x128")
    return int(found[1]), int(found[2])
