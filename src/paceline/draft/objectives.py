"""The losses that a draft can be trained on: functions of what a row's logits say.

kl: KL(p || q) in nats, the teacher's p renormalised on the draft vocabulary. accepted: the chance a
that a token sampled from the draft is accepted, sum of min(p, q) with the target's whole softmax p
(what the draft vocabulary cannot say counts as rejected).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Below this acceptance the slope of -log a no longer grows.
_LEAST_ACCEPTED = 1e-5
# How fast the hybrid turns from KL to total variation as drafts are accepted (Samarin et al., "LK
# Losses", 2026).
_HYBRID_TURN = 3.0


@dataclass(frozen=True)
class Objective:
    """value(kl, accepted) [C] in nats or shares; slopes(kl, accepted): its derivatives by both, [C]
    each, None for 0. whole_softmax: `accepted` must be of the target's whole softmax."""

    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    slopes: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    whole_softmax: bool = True


def _hybrid_share(accepted: torch.Tensor) -> torch.Tensor:
    """The KL's share of the hybrid; a weight, not a part that is differentiated."""
    return torch.exp(-_HYBRID_TURN * accepted)


OBJECTIVES: dict[str, Objective] = {
    "kl": Objective(
        value=lambda kl, a: kl,
        slopes=lambda kl, a: (torch.ones_like(kl), None),
        whole_softmax=False,
    ),
    "total_variation": Objective(
        value=lambda kl, a: 1 - a,
        slopes=lambda kl, a: (torch.zeros_like(kl), -torch.ones_like(a)),
    ),
    "log_acceptance": Objective(
        value=lambda kl, a: -a.clamp(min=_LEAST_ACCEPTED).log(),
        slopes=lambda kl, a: (torch.zeros_like(kl), -1 / a.clamp(min=_LEAST_ACCEPTED)),
    ),
    "hybrid": Objective(
        value=lambda kl, a: _hybrid_share(a) * kl + (1 - _hybrid_share(a)) * (1 - a),
        slopes=lambda kl, a: (_hybrid_share(a), _hybrid_share(a) - 1),
    ),
}
