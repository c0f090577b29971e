"""What a carrier collects of the weights on their way, so that the service can verify what arrived.

In: every tensor's bytes, in the order of the export. Out: digests, or nothing where nothing is verified.
"""

from __future__ import annotations

import torch

from palestra.server.publishing.types import Digests
from palestra.trainer.weights.digests import Digester, Kind


class Proof:
    """Of one publish."""

    def __init__(self, kind: Kind | None) -> None:
        """`kind`: of the engines, whose names digests have; None: nothing is collected."""
        self._digester = None if kind is None else Digester(kind)
        self._dtypes: set[str] = set()

    @property
    def collects(self) -> bool:
        """Whether digests are wanted."""
        return self._digester is not None

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Is shown a tensor as it was sent."""
        if self._digester is not None:
            self._dtypes.add(str(tensor.dtype).removeprefix("torch."))
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._digester.add(name, flat, tuple(tensor.shape))

    def digests(self) -> Digests | None:
        """By the engines' names; None: nothing is to be verified."""
        return None if self._digester is None else self._digester.result()

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors; "mixed" where there are several."""
        return next(iter(self._dtypes)) if len(self._dtypes) == 1 else "mixed"
