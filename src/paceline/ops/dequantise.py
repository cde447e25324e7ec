"""8-bit codes and their scales to states: a Triton kernel on CUDA, its plain-torch twin elsewhere.

value = code * scale, computed in float32 and rounded once; both give the same bits.
Legend: D target hidden width, G scales of a row; each scale serves D / G neighbouring codes.
"""

import functools
import importlib
from typing import Any

import torch

# float8 e4m3 has its exponent's zero at 7, bfloat16 at 127.
_E4M3_TO_BFLOAT16 = 2.0**120


def dequantise(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """codes int8 or float8_e4m3fn [..., D], scales bfloat16 [..., G] -> out [..., D], returned.

    All three are contiguous and on one device; out is bfloat16, float16 or float32.
    """
    if codes.is_cuda:
        return _triton_kernels().dequantise_triton(codes, scales, out)
    return dequantise_torch(codes, scales, out)


def dequantise_torch(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The twin: widen the codes in place of the result, then scale them."""
    out.copy_(codes if codes.dtype == torch.int8 else _widen_e4m3(codes))
    out.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return out


def _widen_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn -> bfloat16, exactly, by moving bits: torch 2.13's own conversion takes six
    times as long on a CPU. The codes must be finite."""
    bits = codes.view(torch.int8).to(torch.int16)
    # Sign to bit 15 (it was extended), exponent and mantissa to bits 10 to 4.
    bits.bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
    return bits.view(torch.bfloat16).mul_(_E4M3_TO_BFLOAT16)


@functools.cache
def _triton_kernels() -> Any:
    # Triton comes with CUDA builds of torch only.
    return importlib.import_module("paceline.ops.dequantise_triton")
