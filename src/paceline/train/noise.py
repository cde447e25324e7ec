"""Noise on what a draft reads, so that many epochs do not teach it the training states by heart.

Legend: R rows, A auxiliary states, D target width.
"""

import torch

from paceline.train.ranks import Ranks


def noise_generator(seed: int, step: int, ranks: Ranks) -> torch.Generator:
    """Of one optimiser step on one rank: a resumed run draws what an unbroken one draws."""
    number = (seed * 1_000_003 + step) * ranks.count + ranks.number
    # A generator of the CPU takes 32 bits of a seed.
    return torch.Generator(ranks.device).manual_seed(number % 2**32)


def with_noise(aux_RAD: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Each state plus uniform noise of at most `share` of its own root mean square."""
    exact = aux_RAD.float()
    scale = exact.square().mean(-1, keepdim=True).sqrt_().mul_(share)
    noise = torch.empty_like(exact).uniform_(-1.0, 1.0, generator=generator)
    return torch.addcmul(exact, noise, scale).to(aux_RAD.dtype)
