"""8-bit codes and their scales to states: a Triton kernel on CUDA, its plain-torch twin elsewhere.

value = code * scale, computed in float32 and rounded once; both give the same bits.
Legend: D target hidden width, G scales of a row; each scale serves D / G neighbouring codes.
"""

import functools

import torch

from paceline.ops.kernels import kernels, use_kernels


def dequantise(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """codes int8 or float8_e4m3fn [..., D], scales bfloat16 [..., G] -> out [..., D], returned.

    All three are contiguous and on one device; out is bfloat16, float16 or float32.
    """
    if use_kernels(codes):
        return kernels("dequantise").dequantise_triton(codes, scales, out)
    return dequantise_torch(codes, scales, out)


def dequantise_torch(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The twin: widen the codes in place of the result, then scale them."""
    out.copy_(codes if codes.dtype == torch.int8 else _widen_e4m3(codes))
    out.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return out


def _widen_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn -> bfloat16, exactly, out of a table: torch 2.13's own conversion takes five
    times as long on a CPU, and arithmetic on the bits passes through denormal numbers, which are 0
    in a process whose libraries switched them off."""
    numbers = codes.view(torch.uint8).flatten().to(torch.int32)
    return _e4m3_values().index_select(0, numbers).view(codes.shape)


@functools.cache
def _e4m3_values() -> torch.Tensor:
    """The value of each byte, bfloat16 [256]."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    return codes.to(torch.bfloat16)
