"""What SGLang's CPU engine needs of its kernel package where that package does not exist: on processors without AMX.

There SGLang computes with plain torch and takes from `sgl_kernel` only names that it imports without looking. The ones that a forward
pass calls are written here; every other name can be imported and raises when it is called. Where CUDA is, importing this fails as if
the package were missing, so that it never stands in for real kernels. It is no part of palestra: `palestra engine install --cpu`
copies it into the engines' own environment.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import torch

if torch.cuda.is_available():
    raise ImportError(
        "sgl_kernel is a stand-in for processors here, and this machine has CUDA: use an environment with real kernels"
    )

__version__ = "0.0.0+palestra.cpu"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Writes the cache slots of each request's new tokens into its row of the table; `slots` holds those of all requests, one after
    the other. `width` is the table's, which torch knows."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        count = end - start
        table[row, start:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


class _Absent:
    """A kernel that is not here: it can be imported, and says so when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} has no stand-in for a CPU: the model or the option that calls it needs a GPU"
        )


def _absent(name: str) -> _Absent:
    # Dunder names are asked for by the import system and by inspection, which must see that there are none.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


def __getattr__(name: str) -> Any:
    return _absent(f"sgl_kernel.{name}") if not name.startswith("__") else _absent(name)


class _Part(ModuleType):
    """A submodule in which every name is absent."""

    def __getattr__(self, name: str) -> Any:
        return _absent(name) if name.startswith("__") else _absent(f"{self.__name__}.{name}")


for _name in ("mamba",):
    sys.modules[f"sgl_kernel.{_name}"] = _Part(f"sgl_kernel.{_name}")
