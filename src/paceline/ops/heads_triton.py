"""The CUDA kernel of `heads`: addition and rotation in one pass, both ways."""

import torch
import triton
import triton.language as tl


@triton.jit
def _turn_heads(
    x, cos, sin, other, source, out, stride, num_heads, num_rotated,
    HALF: tl.constexpr, BACKWARD: tl.constexpr, HAS_OTHER: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    column = head[:, None] * (2 * HALF) + pair[None, :]
    a = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride + column + HALF, mask=inside, other=0.0).to(tl.float32)
    width = num_heads * 2 * HALF
    if HAS_OTHER:
        shared = other + tl.load(source + row).to(tl.int64) * width + column
        other_a = tl.load(shared, mask=inside, other=0.0).to(tl.float32)
        other_b = tl.load(shared + HALF, mask=inside, other=0.0).to(tl.float32)
        if not BACKWARD:
            a += other_a
            b += other_b
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s = -s
    turned = (head < num_rotated)[:, None]
    new_a = tl.where(turned, a * c - b * s, a)
    new_b = tl.where(turned, b * c + a * s, b)
    kind = out.dtype.element_ty
    tl.store(out + row * width + column, new_a.to(kind), mask=inside)
    tl.store(out + row * width + column + HALF, new_b.to(kind), mask=inside)
    if HAS_OTHER and BACKWARD:
        # No other row of this launch has the same source.
        tl.store(shared, (other_a + new_a).to(other.dtype.element_ty), mask=inside)
        tl.store(shared + HALF, (other_b + new_b).to(other.dtype.element_ty), mask=inside)


def rotate(x_RC, cos_RK, sin_RK, num_rotated, added_SC, source_R):
    return _launch(x_RC, cos_RK, sin_RK, num_rotated, added_SC, source_R, backward=False)


def unrotate(grad_RnK, cos_RK, sin_RK, num_rotated, sums_SC, source_R):
    grad_RnK = grad_RnK.flatten(1)
    out = _launch(grad_RnK, cos_RK, sin_RK, num_rotated, sums_SC, source_R, backward=True)
    return out.flatten(1)


def _launch(x_RC, cos_RK, sin_RK, num_rotated, other_SC, source_R, backward):
    x_RC = x_RC if x_RC.stride(-1) == 1 else x_RC.contiguous()
    half = cos_RK.shape[-1]
    num_heads = x_RC.shape[1] // (2 * half)
    out = torch.empty(len(x_RC), num_heads, 2 * half, dtype=x_RC.dtype, device=x_RC.device)
    block = min(triton.next_power_of_2(num_heads), 16)
    if len(x_RC):
        _turn_heads[(len(x_RC), triton.cdiv(num_heads, block))](
            x_RC, cos_RK, sin_RK, other_SC, source_R, out, x_RC.stride(0), num_heads, num_rotated,
            HALF=half, BACKWARD=backward, HAS_OTHER=other_SC is not None,
            BLOCK_HEADS=block, BLOCK_HALF=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return out
