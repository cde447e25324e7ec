"""How the states of one sample become bytes, and come back.

A codec turns states [rows, ..., D] into parts: tensors that are kept side by side in a shard. Most
parts have a row for each row of the states and can be sliced; a compressed part is a run of bytes.
Legend: R rows, D target hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.errors import StoreError
from paceline.store.spec import DTYPES, StoreSpec


@dataclass(frozen=True)
class Part:
    """One tensor of an encoded state: `row_shape` is the shape of one row's entry, None for a
    part whose length in bytes differs from sample to sample (dtype uint8)."""

    suffix: str
    dtype: torch.dtype
    row_shape: tuple[int, ...] | None


class Codec(Protocol):
    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The parts of states [R, *row_shape]; the first is the largest."""
        ...

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        """states [R, ..., D] -> a tensor per part, contiguous, on the CPU."""
        ...

    def decode(self, parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The inverse (as near as the codec allows): states of `shape` in the store's dtype."""
        ...


class RawCodec:
    """The states' own bytes, little endian."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        return (Part("", self.dtype, row_shape),)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [states.contiguous()]

    def decode(self, parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        return parts[0].view(shape)


_CODECS = {"raw": RawCodec}


def codec_of(spec: StoreSpec) -> Codec:
    try:
        return _CODECS[spec.codec](DTYPES[spec.dtype])
    except KeyError:
        raise StoreError(f"codec {spec.codec!r} is not known to this paceline") from None
