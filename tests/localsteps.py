"""What a step of our trainer really takes on a CPU: saved tensors counted, allocations followed, resident memory read.

    OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 .venv/bin/python tests/localsteps.py FOLDER TOKENS ROWS CHUNK [--resident]

takes two steps on the model in FOLDER, micro-batches of TOKENS nodes in ROWS rows that share their first quarter, and prints one JSON
object: what was measured, and the formulas of `palestra.cli.planner.local` beside it (`--resident`: resident memory alone, which takes a
third of the time). Waits for nothing but the arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from palestra.cli.planner.huggingface import dims_of_config
from palestra.cli.planner.local import LocalActivations, LocalState, local_activations, local_state, local_total
from palestra.trainer.layout.types import ModelDims
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
from palestra.trainer.megatron.families import read_config
from palestra.trainer.types import MicroBatch


@dataclass(frozen=True)
class Scene:
    """A backend with one micro-batch, and what the formulas say of them."""

    backend: MegatronBackend
    dims: ModelDims
    batch: MicroBatch
    chunk: int

    @property
    def predictions(self) -> int:
        """Trained tokens."""
        return int(np.count_nonzero(self.batch.weights[:, 1:]))

    def kept(self, nodes: int) -> LocalActivations:
        """By the formula."""
        masked = len(self.batch.lengths) > 1
        return local_activations(self.dims, tokens=nodes, predictions=self.predictions, chunk=self.chunk, masked=masked)

    def state(self) -> LocalState:
        """By the formula."""
        return local_state(self.dims)

    def step(self) -> int:
        """Forward and backward; returns the nodes that went through the model."""
        return int(self.backend.forward_backward([self.batch], PolicyLoss()).tokens)


def scene(folder: Path, *, tokens: int, rows: int, chunk: int) -> Scene:
    """`rows` random rows of `tokens` nodes in all, the first quarter shared where there are several; the second half of each is trained."""
    backend = MegatronBackend.from_folder(folder, BackendSettings(logprob_chunk=chunk))
    shared = tokens // 4 if rows > 1 else 0
    length = shared + (tokens - shared) // rows
    ids = np.random.default_rng(0).integers(10, backend.arch.vocab, (rows, length))
    ids[:, :shared] = ids[0, :shared]
    weights = np.zeros((rows, length), dtype=np.float32)
    weights[:, length // 2 :] = 1 / (rows * length)
    zeros = np.zeros_like(weights)
    batch = MicroBatch(
        token_ids=ids,
        lengths=np.full(rows, length),
        weights=weights,
        rollout_logprobs=zeros - 1,
        advantages=zeros + 1,
        temperature=np.ones(rows, dtype=np.float32),
    )
    return Scene(backend, ModelDims(**dims_of_config(read_config(folder))), batch, chunk)


def saved_bytes(scene: Scene) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward pass, each storage counted once and parameters left out; and the nodes of that pass."""
    parameters = {each.untyped_storage().data_ptr() for each in scene.backend.model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no other one can take its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nodes = scene.step()
    return sum(storage.nbytes() for storage in storages.values()), nodes


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of tensors that live at once at most during `work`, above what lived before, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    assert recorded.profiler is not None
    # The raw records: the profiler's own list of events leaves out those that an operation accounts for.
    records = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for each in sorted(records, key=lambda each: each.start_ns()):
        now += each.nbytes()
        most = max(most, now)
    return most


def state_bytes(backend: MegatronBackend) -> tuple[int, int, int]:
    """Bytes of weights, gradient buffers and moments; the last are there after the first step."""
    weights = sum(each.nbytes for each in backend.model.parameters())
    buffers = [*backend._ddp.buffers, *backend._ddp.expert_parallel_buffers]
    _, moments = backend._optimizer.state({each: name for name, each in backend.model.named_parameters()})
    return (
        weights,
        sum(each.grad_data.nbytes for each in buffers),
        sum(a.nbytes + b.nbytes for a, b in moments.values()),
    )


def resident_peak() -> int:
    """Bytes that this process has had resident at most (Linux). getrusage would count what its parent had, before it was replaced."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(argv: list[str]) -> int:
    """Measures and prints; the resident peak is read before anything is counted, since counting takes memory too."""
    tokens, rows, chunk = map(int, argv[1:4])
    torch.set_num_threads(1)
    measured = scene(Path(argv[0]), tokens=tokens, rows=rows, chunk=chunk)
    for _ in range(2):  # moments are there from the first update on, beside activations only in the second step
        nodes = measured.step()
        measured.backend.optim_step(1e-6)
    kept = measured.kept(nodes)
    found: dict[str, float] = {"nodes": nodes, "predictions": measured.predictions}
    found |= {"resident": resident_peak(), "resident_formula": local_total(measured.state(), kept)}
    if argv[4:] != ["--resident"]:
        measured.backend.reset_optimizer()
        found |= {"saved": saved_bytes(measured)[0], "saved_formula": kept.saved}
        measured.backend.reset_optimizer()
        found |= {"peak": peak_bytes(measured.step), "peak_formula": kept.total}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
