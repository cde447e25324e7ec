"""The CUDA kernel of `dequantise`: one pass, one read of each code, one write of each value."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _dequantise(
    codes, scales, out, num_codes, group_width, IS_FP8: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_codes
    code = tl.load(codes + at, mask=inside, other=0)
    # Groups tile the rows without a rest, so the scale's number needs no row arithmetic.
    scale = tl.load(scales + at // group_width, mask=inside, other=0).to(tl.float32)
    if IS_FP8:
        # By hand from the bits (e4m3: 4 exponent bits, bias 7, 3 mantissa bits): works on GPUs
        # without float8 instructions and needs no denormal float32.
        bits = code.to(tl.int32)
        exponent = (bits >> 3) & 15
        digits = (bits & 7) + tl.where(exponent > 0, 8, 0)
        power = ((tl.maximum(exponent, 1) - 10 + 127) << 23).to(tl.float32, bitcast=True)
        # Times -1: Triton below 3.8 negates by 0 - x, which makes 0 of the code for -0.
        value = digits.to(tl.float32) * power * tl.where((bits & 128) > 0, -1.0, 1.0)
    else:
        value = code.to(tl.float32)
    tl.store(out + at, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantise_triton(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """codes int8 or float8_e4m3fn [..., D], scales bfloat16 [..., G] -> out [..., D], returned.

    All contiguous, on one CUDA device.
    """
    is_fp8 = codes.dtype == torch.float8_e4m3fn
    num_codes = codes.numel()
    if num_codes:
        # A reading thread's current device is the first GPU, whichever holds the codes.
        with torch.cuda.device_of(codes):
            _dequantise[(triton.cdiv(num_codes, _BLOCK),)](
                codes.view(torch.uint8) if is_fp8 else codes,
                scales,
                out,
                num_codes,
                codes.shape[-1] // scales.shape[-1],
                IS_FP8=is_fp8,
                BLOCK=_BLOCK,
            )
    return out
