"""The CUDA kernel of `adamw`."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _adamw(
    weight, gradient, first, second, copy, scale, count, rate, beta1, beta2, eps, decay,
    correction1, correction2, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Neither infinity nor NaN is below the largest number.
    inside = at < tl.where(tl.abs(factor) <= 3.4e38, count, 0)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * factor
    w = tl.load(weight + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0.0)
    v = tl.load(second + at, mask=inside, other=0.0)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * (1.0 - rate * decay) - rate * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(weight + at, w, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    if HAS_COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def adamw_(weight, gradient, first, second, copy, scale, step) -> None:
    """All contiguous, on one CUDA device; see `adamw`."""
    count = weight.numel()
    if not count:
        return
    beta1, beta2 = step.betas
    with torch.no_grad():
        _adamw[(triton.cdiv(count, _BLOCK),)](
            weight, gradient.contiguous(), first, second, copy, scale, count, step.rate, beta1,
            beta2, step.eps, step.weight_decay, 1.0 - beta1**step.number,
            1.0 - beta2**step.number, HAS_COPY=copy is not None, BLOCK=_BLOCK,
        )  # fmt: skip
