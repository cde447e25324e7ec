"""The learning rate as a pure function of the optimiser step: nothing to save, nothing to lose."""

import math
from collections.abc import Callable

_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    warmup_steps: float,
    decay: str,
    min_ratio: float = 0.0,
) -> float:
    """Rate of optimiser step `step` (0-based): linear warm-up, then a decay to min_ratio * peak.

    warmup_steps: below 1 a share of total_steps. The decay runs over the steps after the warm-up;
    past the end the rate stays at its floor.
    """
    if warmup_steps < 1:
        warmup_steps = math.ceil(warmup_steps * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return peak * (min_ratio + (1.0 - min_ratio) * _DECAYS[decay](progress))
