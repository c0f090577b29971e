"""Words of the data half of a publish. torch is only named for type checkers: importing this loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Export: TypeAlias = "Callable[[], Iterator[tuple[str, torch.Tensor]]]"
"""Starts one pass over the present weights: Hugging Face name and tensor, in the same order with the same shapes every time."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one publish took."""

    bytes: int
    """Of the weights that travelled (of a delta: what was written)."""
    seconds: float
    """From the first byte to the new version in force."""
    still_s: float
    """How long the engines stood still meanwhile."""
    requests: int
    """Calls of the service that carried or announced weights."""


class Carrier(Protocol):
    """One way for weights to travel."""

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """Makes the present weights the engines' `version`; returns when the service says that it is so.

        Raises:
            TrainerError: the weights could not be written, sent, or read back differently.
        """
