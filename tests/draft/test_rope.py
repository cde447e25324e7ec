"""Rotary angles are as exact in a draft of half precision as servers make them."""

import pytest
import torch

from paceline.draft.model import Draft

from .tiny import THETA, tiny_config

POSITIONS = [0, 1, 77, 1000, 4095, 100_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_child", [True, False])
def test_frequencies_stay_exact_when_weights_are_rounded(dtype, by_child):
    draft = Draft(tiny_config(head_dim=32))
    for module in draft.children() if by_child else [draft]:
        module.to(dtype)
    assert draft.fc.weight.dtype == dtype
    cos, sin = draft.rotary(torch.tensor(POSITIONS), torch.float32)
    frequencies = THETA ** (-torch.arange(16, dtype=torch.float64) / 16)
    angles = torch.tensor(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    # What float32 can say of an angle of 1e5 radians.
    assert torch.allclose(cos.double(), angles.cos(), atol=2e-2)
    assert torch.allclose(sin[:5].double(), angles.sin()[:5], atol=1e-3)
    assert draft.rotary(torch.tensor(POSITIONS), dtype)[0].dtype == dtype
