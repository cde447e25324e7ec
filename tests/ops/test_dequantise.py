"""8-bit codes to states, kernel and twin, against each code's value in float64, bit for bit."""

import pytest
import torch

from paceline.ops.dequantise import dequantise_torch
from paceline.ops.kernels import kernels
from tests.float8 import FINITE, e4m3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    "kernel": lambda *tensors: kernels("dequantise").dequantise_triton(*tensors),
    "twin": dequantise_torch,
}
# Triton's interpreter cuts what does not fit into bfloat16 where a GPU rounds: tests/gpu has those.
CASES = [
    (way, dtype)
    for way in WAYS
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if (way, dtype, DEVICE) != ("kernel", torch.bfloat16, "cpu")
]


def all_codes(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code and its value, float64."""
    if kind == "int8":
        numbers = torch.arange(-128, 128)
        return numbers.to(torch.int8), numbers.double()
    codes = torch.tensor(FINITE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, torch.tensor([e4m3(byte) for byte in FINITE], dtype=torch.float64)


# One row, rows that fill a block of the kernel to the last code, rows that end within one.
SHAPES = [((1, 12), 1), ((16, 64), 4), ((5, 3, 120), 8), ((1030, 2), 2)]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("way", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("shape", "num_scales"), SHAPES)
def test_codes_times_their_scales(shape, num_scales, way, kind, dtype):
    codes, values = all_codes(kind)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(codes), shape, generator=generator)
    chosen.view(-1)[: len(codes)] = torch.arange(len(codes))[: chosen.numel()]
    scales = torch.rand(*shape[:-1], num_scales, generator=generator).bfloat16()
    scales[..., 0] = torch.tensor(2.0**-20)
    scales.view(-1)[-1] = 0.0
    wide = scales.double().repeat_interleave(shape[-1] // num_scales, -1)
    # A code has 8 bits and a scale has 8, so float32 holds their product exactly.
    expected = (values[chosen] * wide).to(dtype)
    picked = codes.view(torch.uint8)[chosen].view(codes.dtype)
    out = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    given = WAYS[way](picked.to(DEVICE), scales.to(DEVICE), out)
    assert given is out
    # Zeros too: -0 is a code of its own.
    assert torch.equal(given.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_small_codes_where_a_library_switched_denormal_numbers_off():
    codes, values = all_codes("fp8")
    out = torch.empty(1, len(codes), dtype=torch.bfloat16)
    assert torch.set_flush_denormal(True)
    try:
        dequantise_torch(codes[None], torch.ones(1, 1).bfloat16(), out)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out[0].double(), values)


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(way):
    codes, scales = torch.empty(0, 3, 8, dtype=torch.int8), torch.empty(0, 3, 1).bfloat16()
    out = torch.empty(0, 3, 8, device=DEVICE)
    assert WAYS[way](codes.to(DEVICE), scales.to(DEVICE), out) is out
