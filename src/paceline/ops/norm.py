"""RMSNorm with an optional gain, alone and in front of a product. Legend: R rows, E width, O
outputs."""

import torch

from paceline.ops.kernels import kernels, use_kernels
from paceline.ops.shared import Shared


def rms_norm(x_RE: torch.Tensor, weight_E: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    return _RMSNorm.apply(x_RE, None if weight_E is None else weight_E.to(x_RE.dtype), eps)


def normed_linear(
    x_RE: torch.Tensor, weight: Shared, eps: float, added_RO: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x) W^T (+ added) [R, O], x itself): read on from the second, and the backward pass adds
    both gradients in one go. The normed rows are made again there, not kept."""
    return _NormedLinear.apply(x_RE, weight.token, added_RO, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RE, weight_E, eps):
        out, scales = scale_rows(x_RE, weight_E, eps)
        ctx.save_for_backward(x_RE, weight_E, scales)
        return out

    @staticmethod
    def backward(ctx, grad_RE):
        x_RE, weight_E, scales = ctx.saved_tensors
        return *scale_rows_backward(grad_RE, None, x_RE, weight_E, scales), None


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RE, token, added_RO, weight, eps):
        normed, scales = scale_rows(x_RE, None, eps)
        ctx.weight, ctx.eps = weight, eps
        ctx.save_for_backward(x_RE, scales)
        if added_RO is None:
            return normed @ weight.value.T, x_RE
        return torch.addmm(added_RO, normed, weight.value.T), x_RE

    @staticmethod
    def backward(ctx, grad_RO, grad_x):
        x_RE, scales = ctx.saved_tensors
        if ctx.weight.trained:
            ctx.weight.add_product(grad_RO, scale_rows(x_RE, None, ctx.eps)[0])
        added = grad_RO if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            grad_RE = grad_RO @ ctx.weight.value
            grad_x, _ = scale_rows_backward(grad_RE, grad_x, x_RE, None, scales)
        return grad_x, None, added, None, None


def scale_rows(
    x_RE: torch.Tensor, weight_E: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed rows, 1 / root mean square of each row [R])."""
    function = kernels("norm").scale_rows if use_kernels(x_RE) else scale_rows_torch
    return function(x_RE, weight_E, eps)


def scale_rows_backward(
    grad_RE: torch.Tensor,
    added_RE: torch.Tensor | None,
    x_RE: torch.Tensor,
    weight_E: torch.Tensor | None,
    scales_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient to x, plus `added`; gradient to the weight)."""
    function = scale_rows_backward_torch
    if use_kernels(x_RE):
        function = kernels("norm").scale_rows_backward
    return function(grad_RE, added_RE, x_RE, weight_E, scales_R)


def scale_rows_torch(x_RE, weight_E, eps):
    exact = _exact(x_RE)
    scales = exact.square().mean(-1).add_(eps).rsqrt_()
    normed = exact * scales[:, None]
    if weight_E is not None:
        normed = normed.mul_(weight_E)
    return normed.to(x_RE.dtype), scales


def scale_rows_backward_torch(grad_RE, added_RE, x_RE, weight_E, scales_R):
    normed, grad = _exact(x_RE) * scales_R[:, None], _exact(grad_RE)
    grad_weight = None
    if weight_E is not None:
        grad_weight = (grad * normed).sum(0).to(weight_E.dtype)
        grad = grad * weight_E
    mean = (grad * normed).mean(-1, keepdim=True)
    grad_x = (grad - normed.mul_(mean)).mul_(scales_R[:, None])
    if added_RE is not None:
        grad_x = grad_x.add_(added_RE)
    return grad_x.to(x_RE.dtype), grad_weight


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
