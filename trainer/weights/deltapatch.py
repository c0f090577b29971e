"""Changes the files of a folder as a delta says. In: a folder that is not in use, and an open delta. Out: the files, changed in place, one
piece in memory at a time. Nothing is compared here but whether the delta is of these tensors.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from palestra.trainer.weights.deltacoding import Encoding, apply
from palestra.trainer.weights.deltaformat import DeltaFile, Entry, check_fits
from palestra.trainer.weights.weightfiles import Damaged, Layout, TensorSpot


def link(source: Path, target: Path) -> None:
    """The same file under a second name: files of published folders are never changed in place."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def patch(aside: Path, layout: Layout, delta: DeltaFile, entry: Entry, own: set[str]) -> Layout:
    """Applies a delta to the files of `aside`; those not in `own` are links to another version's, and copied first. What the result must
    be, not yet compared.

    Raises:
        Damaged: the delta is of other versions or tensors.
    """
    head = delta.head
    if (head.version, head.base, head.content) != (entry.version, entry.base, entry.content):
        raise Damaged(f"{delta.path} is of another version than its name says")
    if head.base_content != layout.content:
        raise Damaged(f"{delta.path} changes another version {head.base} than this one")
    check_fits(head, layout.tensors)
    with ExitStack() as stack:
        handles: dict[str, int] = {}
        for piece, at in delta.changes():
            spot = layout.tensors[piece.tensor]
            if spot.file not in handles:
                _make_own(aside / spot.file, own)
                handles[spot.file] = stack.enter_context((aside / spot.file).open("r+b", buffering=0)).fileno()
            _patch_piece(
                handles[spot.file], spot, piece.start, piece.size, delta.blob(at, piece.encoded), head.encoding
            )
    return layout.with_digests({name: digest for name, _, _, digest in head.tensors})


def _make_own(path: Path, own: set[str]) -> None:
    if path.name not in own:
        copy = path.with_name(path.name + ".copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
        own.add(path.name)


def _patch_piece(handle: int, spot: TensorSpot, start: int, size: int, blob: bytes, encoding: Encoding) -> None:
    held = np.frombuffer(os.pread(handle, size, spot.start + start), np.uint8).copy()
    apply(held, blob, encoding)
    data = memoryview(held.data)
    at = spot.start + start
    while data:
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done
