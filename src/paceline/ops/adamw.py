"""AdamW on float32 weights from gradients of any dtype: on CUDA one pass that also scales the
gradient and writes the rounded copy of the weight that the arithmetic uses."""

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from paceline.ops.kernels import kernels, use_kernels


@dataclass(frozen=True)
class AdamWStep:
    """number: of the step, from 1 on."""

    rate: float
    betas: tuple[float, float]
    weight_decay: float
    number: int
    eps: float = 1e-8


def adamw_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    copy: torch.Tensor | None,
    scale: torch.Tensor,
    step: AdamWStep,
) -> None:
    """Move weight and both moments (float32, in place) by gradient * scale; copy = weight, rounded.

    scale: float32 scalar on the same device; where it is not finite nothing moves.
    """
    if use_kernels(weight):
        kernels("adamw").adamw_(weight, gradient, first, second, copy, scale, step)
        return
    adamw_torch_(weight, gradient, first, second, copy, scale, step)


def adamw_torch_(weight, gradient, first, second, copy, scale, step: AdamWStep) -> None:
    """The twin: torch's own."""
    if not bool(scale.isfinite()):
        return
    adamw(
        [weight],
        [gradient.float() * scale],
        [first],
        [second],
        [],
        [torch.tensor(float(step.number - 1), device=weight.device)],
        fused=True,
        amsgrad=False,
        beta1=step.betas[0],
        beta2=step.betas[1],
        lr=step.rate,
        weight_decay=step.weight_decay,
        eps=step.eps,
        maximize=False,
    )
    if copy is not None:
        copy.copy_(weight)
