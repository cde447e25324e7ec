"""States encoded where they are, on the GPU: byte by byte what the CPU makes of them."""

import pytest
import torch

from paceline.store.codecs import codec_of
from tests.store.making import make_spec, same_bytes

pytestmark = pytest.mark.gpu


def hard_states(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 3, width]: sizes from denormals of bfloat16 to the largest of float16, a massive first
    token, a row of zeros, zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, 3, width, generator=generator)
    states *= torch.logspace(-39, 4, rows).view(-1, 1, 1)
    states[0, :, 1], states[1] = 24_960.0, 0.0
    states[2, :, ::3], states[3, :, ::5] = -0.0, 0.0
    states[4, 0, 0], states[5, 0, 0] = 65_504.0, -65_504.0
    return states.clamp(-65_504.0, 65_504.0).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "fp8"])
def test_the_bytes_of_the_cpu(codec: str, dtype: str) -> None:
    made = codec_of(make_spec(codec, dtype, 4096))
    states = hard_states(300, 4096, getattr(torch, dtype))
    for part, on_cpu in zip(made.encode(states.cuda()), made.encode(states), strict=True):
        assert not part.is_cuda and same_bytes(part, on_cpu)
