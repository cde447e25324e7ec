"""The gated MLP of a llama layer, added to the residual stream, with little kept for its backward
pass. Legend: R rows, E width, I inner width."""

import torch
from torch.nn import functional as F

from paceline.ops.kernels import kernels, use_kernels
from paceline.ops.shared import Shared


def add_swiglu(
    residual_RE: torch.Tensor, x_RE: torch.Tensor, gate: Shared, up: Shared, down: Shared
) -> torch.Tensor:
    """residual + (silu(x gate^T) * (x up^T)) down^T: [R, E]."""
    tokens = (gate.token, up.token, down.token)
    return _AddSwiGLU.apply(residual_RE, x_RE, *tokens, (gate, up, down))


class _AddSwiGLU(torch.autograd.Function):
    """Keeps both inner products but not their gated product: it is made again."""

    @staticmethod
    def forward(ctx, residual_RE, x_RE, gate_token, up_token, down_token, weights):
        ctx.weights = weights
        gate, up, down = weights
        gate_RI, up_RI = x_RE @ gate.value.T, x_RE @ up.value.T
        ctx.save_for_backward(x_RE, gate_RI, up_RI)
        return torch.addmm(residual_RE, gated_product(gate_RI, up_RI), down.value.T)

    @staticmethod
    def backward(ctx, grad_RE):
        x_RE, gate_RI, up_RI = ctx.saved_tensors
        gate, up, down = ctx.weights
        grad_gate, grad_up, product = gated_product_backward(gate_RI, up_RI, grad_RE @ down.value)
        if down.trained:
            down.add_product(grad_RE, product)
            gate.add_product(grad_gate, x_RE)
            up.add_product(grad_up, x_RE)
        grad_x = (grad_gate @ gate.value).addmm_(grad_up, up.value)
        return grad_RE, grad_x, None, None, None, None


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
