"""Losses of the training-time test, over chunks of teacher positions.

No tensor of [rows, vocabulary] outlives a chunk: the states of all steps are made first, then for
each chunk of teacher positions the teacher's logits are made once, every student row that this
teacher position supervises (any step) is scored, its gradient is made at once, and all is dropped.
Legend: M teacher positions, N student rows over all steps, E draft width, W draft vocabulary, S
TTT steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.draft.batch import PackedBatch
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll

Teacher = Callable[[torch.Tensor], torch.Tensor]  # last [C, D] -> logits [C, W]


@dataclass(frozen=True)
class StudentRows:
    """All student rows of a batch, step after step. teacher int64 [N]: each row's teacher position,
    ascending within a step; sizes: rows of each step."""

    teacher: torch.Tensor
    sizes: tuple[int, ...]

    def chunk(self, low: int, high: int) -> list[slice]:
        """For each step, the rows whose teacher position is in [low, high)."""
        slices, offset = [], 0
        borders = torch.tensor([low, high], device=self.teacher.device)
        for size in self.sizes:
            found = torch.searchsorted(self.teacher[offset : offset + size], borders).tolist()
            slices.append(slice(offset + found[0], offset + found[1]))
            offset += size
        return slices


@dataclass
class StepSums:
    """Sums over the rows of each TTT step: float64-safe pieces for logs, [S] each, detached.

    rows: how many; kl: nats; agree: student and teacher have the same most likely token; overlap:
    sum of min(p, q), the chance that a sampled draft token is accepted.
    """

    rows: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    overlap: torch.Tensor

    def add(self, other: "StepSums") -> "StepSums":
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("rows", "kl", "agree", "overlap"))
        return StepSums(*(a + b for a, b in pairs))


def unroll_states(
    draft: Draft, batch: PackedBatch, num_steps: int
) -> tuple[list[torch.Tensor], StudentRows]:
    """Residual streams of every TTT step, and which teacher position each row meets.

    The draft reads the true tokens (teacher forcing) and its own states.
    """
    unroll = Unroll(draft, batch.aux, batch.next_ids, batch.positions, batch.starts)
    rows = batch.supervised_rows(0)
    states = [unroll.first(rows)]
    teachers = [batch.teacher_rows(rows, 0)]
    for step in range(1, num_steps):
        keep = torch.nonzero(batch.run_length[rows] > step).squeeze(1)
        if not len(keep):
            break
        rows = rows[keep]
        states.append(unroll.next(batch.read_ids(rows, step), keep))
        teachers.append(batch.teacher_rows(rows, step))
    return states, StudentRows(torch.cat(teachers), tuple(len(t) for t in teachers))


def distillation_loss(
    draft: Draft,
    batch: PackedBatch,
    teacher: Teacher,
    num_steps: int,
    step_decay: float,
    num_rows: int,
    chunk: int,
) -> tuple[torch.Tensor, StepSums]:
    """Sum over steps j of decay^j * (sum over the rows of step j of KL(teacher, draft)) / num_rows.

    num_rows: rows supervised at step 0 in the whole optimiser step, over all ranks and accumulation
    steps. The teacher's softmax is renormalised on the draft vocabulary. Returns the loss (float32
    scalar, differentiable once) and the sums per step.
    """
    states, rows = unroll_states(draft, batch, num_steps)
    weights = [step_decay**j / num_rows for j in range(len(states))]
    normed = draft.norm(torch.cat(states))
    loss, kl, agree, overlap = _ChunkedKL.apply(
        normed, draft.lm_head.weight, batch.last, teacher, rows, weights, chunk
    )
    missing = num_steps - len(states)
    pad = lambda sums: torch.nn.functional.pad(sums, (0, missing))
    counts = torch.tensor([*rows.sizes, *[0] * missing], dtype=torch.float32, device=kl.device)
    return loss, StepSums(counts, pad(kl), pad(agree), pad(overlap))


class _ChunkedKL(torch.autograd.Function):
    """Forward KL and, in the same pass, its gradients to the normed states and the head."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        normed_NE: torch.Tensor,
        head_WE: torch.Tensor,
        last_MD: torch.Tensor,
        teacher: Teacher,
        rows: StudentRows,
        weights: list[float],
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        train_head = ctx.needs_input_grad[1]
        grad_NE = torch.zeros_like(normed_NE)
        exact = torch.promote_types(head_WE.dtype, torch.float32)
        grad_WE = torch.zeros_like(head_WE, dtype=exact) if train_head else None
        sums = torch.zeros(3, len(weights), dtype=exact, device=normed_NE.device)
        for low in range(0, len(last_MD), chunk):
            high = min(low + chunk, len(last_MD))
            slices = rows.chunk(low, high)
            if not any(s.stop > s.start for s in slices):
                continue
            taught = _TaughtRows.of(teacher(last_MD[low:high]))
            for step, part in enumerate(slices):
                if part.stop == part.start:
                    continue
                states = normed_NE[part]
                log_q = _log_softmax(states @ head_WE.T)
                grad, step_sums = _kl_and_gradient(taught.pick(rows.teacher[part] - low), log_q)
                sums[:, step] += step_sums
                grad = (grad * weights[step]).to(head_WE.dtype)
                grad_NE[part] = grad @ head_WE
                if grad_WE is not None:
                    grad_WE += grad.T @ states
        ctx.save_for_backward(grad_NE, grad_WE)
        kl, agree, overlap = sums
        loss = (kl * torch.tensor(weights, dtype=kl.dtype, device=kl.device)).sum()
        ctx.mark_non_differentiable(kl, agree, overlap)
        return loss, kl, agree, overlap

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_NE, grad_WE = ctx.saved_tensors
        head = None if grad_WE is None else (grad_WE * grad_loss).to(grad_NE.dtype)
        return grad_NE * grad_loss.to(grad_NE.dtype), head, None, None, None, None, None


@dataclass(frozen=True)
class _TaughtRows:
    """What a teacher position says, made once for all steps that it teaches: p and log p [C, W],
    the most likely token [C]."""

    p: torch.Tensor
    log_p: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> "_TaughtRows":
        log_p = _log_softmax(logits)
        # Finite, so that p log p is 0 at p = 0, not 0 * -inf.
        log_p.clamp_(min=torch.finfo(torch.float32).min)
        return cls(log_p.exp(), log_p, log_p.argmax(-1))

    def pick(self, rows: torch.Tensor) -> "_TaughtRows":
        return _TaughtRows(self.p[rows], self.log_p[rows], self.best[rows])


def _kl_and_gradient(taught: _TaughtRows, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of KL(p || q) to the logits of q (it is q - p), and [KL, agreements, overlap]."""
    agree = (taught.best == log_q.argmax(-1)).sum()
    # Term by term: a difference of two large sums would lose the digits of a small KL.
    kl = (taught.p * (taught.log_p - log_q)).sum()
    q = log_q.exp_()
    overlap = torch.minimum(taught.p, q).sum()
    return q.sub_(taught.p), torch.stack([kl, agree.to(kl.dtype), overlap])


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In float32 at least: half precision has too few bits for probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
