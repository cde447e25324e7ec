"""Noise on states: bounded by each state's own size, uniform, drawn anew for each step."""

import torch

from paceline.train.noise import noise_generator, with_noise
from paceline.train.ranks import Ranks

CPU = Ranks(torch.device("cpu"))


def states():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 100.0, 0.01])[:, None]
    return torch.randn(400, 3, 64, generator=generator) * sizes


def test_noise_is_a_share_of_each_states_own_size():
    aux = states()
    moved = (with_noise(aux, 0.25, noise_generator(0, 3, CPU)) - aux).double()
    rms = aux.double().square().mean(-1, keepdim=True).sqrt()
    ratio = moved / rms
    assert ratio.abs().max() <= 0.25 * 1.001
    assert abs(float(ratio.mean())) < 2e-3
    # Of a uniform distribution on [-a, a]: a / sqrt(3).
    torch.testing.assert_close(
        ratio.std((0, 2)), torch.full((3,), 0.25 / 3**0.5).double(), rtol=0.02, atol=0
    )


def test_each_step_has_its_own_noise_and_always_the_same():
    aux = states().bfloat16()
    draw = lambda seed, step: with_noise(aux, 0.1, noise_generator(seed, step, CPU))
    assert draw(0, 1).dtype == torch.bfloat16
    assert torch.equal(draw(0, 1), draw(0, 1))
    assert not torch.equal(draw(0, 1), draw(0, 2))
    assert not torch.equal(draw(0, 1), draw(1, 1))


def test_ranks_draw_different_noise():
    aux = states()
    ranks = [Ranks(torch.device("cpu"), number, 2) for number in (0, 1)]
    drawn = [with_noise(aux, 0.1, noise_generator(0, 5, one)) for one in ranks]
    assert not torch.equal(*drawn)
