"""RMSNorm with an optional gain. Legend: R rows, E width."""

import torch
from torch.nn import functional as F

from paceline.ops.kernels import kernels, use_kernels


def rms_norm(x_RE: torch.Tensor, weight_E: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    return rms_norm_and_input(x_RE, weight_E, eps)[0]


def rms_norm_and_input(
    x_RE: torch.Tensor, weight_E: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the normed rows, x itself): read on from the second, and the backward pass adds both
    gradients while it makes them."""
    weight_E = None if weight_E is None else weight_E.to(x_RE.dtype)
    if use_kernels(x_RE):
        return kernels("norm").rms_norm_and_input(x_RE, weight_E, eps)
    return F.rms_norm(x_RE, (x_RE.shape[-1],), weight_E, eps), x_RE
