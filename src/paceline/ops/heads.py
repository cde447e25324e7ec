"""From products to heads: rows [R, n K] become [R, n, K], the first of them rotated.

Legend: R rows, n heads, K head width, S rows that share their addend.
"""

import torch

from paceline.ops.kernels import kernels, use_kernels
from paceline.ops.shared import Shared


def rotated_heads(
    x_RC: torch.Tensor,
    cos_RK: torch.Tensor,
    sin_RK: torch.Tensor,
    num_rotated: int,
    added_SC: Shared | None = None,
    source_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """heads(x + added[source]) [R, n, K]; of each of the first `num_rotated` heads the pairs
    (y[i], y[i + K / 2]) are rotated by their angle, the other heads pass.

    cos, sin [R, K / 2]; source int64 [R], each row once.
    """
    token = None if added_SC is None else added_SC.token
    return _RotatedHeads.apply(x_RC, token, cos_RK, sin_RK, num_rotated, added_SC, source_R)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RC, token, cos_RK, sin_RK, num_rotated, added_SC, source_R):
        ctx.num_rotated, ctx.added = num_rotated, added_SC
        ctx.save_for_backward(cos_RK, sin_RK, source_R)
        rotate = kernels("heads").rotate if use_kernels(x_RC) else rotate_torch
        added = None if added_SC is None else added_SC.value
        return rotate(x_RC, cos_RK, sin_RK, num_rotated, added, source_R)

    @staticmethod
    def backward(ctx, grad_RnK):
        cos_RK, sin_RK, source_R = ctx.saved_tensors
        unrotate = kernels("heads").unrotate if use_kernels(grad_RnK) else unrotate_torch
        trained = ctx.added is not None and ctx.added.trained
        sums = ctx.added.gradient() if trained else None
        grad_RC = unrotate(grad_RnK, cos_RK, sin_RK, ctx.num_rotated, sums, source_R)
        return grad_RC, None, None, None, None, None, None


def rotate_torch(x_RC, cos_RK, sin_RK, num_rotated, added_SC, source_R):
    if added_SC is not None:
        x_RC = x_RC + added_SC.index_select(0, source_R)
    return _turn(x_RC.view(len(x_RC), -1, 2 * cos_RK.shape[-1]), cos_RK, sin_RK, num_rotated)


def unrotate_torch(grad_RnK, cos_RK, sin_RK, num_rotated, sums_SC, source_R):
    """The gradient to x [R, n K]; it is added to sums[source] too."""
    grad_RC = _turn(grad_RnK, cos_RK, -sin_RK, num_rotated).flatten(1)
    if sums_SC is not None:
        sums_SC.index_add_(0, source_R, grad_RC)
    return grad_RC


def _turn(x_RnK, cos_RK, sin_RK, num_rotated):
    a, b = x_RnK[:, :num_rotated].chunk(2, -1)
    cos, sin = cos_RK[:, None], sin_RK[:, None]
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, x_RnK[:, num_rotated:]], 1)
