"""The CUDA kernels of `distil`: a row's second read comes out of the cache, nothing of a row's
width is written but the gradient, over the logits."""

import torch
import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _peak_and_sum(row, width, BLOCK: tl.constexpr):
    """Largest logit and log of the sum of exp, by one pass with a running peak in each lane."""
    peak = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(row + column, mask=column < width, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, value)
        total = total * tl.exp(peak - new_peak) + tl.exp(value - new_peak)
        peak = new_peak
    highest = tl.max(peak, 0)
    return highest, highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))


@triton.jit
def _row_peaks(logits, lse, best, width, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    highest, log_sum = _peak_and_sum(row, width, BLOCK)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(row + column, mask=column < width, other=float("-inf")).to(tl.float32)
        where = tl.minimum(where, tl.where(value == highest, column, 2147483647))
    tl.store(lse + index, log_sum)
    tl.store(best + index, tl.min(where, 0))


@triton.jit
def _scores(
    student, teacher, taught_by, teacher_lse, teacher_best, log_mass, lse, kl, accepted, agree,
    below, width, stride, teacher_stride, HAS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = student + index * stride
    position = tl.load(taught_by + index)
    teacher_row = teacher + position * teacher_stride
    p_lse = tl.load(teacher_lse + position)
    mass = 1.0
    if HAS_MASS:
        mass = tl.exp(tl.load(log_mass + position))
    highest, q_lse = _peak_and_sum(row, width, BLOCK)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    least_sum = tl.zeros([BLOCK], tl.float32)
    below_sum = tl.zeros([BLOCK], tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(row + column, mask=inside, other=_LOWEST).to(tl.float32)
        log_p = tl.load(teacher_row + column, mask=inside, other=_LOWEST).to(tl.float32) - p_lse
        log_q = value - q_lse
        # Finite, so that p log p is 0 at p = 0, not 0 * -inf.
        log_p = tl.maximum(log_p, _LOWEST)
        p = tl.exp(log_p)
        q = tl.exp(log_q)
        kl_sum += tl.where(p > 0, p * (log_p - log_q), 0.0)
        whole_p = p * mass
        least_sum += tl.minimum(whole_p, q)
        below_sum += tl.where(q < whole_p, q, 0.0)
        where = tl.minimum(where, tl.where(value == highest, column, 2147483647))
    tl.store(lse + index, q_lse)
    tl.store(kl + index, tl.sum(kl_sum, 0))
    tl.store(accepted + index, tl.sum(least_sum, 0))
    tl.store(below + index, tl.sum(below_sum, 0))
    tl.store(agree + index, (tl.min(where, 0) == tl.load(teacher_best + position)).to(tl.float32))


@triton.jit
def _gradient(
    student, teacher, taught_by, teacher_lse, log_mass, lse, below, by_kl, by_accepted, width,
    stride, teacher_stride, HAS_MASS: tl.constexpr, HAS_ACCEPTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = student + index * stride
    position = tl.load(taught_by + index)
    value = tl.load(row + column, mask=inside, other=_LOWEST).to(tl.float32)
    upper = tl.load(teacher + position * teacher_stride + column, mask=inside, other=_LOWEST)
    q = tl.exp(value - tl.load(lse + index))
    p = tl.exp(upper.to(tl.float32) - tl.load(teacher_lse + position))
    grad = tl.load(by_kl + index) * (q - p)
    if HAS_ACCEPTED:
        if HAS_MASS:
            p *= tl.exp(tl.load(log_mass + position))
        is_below = (q < p).to(tl.float32)
        grad += tl.load(by_accepted + index) * q * (is_below - tl.load(below + index))
    tl.store(row + column, grad.to(student.dtype.element_ty), mask=inside)


def row_peaks(logits_MV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the sum of exp, float32; most likely column, int32), [M] each."""
    lse = logits_MV.new_empty(len(logits_MV), dtype=torch.float32)
    best = logits_MV.new_empty(len(logits_MV), dtype=torch.int32)
    if len(logits_MV):
        _row_peaks[(len(logits_MV),)](
            logits_MV, lse, best, logits_MV.shape[1], logits_MV.stride(0),
            BLOCK=_block(logits_MV.shape[1]), num_warps=8,
        )  # fmt: skip
    return lse, best


class TritonTeacher:
    def __init__(self, logits_MW: torch.Tensor, log_mass_M: torch.Tensor | None) -> None:
        self.logits, self.log_mass = logits_MW, log_mass_M
        self.lse, self.best = row_peaks(logits_MW)

    def score(self, student_CW: torch.Tensor, taught_by_C: torch.Tensor) -> "TritonScores":
        return TritonScores(self, student_CW, taught_by_C)


class TritonScores:
    def __init__(
        self, teacher: TritonTeacher, student_CW: torch.Tensor, taught_by_C: torch.Tensor
    ) -> None:
        self._teacher, self._student, self._taught_by = teacher, student_CW, taught_by_C
        rows, width = student_CW.shape
        columns = student_CW.new_empty(5, rows, dtype=torch.float32)
        self._lse, self.kl, self.accepted, self.agree, self._below = columns
        if rows:
            _scores[(rows,)](
                student_CW, teacher.logits, taught_by_C, teacher.lse, teacher.best,
                teacher.log_mass, *columns, width, student_CW.stride(0), teacher.logits.stride(0),
                HAS_MASS=teacher.log_mass is not None, BLOCK=_block(width), num_warps=8,
            )  # fmt: skip

    def gradient(self, by_kl: torch.Tensor, by_accepted: torch.Tensor | None) -> torch.Tensor:
        teacher, student = self._teacher, self._student
        rows, width = student.shape
        block = _block(width)
        if rows:
            _gradient[(rows, triton.cdiv(width, block))](
                student, teacher.logits, self._taught_by, teacher.lse, teacher.log_mass, self._lse,
                self._below, by_kl, by_accepted, width, student.stride(0),
                teacher.logits.stride(0), HAS_MASS=teacher.log_mass is not None,
                HAS_ACCEPTED=by_accepted is not None, BLOCK=block, num_warps=8,
            )  # fmt: skip
        return student


def _block(width: int) -> int:
    # 8 columns a thread: with 16, registers leave room for one program on a multiprocessor.
    return min(triton.next_power_of_2(width), 2048)
