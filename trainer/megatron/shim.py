"""Lets megatron-core run where there is no CUDA. Importing this module is enough; with CUDA it changes nothing but the router's default.

Import it before `megatron.core`: megatron binds `torch.compile` and the torch factories while it is being imported. Nothing is waited for.
Verified with megatron-core 0.16.1 and torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")
ACTIVE = not torch.cuda.is_available()
"""True where the shim answers for CUDA."""


class _Stream:
    """Stands in for a CUDA stream: the CPU has only one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def synchronize(self) -> None:
        pass


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory with `device="cuda"` turned into the CPU, and page-locked memory left out."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _answer_for_cuda() -> None:
    stream = _Stream()
    answers: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "Stream": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # `with torch.device(...)` knows the factories by identity; it must learn them before they are wrapped, or it overlooks them.
    torch.utils._device._device_constructors()
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _no_compiler() -> None:
    """Megatron fuses small functions with torch.compile, which would start a C++ compiler in the middle of a first step."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.config.disable = True


def _repair_megatron() -> None:
    import megatron.core.tensor_parallel.random as tp_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as latent_attention

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = (
            None  # without TransformerEngine the name is undefined, and every router raises NameError
        )
    if not isinstance(latent_attention.TELinear, type):
        latent_attention.HAVE_TE = (
            False  # without TransformerEngine its classes are mocks, of which nothing can be an instance
        )
    if not ACTIVE:
        return
    tp_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tp_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _install() -> None:
    if ACTIVE:
        _no_compiler()
        _answer_for_cuda()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # It warns of every accelerator library that is not installed; none of them is wanted here.
        warnings.simplefilter("ignore")
        _repair_megatron()


_install()
