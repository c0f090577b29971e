"""What megatron-core 0.16.1 expects of NCCL and CUDA in several processes and gloo does not give. With CUDA nothing here changes anything.

In one process none of this is called, which is why it is not in `shim.py`. Nothing is waited for but the collectives themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from palestra.trainer.megatron.core import ON_CPU, mappings

_repaired = False


def repair_collectives() -> None:
    """Gives megatron's gather and reduce-scatter of unequal parts, which MoE uses under EP and expert TP, a form that gloo has."""
    global _repaired
    if not ON_CPU or _repaired:
        return
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        tensor: torch.Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter_uneven(
        tensor: torch.Tensor,
        group: Any,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(tensor, group, input_split_sizes, use_global_buffer)
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, list(input_split_sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven
    _repaired = True


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """While it lasts, `tensor.type()` names CPU tensors as CUDA's: the distributed optimizer takes no others when it is built."""
    if not ON_CPU:
        yield
        return
    real = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = named  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]
