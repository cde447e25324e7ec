"""Tensors that many operations of one graph read, whose gradient is made in one buffer.

A weight that S steps use gets S gradients; autograd would make each apart and add them in passes
over memory. Here each operation adds its share to one buffer (a matrix product does that while it
writes), and autograd sees the sum once. Legend: R rows, I inputs, O outputs.
"""

import torch


class Sink:
    """Where gradients of a shared tensor are added up during the backward pass."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None


class _Shared(torch.autograd.Function):
    """A token that stands for the tensor in the graph: autograd calls this node's backward when
    all operations that took the token have added their share."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, sink: Sink):
        ctx.sink = sink
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: torch.Tensor):
        gradient, ctx.sink.gradient = ctx.sink.gradient, None
        return gradient, None


class Shared:
    """`value` to compute with, `token` to hand to autograd, `sink` to add gradients to. rows: the
    part of the tensor that this one stands for (see `part`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach()
        self.sink = Sink()
        self.token: torch.Tensor = _Shared.apply(tensor, self.sink)
        self._shape = tensor.shape
        self._rows = slice(None)

    def part(self, rows: slice) -> "Shared":
        """Some rows of the tensor; gradients go to the same buffer."""
        part = object.__new__(Shared)
        part.value = self.value[rows]
        part.sink, part.token, part._shape, part._rows = self.sink, self.token, self._shape, rows
        return part

    @property
    def trained(self) -> bool:
        return self.token.requires_grad

    def gradient(self) -> torch.Tensor:
        """The buffer's rows, for operations that add to it in place."""
        if self.sink.gradient is None:
            self.sink.gradient = self.value.new_zeros(self._shape)
        return self.sink.gradient[self._rows]

    def add_product(self, grad_RO: torch.Tensor, x_RI: torch.Tensor) -> None:
        """gradient += grad^T x."""
        if self.sink.gradient is None and self._rows == slice(None):
            self.sink.gradient = grad_RO.T @ x_RI
        else:
            self.gradient().addmm_(grad_RO.T, x_RI)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_RI: torch.Tensor,
        token: torch.Tensor,
        added_RO: torch.Tensor | None,
        weight: Shared,
    ) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x_RI if weight.trained else None)
        if added_RO is None:
            return x_RI @ weight.value.T
        return torch.addmm(added_RO, x_RI, weight.value.T)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_RO: torch.Tensor):
        (x_RI,) = ctx.saved_tensors
        if x_RI is not None:
            ctx.weight.add_product(grad_RO, x_RI)
        grad_RI = grad_RO @ ctx.weight.value if ctx.needs_input_grad[0] else None
        return grad_RI, None, grad_RO if ctx.needs_input_grad[2] else None, None


def linear(x_RI: torch.Tensor, weight: Shared, added_RO: torch.Tensor | None = None):
    """x W^T (+ added): [R, O]."""
    return _Linear.apply(x_RI, weight.token, added_RO, weight)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, rows: torch.Tensor):
        ctx.num_rows = len(x)
        ctx.save_for_backward(rows)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor):
        (rows,) = ctx.saved_tensors
        full = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return full.index_copy_(0, rows, grad), None


def take_rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """x[rows] for rows that differ from each other (so that the gradient is a copy, not a sum);
    None takes all."""
    return x if rows is None else _TakeRows.apply(x, rows)
