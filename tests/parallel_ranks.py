"""Several ranks of the parallel backend on loopback, each a process of its own, which take the same steps in one layout after another.

`run_ranks` starts them, waits with a deadline and ends by pid what is left. Run as a program it is one rank: `parallel_ranks.py PLAN RANK
PORT`. It imports nothing of `tests`, since our folders would shadow installed packages from the repository's root.

A plan: `models` name -> folder, `optim` (OptimSettings), `lr`, `steps` (micro-batches per step), `cases` name -> {model, layout, chunk}.
A case with `resume` stops before the last step, saves, and goes on from what the named case (itself or another) saved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any


def run_ranks(folder: Path, world: int, plan: Mapping[str, Any], deadline_s: float = 400.0) -> list[dict[str, Any]]:
    """Runs `plan` on `world` ranks; returns each rank's record by case. Rank 0 leaves NAME.safetensors in `folder`.

    Raises:
        AssertionError: a rank failed or did not end in time; with its last words.
    """
    import torch.distributed as dist

    (folder / "plan.json").write_text(json.dumps({**plan, "world": world, "folder": str(folder)}))
    # The store is ours and has its port from the kernel: nobody else can take it before the ranks come.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1", "PYTHONWARNINGS": "ignore"}
    ranks = []
    try:
        for rank in range(world):
            command = [sys.executable, "-P", __file__, str(folder / "plan.json"), str(rank), str(store.port)]
            with (folder / f"rank{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
        ends = time.monotonic() + deadline_s
        for process in ranks:
            process.wait(max(0.1, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"ranks did not end in {deadline_s:g} s: {_last_words(folder, world)}") from None
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    codes = [process.returncode for process in ranks]
    assert codes == [0] * world, f"ranks ended with {codes}: {_last_words(folder, world)}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def _last_words(folder: Path, world: int) -> str:
    return "\n".join(f"rank {rank}: {(folder / f'rank{rank}.log').read_text()[-3000:]}" for rank in range(world))


def as_plan(batch: Any) -> dict[str, Any]:
    """A MicroBatch without optional arrays, as JSON."""
    fields = ((each.name, getattr(batch, each.name)) for each in dataclasses.fields(batch))
    return {name: array.tolist() for name, array in fields if array is not None}


def batch_of(given: Mapping[str, Any]) -> Any:
    """The inverse of `as_plan`."""
    import numpy as np

    from palestra.trainer.types import MicroBatch

    whole = ("token_ids", "lengths")
    return MicroBatch(
        **{name: np.array(array, dtype=np.int64 if name in whole else np.float32) for name, array in given.items()}
    )


def one_step(backend: Any, batches: Sequence[Any], lr: float) -> tuple[Any, Any]:
    """Statistics of the gradients and of the update."""
    from palestra.trainer.losses import nll_loss

    return backend.forward_backward(batches, nll_loss), backend.optim_step(lr)


def steps_of(backend: Any, steps: Sequence[Sequence[Any]], lr: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes the steps; returns what every rank is told, and tensors: log p before and after, weights, and the first step's gradients."""
    import torch

    from palestra.trainer.losses import nll_loss

    last = steps[-1]
    tensors = {f"before.{i}": torch.from_numpy(each) for i, each in enumerate(backend.logprobs(last))}
    # In two calls: gradients add up until they are applied, also where a data rank has nothing of the first.
    for part in (steps[0][:1], steps[0][1:]):
        backend.forward_backward(part, nll_loss)
    tensors |= {f"grad.{name}": tensor.clone() for name, tensor in backend.gradients()}
    backend.reset_optimizer()
    done = [one_step(backend, batches, lr) for batches in steps]
    tensors |= {f"after.{i}": torch.from_numpy(each) for i, each in enumerate(backend.logprobs(last))}
    return _record(done), tensors | _weights(backend)


def _weights(backend: Any) -> dict[str, Any]:
    return {f"param.{name}": tensor.clone() for name, tensor in backend.export()}


def _record(done: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    pairs = list(done)
    return {
        "losses": [stats.loss for stats, _ in pairs],
        "norms": [update.grad_norm for _, update in pairs],
        "nodes": [stats.tokens for stats, _ in pairs],
        "counts": [stats.sums["tokens"] for stats, _ in pairs],
    }


def resumed(
    make: Any, steps: Sequence[Sequence[Any]], lr: float, save: Path, load: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All steps but the last, a checkpoint in `save`, and the last step by a backend that read `load`. Where they are the same, `same` says
    whether one that never stopped ends equal bit for bit."""
    import numpy as np
    import torch

    from palestra.trainer.losses import nll_loss

    first, second = make(), make()
    first.freeze_reference()
    for batches in steps[:-1]:
        one_step(first, batches, lr)
    first.save(save)
    second.forward_backward(steps[0], nll_loss)  # must not leak into what is loaded
    second.load(load)
    done = one_step(second, steps[-1], lr)
    record = _record([done])
    tensors = _weights(second)
    kept = second.logprobs(steps[-1], reference=True)
    tensors |= {f"reference.{i}": torch.from_numpy(each) for i, each in enumerate(kept)}
    if save == load:
        one_step(first, steps[-1], lr)
        same = _weights(first)
        record["same"] = all(torch.equal(tensor, tensors[name]) for name, tensor in same.items())
        theirs = first.logprobs(steps[-1], reference=True)
        record["same"] &= all(np.array_equal(a, b) for a, b in zip(kept, theirs, strict=True))
    return record, tensors


def main(plan_path: str, rank: int, port: int) -> None:
    """One rank: every case in turn."""
    from safetensors.torch import save_file

    from palestra.trainer.layout.types import Layout
    from palestra.trainer.megatron.backend import BackendSettings
    from palestra.trainer.megatron.optimizer import OptimSettings
    from palestra.trainer.megatron.parallel import process
    from palestra.trainer.megatron.parallel.backend import ParallelBackend

    plan = json.loads(Path(plan_path).read_text())
    folder, world, lr = Path(plan["folder"]), plan["world"], plan["lr"]
    steps = [[batch_of(each) for each in batches] for batches in plan["steps"]]
    process.join(process.Place(rank, world, "127.0.0.1", port, deadline_s=120.0))
    out = {}
    for name, case in plan["cases"].items():
        layout = Layout(gpus=world, **case["layout"])
        process.arrange(layout)
        settings = BackendSettings(optim=OptimSettings(**plan["optim"]), logprob_chunk=case.get("chunk", 0))

        def make(case: Any = case, layout: Any = layout, settings: Any = settings) -> Any:
            return ParallelBackend.from_folder(Path(plan["models"][case["model"]]), layout, settings)

        started = time.monotonic()
        if source := case.get("resume"):
            out[name], tensors = resumed(make, steps, lr, folder / f"{name}.state", folder / f"{source}.state")
        else:
            out[name], tensors = steps_of(make(), steps, lr)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        if rank == 0:
            save_file(
                {key: tensor.contiguous() for key, tensor in tensors.items()}, str(folder / f"{name}.safetensors")
            )
    (folder / f"rank{rank}.json").write_text(json.dumps(out))
    process.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
