"""Publishes by difference: the shared folder gets the bytes that changed, and a full folder from time to time.

In: passes over the trainer's weights. Out, in the shared folder: `base-vN/` (a Hugging Face folder and its record), `delta-vN.pal` (what
changed since the version published before), and `MANIFEST.json`, replaced last: what it does not name is not published. The agents on the
engines' hosts (`deltaapply`) put the versions together. It waits for the disk, and for the service's answers, whose deadlines are the
client's.

Memory: one copy of the weights on the host (`HostCopy`), and a few pieces of 4 MiB.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError

from palestra.trainer.durable import ASIDE, folder_aside, remove_unfinished, sync_file
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.deltacoding import Encoding, encode
from palestra.trainer.weights.deltaformat import (
    PIECE,
    DeltaWriter,
    Entry,
    read_manifest,
    write_manifest,
)
from palestra.trainer.weights.hostcopy import HostCopy, bytes_of
from palestra.trainer.weights.proof import Proof
from palestra.trainer.weights.types import Export, FolderService, Published
from palestra.trainer.weights.weightfiles import RECORD, Damaged, Layout, digest_of, scan, write_record

if TYPE_CHECKING:
    import torch

FolderWriter = Callable[[Export, Path], None]
"""Writes a whole Hugging Face folder (safetensors with the tensors as they come, configuration, tokenizer) into an empty folder."""
FULL_SHARE = 0.8
"""Of all bytes: a delta that is larger is not worth its reading, and a full folder is written."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """What one version became in the shared folder."""

    kind: Literal["base", "delta"]
    path: Path
    bytes: int


class DeltaFolder:
    """The trainer's side of a shared folder: one writer."""

    def __init__(
        self,
        shared: Path,
        write_folder: FolderWriter,
        *,
        encoding: Encoding = "overwrite",
        base_every: int = 20,
        full_share: float = FULL_SHARE,
    ) -> None:
        """`base_every`: publishes from one full folder to the next."""
        self.shared, self._write_folder = shared, write_folder
        self._encoding, self._base_every, self._full_share = encoding, base_every, full_share
        self._copy = HostCopy()
        self._last: tuple[Entry, Layout] | None = None
        """What `_copy` holds; None: it holds no published version, or none whole."""
        self._since_base = 0

    def write(self, export: Export, version: int) -> Written:
        """Publishes `version` in the folder, by one pass over the weights. Versions that are not lower than it are of an abandoned run,
        and no longer named.

        Raises:
            TrainerError: it could not be written, or reads back differently; the versions before are there as they were.
        """
        try:
            self.shared.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.shared)
            before = [entry for entry in self._entries() if entry.version < version]
            last, self._last = self._last, None
            entry = layout = None
            if last is not None and last[0] in before and self._since_base < self._base_every:
                entry, layout = self._delta(export, version, *last)
            else:
                self._take(export)
            if entry is None or layout is None:
                entry, layout = self._base(version)
            write_manifest(self.shared, [*before, entry])
        except (OSError, SafetensorError, Damaged) as error:
            raise TrainerError(
                f"weights of version {version} could not be written to {self.shared}: {error}; the engines keep what they "
                f"have. Make room there, or see that the folder is mounted and writable"
            ) from error
        self._last = entry, layout
        self._since_base = 1 if entry.kind == "base" else self._since_base + 1
        return Written(entry.kind, self.shared / entry.name, entry.bytes)

    def collect(self) -> None:
        """Removes what no agent needs: all but the newest base with what follows it, and one base before it."""
        entries = self._entries()
        bases = [entry for entry in entries if entry.kind == "base"]
        newest = bases[-1].version if bases else 0
        kept = [*bases[-2:-1], *(entry for entry in entries if entry.version >= newest)]
        if kept != entries:
            write_manifest(self.shared, kept)
        named = {entry.name for entry in kept}
        for path in [*self.shared.glob("base-v*"), *self.shared.glob("delta-v*.pal")]:
            if path.name not in named:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _entries(self) -> list[Entry]:
        try:
            return list(read_manifest(self.shared))
        except Damaged as error:
            log.warning("%s; it is begun anew with a full folder", error)
            return []

    def _take(self, export: Export) -> None:
        names = set()
        for name, tensor in export():
            self._copy.keep(name, tensor)
            names.add(name)
        self._copy.drop_others(names)

    def _base(self, version: int) -> tuple[Entry, Layout]:
        """Writes the copy as a full folder, and reads it back."""
        target = self.shared / f"base-v{version}"
        with folder_aside(target) as aside:
            self._write_folder(self._copy.export, aside)
            layout = scan(aside)
            self._copy.compare(layout)
            write_record(aside, version, layout)
            digest = digest_of((aside / RECORD).read_bytes())
        size = sum(file.size for file in layout.files)
        return Entry(version, "base", None, size, digest, layout.content), layout

    def _delta(self, export: Export, version: int, base: Entry, before: Layout) -> tuple[Entry | None, Layout | None]:
        """Writes what changed and brings the copy up to date, in one pass; (None, None) where a full folder is better: the copy is
        whole then too."""
        target = self.shared / f"delta-v{version}.pal"
        aside = self.shared / f"{ASIDE}{target.name}"
        writer = DeltaWriter(aside)
        try:
            changed = self._compare(export, before, writer)
            if changed is None:
                return None, None
            after = before.with_digests(changed)
            digest = writer.finish(version, base.version, before, after, self._encoding)
            aside.rename(target)
            sync_file(self.shared)
        finally:
            writer.close()
            aside.unlink(missing_ok=True)
        return Entry(version, "delta", base.version, writer.written, digest, after.content), after

    def _compare(self, export: Export, before: Layout, writer: DeltaWriter) -> dict[str, str] | None:
        """Checksums of the tensors that changed, whose pieces went to `writer`; None where those are too many, or the tensors others.
        The pass is finished in any case: the copy holds all of it."""
        places = {spot.name: index for index, spot in enumerate(before.tensors)}
        most = self._full_share * before.tensor_bytes
        changed: dict[str, str] = {}
        names, same = set[str](), True
        for name, tensor in export():
            names.add(name)
            kept = self._copy.get(name)
            same = same and kept is not None and kept.fits(tensor) and name in places
            if same and kept is not None:
                new, written = bytes_of(tensor), writer.written
                for start in range(0, len(new), PIECE):
                    part = new[start : start + PIECE]
                    if (blob := encode(kept.data[start : start + PIECE], part, self._encoding)) is not None:
                        writer.add(places[name], start, len(part), blob)
                if writer.written > written:
                    changed[name] = digest_of(new)
                    self._copy.keep(name, tensor)
                same = writer.written <= most
            else:
                self._copy.keep(name, tensor)
        self._copy.drop_others(names)
        return changed if same and names == places.keys() else None


class DeltaCarrier:
    """Brings weights to engines whose hosts run `palestra engine agent`."""

    def __init__(self, service: FolderService, folder: DeltaFolder, *, verify: bool = False) -> None:
        """`verify`: engines are asked whether they have what was written; agents compare every byte in any case."""
        self._service, self._folder, self._verify = service, folder, verify

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """See `Carrier`. The old is removed after the service said that the new is in force: until then a late engine may need it."""
        started = time.monotonic()
        proof = Proof(self._service.publish_target().kind if self._verify else None)

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in export():
                proof.watch(name, tensor)
                yield name, tensor

        written = self._folder.write(watched, version)
        self._service.publish_begin(version, train_step, "delta")
        shared = str(self._folder.shared.absolute())
        report = self._service.publish_end(version, shared, digests=proof.digests(), dtype=proof.dtype)
        seconds = time.monotonic() - started
        try:
            self._folder.collect()
        except OSError as error:
            log.warning("older weights in %s could not be removed: %s", self._folder.shared, error)
        return Published(bytes=written.bytes, seconds=seconds, still_s=report.still_s, requests=report.calls)
