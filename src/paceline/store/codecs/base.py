"""What a codec is: states of one sample to parts that lie side by side in a shard, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Part:
    """One tensor of encoded states. row_shape: the shape of one row's entry; None for a part whose
    length in bytes differs from sample to sample (dtype uint8)."""

    suffix: str
    dtype: torch.dtype
    row_shape: tuple[int, ...] | None


class Codec(Protocol):
    """row_shape is that of the states: (A, D) for auxiliary states, (D,) for the last one."""

    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The parts of states [R, *row_shape]; the first is the largest."""
        ...

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        """states [R, ..., D] on any device -> a contiguous tensor per part, on the CPU.

        Raises StoreError for states that the codec cannot hold.
        """
        ...

    def decode(
        self,
        parts: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Parts -> states of `shape` in the store's dtype, written to `out` where it is given.

        Parts with rows may be those of several samples in a row, and lie on any device.
        """
        ...
