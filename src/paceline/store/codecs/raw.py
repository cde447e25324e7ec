"""Codec `raw`: the states' own bytes, little endian."""

from collections.abc import Sequence

import torch

from paceline.store.codecs.base import Part


class RawCodec:
    """Implements `Codec`. Decoding gives a view of the part."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        return (Part("", self.dtype, row_shape),)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [states.cpu().contiguous()]

    def decode(
        self,
        parts: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        states = parts[0].view(shape)
        return states if out is None else out.copy_(states)
