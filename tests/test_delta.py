"""Publishes by difference: what the shared folder gets, what an agent makes of it, and that any order of faults ends in the right bytes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from palestra.server.publishing.types import Digests, PublishReport, PublishTarget
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.delta import DeltaCarrier, DeltaFolder, Written
from palestra.trainer.weights.deltaapply import LocalFolder, find_way
from palestra.trainer.weights.deltacoding import ENCODINGS, Encoding, apply, encode
from palestra.trainer.weights.deltaformat import MANIFEST, Entry, read_manifest
from palestra.trainer.weights.types import Export
from palestra.trainer.weights.weightfiles import (
    RECORD,
    Checker,
    Damaged,
    NotThereYet,
    WeightFilesError,
    read_record,
    scan,
    write_record,
)

Tensors = dict[str, torch.Tensor]


def model(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(64, 33),
        "b.weight": torch.randn(128, 16).bfloat16(),
        "c.bias": torch.randn(7),
        "d.scalar": torch.tensor(3.0),
        "e.empty": torch.empty(0, 4),
        "f.weight": torch.randn(40, 40).to(torch.float8_e4m3fn),
    }


def export_of(tensors: Tensors) -> Export:
    return lambda: iter(list(tensors.items()))


def write_two_files(export: Export, folder: Path) -> None:
    """A Hugging Face folder in two files."""
    tensors = {name: tensor.clone() for name, tensor in export()}
    names = sorted(tensors)
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, str(folder / f"model-{i:05d}.safetensors"), {"format": "pt"})
        where.update(dict.fromkeys(part, f"model-{i:05d}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')


def nudge(tensors: Tensors, names: list[str], seed: int) -> None:
    """Changes a few elements of some tensors."""
    rng = np.random.default_rng(seed)
    for name in names:
        flat = tensors[name].reshape(-1).view(torch.uint8).clone()
        for at in rng.integers(0, max(1, len(flat)), 5) if len(flat) else []:
            flat[at] ^= int(rng.integers(1, 128))
        tensors[name] = flat.view(tensors[name].dtype).reshape(tensors[name].shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_equal(folder: Path, tensors: Tensors) -> None:
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(str(path)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name
    assert json.loads((folder / "config.json").read_text()) == {"architectures": ["Tiny"]}


def damage(path: Path, at: int) -> None:
    """Flips a bit, at a time that a clock would show."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # another inode, so that hard links of other versions stay as they are
    path.write_bytes(data)


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder in memory where there is such: flushing hundreds of files to a disk is slow and proves nothing here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        yield Path(root)


@pytest.fixture
def place() -> Iterator[tuple[Path, LocalFolder]]:
    with in_memory() as root:
        local = LocalFolder(root / "local")
        yield root / "shared", local
        local.close()


# -- the coding -------------------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=400), st.lists(st.tuples(st.integers(0, 399), st.integers(0, 255)), max_size=40))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_was_encoded_makes_the_old_bytes_new_and_xor_undoes(
    encoding: Encoding, data: bytes, changes: list[tuple[int, int]]
) -> None:
    old = np.frombuffer(data, np.uint8)
    new = old.copy()
    for at, value in changes:
        new[at % len(new)] = value
    blob = encode(old, new, encoding)
    if blob is None:
        assert data == new.tobytes()
        return
    held = old.copy()
    apply(held, blob, encoding)
    assert held.tobytes() == new.tobytes()
    apply(held, blob, encoding)
    assert held.tobytes() == (new if encoding == "overwrite" else old).tobytes()


def test_wide_gaps_and_long_runs_are_encoded_too() -> None:
    old = np.zeros(300_000, np.uint8)
    new = old.copy()
    new[5], new[100_000:190_000], new[299_999] = 1, 7, 9
    blob = encode(old, new, "overwrite")
    assert blob is not None
    held = old.copy()
    apply(held, blob, "overwrite")
    assert (held == new).all()
    assert len(blob) < 90_002 + 60


def test_a_sparse_change_costs_little_over_its_own_bytes() -> None:
    old = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)
    new = old.copy()
    new[np.random.default_rng(1).choice(1_000_000, 10_000, replace=False)] ^= 1
    blob = encode(old, new, "overwrite")
    assert blob is not None
    assert len(blob) < 3.5 * 10_000


@given(st.binary(max_size=80))
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_blob_of_any_bytes_is_damaged_or_applied_and_nothing_else(encoding: Encoding, blob: bytes) -> None:
    try:
        apply(np.zeros(64, np.uint8), blob, encoding)
    except Damaged:
        return


def test_a_packed_bomb_is_not_unpacked() -> None:
    import zlib

    with pytest.raises(Damaged, match="instead of 64"):
        apply(np.zeros(64, np.uint8), zlib.compress(bytes(20_000_000), 9), "xor")


# -- folders and their records ----------------------------------------------------------------------------------------------------------


def test_a_record_tells_every_byte_of_a_folder(tmp_path: Path) -> None:
    write_two_files(export_of(model()), tmp_path)
    layout = scan(tmp_path)
    write_record(tmp_path, 4, layout)
    assert read_record(tmp_path) == (4, layout)
    checker = Checker()
    checker.check(tmp_path, layout)
    for file in layout.files:
        good = (tmp_path / file.name).read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            damage(tmp_path / file.name, at)
            with pytest.raises(Damaged, match=file.name):
                checker.check(tmp_path, layout)
            (tmp_path / file.name).write_bytes(good)
    checker.check(tmp_path, layout)
    (tmp_path / "config.json").unlink()
    with pytest.raises(Damaged, match=r"config.json is missing"):
        checker.check(tmp_path, layout)


def test_a_record_that_leads_outside_is_refused(tmp_path: Path) -> None:
    write_two_files(export_of(model()), tmp_path)
    write_record(tmp_path, 1, scan(tmp_path))
    said = json.loads((tmp_path / RECORD).read_text())
    said["files"][0][0] = "../config.json"
    (tmp_path / RECORD).write_text(json.dumps(said))
    with pytest.raises(Damaged, match="checksum"):
        read_record(tmp_path)
    from palestra.trainer.weights.weightfiles import FileSpot, layout_of

    write_record(tmp_path, 1, layout_of((FileSpot("../x", 1, "", 0),), ()))
    with pytest.raises(Damaged, match="names a file"):
        read_record(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}x"])
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(Damaged, match=r"model.safetensors"):
        scan(tmp_path)


# -- the writer -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bases_and_deltas_and_an_agent_that_follows(place: tuple[Path, LocalFolder], encoding: Encoding) -> None:
    shared, local = place
    folder = DeltaFolder(shared, write_two_files, encoding=encoding, base_every=3)
    tensors, kinds = model(), []
    for version in range(7):
        nudge(tensors, ["a.weight", "f.weight"], version)
        kinds.append(folder.write(export_of(tensors), version).kind)
        pulled = local.pull(version, shared)
        check_equal(pulled.path, tensors)
        assert pulled.source == ("full" if version == 0 else "delta" if kinds[-1] == "delta" else "full")
        folder.collect()
    assert kinds == ["base", "delta", "delta", "base", "delta", "delta", "base"]
    assert sorted(path.name for path in shared.iterdir()) == [MANIFEST, "base-v3", "base-v6"]
    assert sorted(local.versions()) == [5, 6]


def test_unchanged_files_are_not_copied(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    folder, tensors = DeltaFolder(shared, write_two_files), model()
    folder.write(export_of(tensors), 0)
    local.pull(0, shared)
    nudge(tensors, ["a.weight"], 1)
    written = folder.write(export_of(tensors), 1)
    pulled = local.pull(1, shared)
    check_equal(pulled.path, tensors)
    assert pulled.bytes == written.bytes < 2000
    same = [
        (pulled.path / name).samefile(local.root / "v0" / name)
        for name in ("model-00001.safetensors", "model-00002.safetensors", "config.json")
    ]
    assert same == [False, True, True]


def test_a_delta_that_would_be_nearly_full_is_a_base_by_the_same_pass(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    folder, passes = DeltaFolder(shared, write_two_files), 0

    def counted(tensors: Tensors) -> Export:
        def start() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal passes
            passes += 1
            yield from tensors.items()

        return start

    assert folder.write(counted(model(0)), 1).kind == "base"
    assert folder.write(counted(model(1)), 2).kind == "base"
    assert passes == 2
    check_equal(local.pull(2, shared).path, model(1))


def test_other_tensors_make_a_base(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    folder, tensors = DeltaFolder(shared, write_two_files), model()
    folder.write(export_of(tensors), 1)
    tensors["g.more"] = torch.ones(3)
    assert folder.write(export_of(tensors), 2).kind == "base"
    del tensors["a.weight"]
    assert folder.write(export_of(tensors), 3).kind == "base"
    tensors["c.bias"] = tensors["c.bias"].bfloat16()
    assert folder.write(export_of(tensors), 4).kind == "base"
    tensors["c.bias"] = tensors["c.bias"].reshape(7, 1)
    assert folder.write(export_of(tensors), 5).kind == "base"
    check_equal(local.pull(5, shared).path, tensors)


def test_a_writer_of_folders_that_changes_bytes_is_found_out(tmp_path: Path) -> None:
    def rounding(export: Export, folder: Path) -> None:
        save_file({name: tensor.bfloat16().float() for name, tensor in export()}, str(folder / "model.safetensors"))

    folder = DeltaFolder(tmp_path, rounding)
    with pytest.raises(TrainerError, match=r"x in model\.safetensors reads back differently"):
        folder.write(export_of({"x": torch.tensor([1.0001])}), 1)
    with pytest.raises(TrainerError, match="x was written as F32"):
        folder.write(export_of({"x": torch.ones(1).bfloat16()}), 1)
    assert read_manifest(tmp_path) == ()


def test_a_restarted_trainer_begins_with_a_base_and_abandons_later_versions(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    tensors = model()
    folder = DeltaFolder(shared, write_two_files)
    for version in (1, 2, 3):
        nudge(tensors, ["a.weight"], version)
        folder.write(export_of(tensors), version)
    local.pull(3, shared)
    others = model(5)
    again = DeltaFolder(shared, write_two_files)
    assert again.write(export_of(others), 3).kind == "base"
    assert [entry.version for entry in read_manifest(shared)] == [1, 2, 3]
    check_equal(local.pull(3, shared).path, others)


class Service:
    """Keeps what it was told."""

    def __init__(self, shared: Path) -> None:
        self.said: list[tuple[object, ...]] = []
        self.there: list[list[str]] = []
        self.digests: Digests | None = None
        self._shared = shared

    def publish_target(self) -> PublishTarget:
        return PublishTarget("embedded", "cpu", ())

    def publish_begin(self, version: int, train_step: int, transport: str = "disk") -> PublishTarget:
        self.said.append(("begin", version, train_step, transport))
        self.there.append(sorted(path.name for path in self._shared.iterdir()))
        return self.publish_target()

    def publish_end(
        self, version: int, path: str | None, *, digests: Digests | None = None, dtype: str = "float32"
    ) -> PublishReport:
        self.said.append(("end", version, path))
        self.digests = digests
        if version == 99:
            raise RuntimeError("no engine is left")
        return PublishReport(train_step=0, still_s=0.5, drain_s=0, calls=1, serving=2)


def test_the_carrier_removes_the_old_only_when_the_new_is_in_force(tmp_path: Path) -> None:
    service = Service(tmp_path)
    folder = DeltaFolder(tmp_path, write_two_files, base_every=1)
    carrier = DeltaCarrier(service, folder)
    for version in (1, 2, 3):
        published = carrier.publish(export_of(model()), version, version * 10)
        assert (published.still_s, published.requests) == (0.5, 1)
        assert published.bytes > 10_000
    assert service.said[:2] == [("begin", 1, 10, "delta"), ("end", 1, str(tmp_path))]
    assert service.there[-1] == [MANIFEST, "base-v1", "base-v2", "base-v3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "base-v2", "base-v3"]
    assert service.digests is None
    DeltaCarrier(service, folder, verify=True).publish(export_of(model()), 4, 40)
    assert service.digests is not None
    assert service.digests.keys() == model().keys()
    with pytest.raises(RuntimeError, match="no engine"):
        carrier.publish(export_of(model()), 99, 0)
    assert (tmp_path / "base-v3").is_dir()


# -- the agent's folder -----------------------------------------------------------------------------------------------------------------


def entry(version: int, base: int | None, size: int) -> Entry:
    return Entry(version, "base" if base is None else "delta", base, size, "", "")


def test_the_way_with_the_fewest_bytes_is_taken() -> None:
    entries = [entry(0, None, 100), entry(1, 0, 9), entry(2, 1, 9), entry(5, 2, 9), entry(6, None, 100)]
    cheap = find_way(entries, {0, 1}, 5, set())
    assert cheap is not None
    assert (cheap.local, [d.version for d in cheap.deltas], cheap.bytes) == (1, [2, 5], 18)
    other = find_way(entries, {0, 1}, 5, {"v1"})
    assert other is not None
    assert (other.local, other.bytes) == (0, 27)
    full = find_way(entries, {0, 1}, 5, {"v1", "v0"})
    assert full is not None
    assert (full.local, full.bytes) == (None, 127)
    assert find_way(entries, {0, 1}, 5, {"delta-v2.pal"}) is None
    there = find_way(entries, {5}, 5, {"delta-v5.pal"})
    assert there is not None
    assert there.bytes == 0
    assert find_way([entry(3, 3, 1), entry(4, 7, 1)], set(), 4, set()) is None


def prepared(shared: Path, versions: int, base_every: int = 20) -> list[Tensors]:
    folder, tensors, all_of = DeltaFolder(shared, write_two_files, base_every=base_every), model(), []
    for version in range(versions):
        nudge(tensors, ["a.weight", "b.weight"], version)
        folder.write(export_of(tensors), version)
        all_of.append(dict(tensors))
    return all_of


def test_a_missed_version_a_damaged_copy_and_a_lost_one_are_mended(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    versions = prepared(shared, 5)
    assert local.pull(1, shared).source == "full"
    missed = local.pull(3, shared)
    assert missed.source == "delta"
    check_equal(missed.path, versions[3])
    damage(local.root / "v3" / "model-00001.safetensors", -1)
    damage(local.root / "v1" / "model-00001.safetensors", -1)
    mended = local.pull(4, shared)
    assert mended.source == "full"
    check_equal(mended.path, versions[4])
    again = local.pull(4, shared)
    assert (again.bytes, again.path) == (0, mended.path)
    damage(mended.path / "config.json", 3)
    check_equal(local.pull(4, shared).path, versions[4])
    shutil.rmtree(mended.path)
    check_equal(local.pull(4, shared).path, versions[4])


def test_a_damaged_delta_leaves_what_is_here_and_says_where(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    versions = prepared(shared, 4)
    local.pull(2, shared)
    for at in (0, 100, -1, -20, -38):
        damage(shared / "delta-v3.pal", at)
        with pytest.raises(Damaged, match=r"delta-v3\.pal.*next full folder mends it"):
            local.pull(3, shared)
        damage(shared / "delta-v3.pal", at)
    assert sorted(path.name for path in local.root.iterdir()) == [".lock", "v2"]
    check_equal(local.pull(3, shared).path, versions[3])
    damage(shared / "base-v0" / "model-00002.safetensors", -1)
    shutil.rmtree(local.root / "v2")
    shutil.rmtree(local.root / "v3")
    with pytest.raises(Damaged, match=r"base-v0: .*model-00002"):
        local.pull(3, shared)


def test_a_version_that_is_not_there_yet_and_a_damaged_manifest(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    with pytest.raises(NotThereYet, match="it has none"):
        local.pull(0, shared)
    prepared(shared, 2)
    with pytest.raises(NotThereYet, match="version 2: its newest is 1"):
        local.pull(2, shared)
    (shared / MANIFEST).write_text('{"format": 1, "versions": [{"version"')
    with pytest.raises(Damaged, match="MANIFEST"):
        local.pull(1, shared)


def test_another_run_in_the_same_folder_does_not_get_the_old_ones_weights(place: tuple[Path, LocalFolder]) -> None:
    shared, local = place
    prepared(shared, 3)
    local.pull(2, shared)
    shutil.rmtree(shared)
    DeltaFolder(shared, write_two_files).write(export_of(model(9)), 2)
    check_equal(local.pull(2, shared).path, model(9))


def test_two_agents_cannot_have_one_folder(place: tuple[Path, LocalFolder]) -> None:
    _, local = place
    with pytest.raises(WeightFilesError, match="another engine agent"):
        LocalFolder(local.root)


# -- any order of events ----------------------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(st.sampled_from(sorted(model())), max_size=3), st.integers(1, 2)),
        st.tuples(st.just("pull"), st.integers(0, 1), st.just(0)),
        st.tuples(
            st.sampled_from(["new trainer", "new agent", "lose", "damage", "collect"]), st.integers(0, 1), st.just(0)
        ),
    ),
    max_size=14,
)


class World:
    """A trainer and two agents over one shared folder."""

    def __init__(self, root: Path, encoding: Encoding) -> None:
        self.root, self.encoding = root, encoding
        self.shared = root / "shared"
        self.tensors, self.version, self.count = model(), 0, 0
        self.locals = [LocalFolder(root / f"local{i}") for i in range(2)]
        self.trainer()
        self.publish([], 1)

    def trainer(self) -> None:
        self.folder = DeltaFolder(self.shared, write_two_files, encoding=self.encoding, base_every=4)

    def publish(self, names: list[str], step: int) -> Written:
        self.version, self.count = self.version + step, self.count + 1
        nudge(self.tensors, names, self.count)
        return self.folder.write(export_of(self.tensors), self.version)

    def pull(self, agent: int) -> None:
        check_equal(self.locals[agent].pull(self.version, self.shared).path, self.tensors)

    def restart(self, agent: int) -> None:
        self.locals[agent].close()
        self.locals[agent] = LocalFolder(self.root / f"local{agent}")

    def lose(self, agent: int) -> None:
        for path in self.locals[agent].root.glob("v*"):
            shutil.rmtree(path)

    def damage(self, agent: int) -> None:
        for path in self.locals[agent].root.glob("v*/*.safetensors"):
            damage(path, -1)

    def close(self) -> None:
        for local in self.locals:
            local.close()


@given(EVENTS, st.sampled_from(ENCODINGS))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_a_pull_gives_the_trainers_bytes(
    events: list[tuple[str, list[str], int]], encoding: Encoding
) -> None:
    with in_memory() as root:
        world = World(root, encoding)
        acts: dict[str, Callable[[int], None]] = {
            "pull": world.pull,
            "new agent": world.restart,
            "lose": world.lose,
            "damage": world.damage,
            "new trainer": lambda _: world.trainer(),
            "collect": lambda _: world.folder.collect(),
        }
        for kind, what, step in events:
            if kind == "publish":
                world.publish(what, step)
            else:
                acts[kind](int(what))  # type: ignore[call-overload]
        world.pull(0)
        world.pull(1)
        world.close()


def test_with_the_trainers_own_folders_a_pulled_version_is_a_model(
    place: tuple[Path, LocalFolder], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from palestra.trainer.weights.disk import write_folder
    from tests.tiny import make_tiny_llama

    shared, local = place
    model = make_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    tensors = load_file(str(model / "model.safetensors"))

    def write(export: Export, folder: Path) -> None:
        write_folder(export, folder, model, bucket_bytes=200_000)

    folder = DeltaFolder(shared, write)
    assert folder.write(export_of(tensors), 0).kind == "base"
    local.pull(0, shared)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name] * 2
    assert folder.write(export_of(tensors), 1).kind == "delta"
    pulled = local.pull(1, shared)
    assert pulled.source == "delta"
    assert len(list(pulled.path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(pulled.path).state_dict()
    assert torch.equal(loaded[name], tensors[name])
