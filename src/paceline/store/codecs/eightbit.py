"""Codecs `int8` and `fp8`: a byte for each value and a scale for each group of a token's row.

value = code * scale. Scales are never shared between tokens: the first token of a sequence holds
values of 24,960 where all others stay under 520, and would leave the others no digits.
Legend: R rows, D target hidden width, G groups of a row, W width of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import StoreError
from paceline.ops.dequantise import dequantise
from paceline.store.codecs.base import Part

_WIDEST_GROUP = 128
_NARROWEST_GROUP = 32
# Encoded at a time. On a CPU what stands between stays in a core's cache (five to seven times
# as fast as whole samples at a width of 4,096); on a GPU it takes no room beside a large target.
_CPU_PIECE, _GPU_PIECE = 1 << 20, 1 << 24


@dataclass(frozen=True)
class CodeFormat:
    """One kind of 8-bit code. top: the largest code. is_grouped: a scale for at most 128
    neighbouring values, else one for the whole row."""

    name: str
    dtype: torch.dtype
    top: float
    is_grouped: bool


INT8 = CodeFormat("int8", torch.int8, 127.0, is_grouped=True)
# Finite values of e4m3 end at 448; its own exponent does what int8 needs groups for.
FP8 = CodeFormat("fp8", torch.float8_e4m3fn, 448.0, is_grouped=False)


class EightBitCodec:
    """Implements `Codec`. Encodes on the device where the states are."""

    def __init__(self, dtype: torch.dtype, code: CodeFormat, hidden_size: int) -> None:
        self.dtype = dtype
        self.code = code
        self.group_width = _group_width(hidden_size) if code.is_grouped else hidden_size

    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        groups = (*row_shape[:-1], row_shape[-1] // self.group_width)
        return (Part("", self.code.dtype, row_shape), Part(".scale", torch.bfloat16, groups))

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        encoded = [
            torch.empty((len(states), *part.row_shape), dtype=part.dtype)
            for part in self.parts(tuple(states.shape[1:]))
        ]
        num_values = _GPU_PIECE if states.is_cuda else _CPU_PIECE
        num_rows = max(1, num_values // states.shape[1:].numel())
        pieces = (states, *encoded)
        for piece, *places in zip(*(whole.split(num_rows) for whole in pieces), strict=True):
            for place, part in zip(places, self._encode(piece), strict=True):
                place.copy_(part)
        return encoded

    def _encode(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = states.float().unflatten(-1, (-1, self.group_width))
        largest = grouped.abs().amax(-1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise StoreError(f"codec {self.code.name} cannot hold states that are not finite")
        # By a tensor: CUDA multiplies by the reciprocal of a plain number, which gives other bits.
        scale = _round_up_to_bfloat16(largest / largest.new_full((), self.code.top))
        # A group of zeros has scale 0; its codes must be zeros, not 0 / 0.
        codes = grouped / scale.where(scale > 0, 1.0)
        if self.code.dtype == torch.int8:
            codes = codes.round_()
        codes = codes.clamp_(-self.code.top, self.code.top).to(self.code.dtype)
        if self.dtype == torch.float16:
            _stay_finite(codes, scale)
        return codes.flatten(-2), scale[..., 0].bfloat16()

    def decode(
        self,
        parts: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        codes, scale = parts
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=codes.device)
        return dequantise(codes.view(shape), scale, out)


def _stay_finite(codes: torch.Tensor, scale: torch.Tensor) -> None:
    """One code less, in place, for values that would come back beyond float16: rounding up near its
    largest, 65,504, would make them infinite."""
    beyond = (codes.float() * scale).abs() > torch.finfo(torch.float16).max
    if codes.dtype == torch.int8:
        codes.sub_(beyond * codes.sign())
    else:
        # The bits of a float8 without its sign count up with its size.
        codes.view(torch.uint8).sub_(beyond.to(torch.uint8))


def _group_width(hidden_size: int) -> int:
    """The widest group of at most 128 values that divides the row."""
    if hidden_size <= _WIDEST_GROUP:
        return hidden_size
    for width in range(_WIDEST_GROUP, _NARROWEST_GROUP - 1, -1):
        if hidden_size % width == 0:
            return width
    raise StoreError(
        f"codec int8 needs a hidden size with a divisor from {_NARROWEST_GROUP} to "
        f"{_WIDEST_GROUP}; {hidden_size} has none: use fp8 or lossless"
    )


def _round_up_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 -> the nearest bfloat16 not below, as float32.

    A scale that was rounded up before it is used costs no accuracy for being short, and no value
    falls outside the codes.
    """
    bits = values.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
