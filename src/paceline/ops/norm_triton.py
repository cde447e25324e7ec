"""The CUDA kernels of `norm`: one read of each row forward, one more backward."""

import torch
import triton
import triton.language as tl

# Programs of the backward pass where a gain is trained: each sums its rows' share of the gain's
# gradient in registers. Enough of them to hide each other's waiting for memory.
_BACKWARD_PROGRAMS = 1056


@triton.jit
def _forward(
    x, weight, out, scales, width, stride, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value *= scale
    if HAS_WEIGHT:
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    grad, added, x, weight, scales, out, weight_sums, num_rows, width, stride,
    HAS_WEIGHT: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.cdiv(num_rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + i * tl.num_programs(0)
        at = row.to(tl.int64) * width + column
        scale = tl.load(scales + row)
        normed = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
        normed = normed.to(tl.float32) * scale
        upper = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weight_sum += upper * normed
        upper *= gain
        value = scale * (upper - normed * (tl.sum(upper * normed, 0) / width))
        if HAS_ADDED:
            value += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_sums + tl.program_id(0) * width + column, weight_sum, mask=inside)


def scale_rows(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm`."""
    x = _side_by_side(x)
    num_rows, width = x.shape
    out, scales = x.new_empty(x.shape), x.new_empty(num_rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    if num_rows:
        _forward[(num_rows,)](
            x, weight, out, scales, width, x.stride(0), eps, HAS_WEIGHT=weight is not None,
            BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return out, scales


def scale_rows_backward(
    grad: torch.Tensor,
    added: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `norm`."""
    x = _side_by_side(x)
    num_rows, width = x.shape
    out = x.new_empty(x.shape)
    programs = num_rows if weight is None else min(_BACKWARD_PROGRAMS, num_rows)
    sums = x.new_empty(0 if weight is None else programs, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    if num_rows:
        _backward[(programs,)](
            grad.contiguous(), None if added is None else added.contiguous(), x, weight, scales,
            out, sums, num_rows, width, x.stride(0), HAS_WEIGHT=weight is not None,
            HAS_ADDED=added is not None, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return out, None if weight is None else sums.sum(0).to(weight.dtype)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _num_warps(block: int) -> int:
    return min(max(block // 256, 1), 16)
