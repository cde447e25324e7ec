"""The gated MLP of a llama layer with its norm, added to the residual stream, with little kept for
its backward pass. Legend: R rows, E width, I inner width."""

import torch
from torch.nn import functional as F

from paceline.ops.kernels import kernels, use_kernels
from paceline.ops.norm import scale_rows, scale_rows_backward
from paceline.ops.shared import Shared


def add_swiglu(
    x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float, gate: Shared, up: Shared, down: Shared
) -> torch.Tensor:
    """x + (silu(y gate^T) * (y up^T)) down^T with y = norm(x): [R, E]."""
    tokens = (gate.token, up.token, down.token)
    return _AddSwiGLU.apply(x_RE, gain_E.to(x_RE.dtype), *tokens, (gate, up, down), eps)


class _AddSwiGLU(torch.autograd.Function):
    """Keeps both inner products; their gated product and the normed rows are made again."""

    @staticmethod
    def forward(ctx, x_RE, gain_E, gate_token, up_token, down_token, weights, eps):
        ctx.weights, ctx.eps = weights, eps
        gate, up, down = weights
        normed_RE, scales_R = scale_rows(x_RE, gain_E, eps)
        gate_RI, up_RI = normed_RE @ gate.value.T, normed_RE @ up.value.T
        ctx.save_for_backward(x_RE, gain_E, scales_R, gate_RI, up_RI)
        return torch.addmm(x_RE, gated_product(gate_RI, up_RI), down.value.T)

    @staticmethod
    def backward(ctx, grad_RE):
        x_RE, gain_E, scales_R, gate_RI, up_RI = ctx.saved_tensors
        gate, up, down = ctx.weights
        grad_gate, grad_up, product = gated_product_backward(gate_RI, up_RI, grad_RE @ down.value)
        if down.trained:
            normed_RE, _ = scale_rows(x_RE, gain_E, ctx.eps)
            down.add_product(grad_RE, product)
            gate.add_product(grad_gate, normed_RE)
            up.add_product(grad_up, normed_RE)
        grad_normed = (grad_gate @ gate.value).addmm_(grad_up, up.value)
        grads = scale_rows_backward(grad_normed, grad_RE, x_RE, gain_E, scales_R)
        return *grads, None, None, None, None, None


def gated_product(gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    if use_kernels(gate_RI):
        return kernels("swiglu").gated_product(gate_RI, up_RI)
    return F.silu(gate_RI).mul_(up_RI)


def gated_product_backward(
    gate_RI: torch.Tensor, up_RI: torch.Tensor, grad_RI: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient to gate, gradient to up, silu(gate) * up). All three arguments are overwritten."""
    if use_kernels(gate_RI):
        return kernels("swiglu").gated_product_backward(gate_RI, up_RI, grad_RI)
    sigmoid = gate_RI.sigmoid()
    silu = gate_RI * sigmoid
    product = silu * up_RI
    # d silu = sigmoid + silu (1 - sigmoid)
    slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
    return slope.mul_(grad_RI).mul_(up_RI), silu.mul_(grad_RI), product
