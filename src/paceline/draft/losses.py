"""Losses of the training-time test, over chunks of teacher positions.

No tensor of [rows, vocabulary] outlives a chunk: the states of all steps are made first, then for
each chunk of teacher positions the teacher's logits are made once, every student row that this
teacher position supervises (any step) is scored, its gradient is made at once, and all is dropped.
Legend: M teacher positions, N student rows over all steps, R rows of a step, E draft width, V
target vocabulary, W draft vocabulary, S TTT steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from paceline.draft.batch import PackedBatch, TaughtStep, taught_steps
from paceline.draft.model import Draft
from paceline.draft.objectives import OBJECTIVES, Objective
from paceline.draft.unroll import Unroll
from paceline.ops import distil

TeacherLogits = Callable[[torch.Tensor], torch.Tensor]  # last [C, D] -> logits [C, W or V]


@dataclass(frozen=True)
class Teacher:
    """The target's norm and head. logits: over the draft vocabulary, or where `columns` (int64 [W],
    ids of the draft vocabulary) is given, over the target's whole vocabulary. temperature: of the
    softmax that is taught."""

    logits: TeacherLogits
    columns: torch.Tensor | None = None
    temperature: float = 1.0

    def rows(self, last_CD: torch.Tensor) -> distil.Teacher:
        logits = self.logits(last_CD)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.columns is None:
            return distil.teacher_rows(logits)
        whole = distil.log_sum_exp(logits)
        logits = logits.index_select(1, self.columns)
        return distil.teacher_rows(logits, distil.log_sum_exp(logits) - whole)


@dataclass
class StepSums:
    """Sums over the rows of each TTT step, for logs: [S] each, detached.

    rows: how many; loss: of the objective; kl: nats; agree: student and teacher have the same most
    likely token; overlap: sum of min(p, q), the chance that a sampled draft token is accepted.
    """

    rows: torch.Tensor
    loss: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    overlap: torch.Tensor

    def add(self, other: "StepSums") -> "StepSums":
        return StepSums(*(self.stacked() + other.stacked()))

    def stacked(self) -> torch.Tensor:
        """[5, S], in the order of the fields."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])


def unroll_states(
    draft: Draft, batch: PackedBatch, num_steps: int
) -> tuple[list[torch.Tensor], list[TaughtStep]]:
    """Residual streams [R, E] of every TTT step that has rows, and those rows.

    The draft reads the true tokens (teacher forcing) and its own states.
    """
    steps = taught_steps(batch, num_steps)
    unroll = Unroll(draft, batch.aux, batch.next_ids, batch.positions, batch.starts)
    states = [unroll.first(steps[0].keep)] if steps else []
    states += [unroll.next_taught(step.source, step.keep) for step in steps[1:]]
    return states, steps


def distillation_loss(
    draft: Draft,
    batch: PackedBatch,
    teacher: Teacher,
    num_steps: int,
    step_decay: float,
    num_rows: int,
    chunk: int,
    objective: str = "kl",
) -> tuple[torch.Tensor, StepSums]:
    """Sum over steps j of decay^j * (sum of the objective over the rows of step j) / num_rows.

    num_rows: rows supervised at step 0 in the whole optimiser step, over all ranks and accumulation
    steps. chunk: teacher positions whose logits are in memory at a time.
    Returns the loss (a scalar of float32 at least, differentiable once; where gradients are off
    none are made) and the sums per step. Of a batch without such rows, as a rank may get it, loss
    and gradients are zero.
    """
    if not batch.num_supervised_rows:
        return _nothing_taught(draft, num_steps)
    states, steps = unroll_states(draft, batch, num_steps)
    plan = _Plan(
        teacher=teacher,
        objective=OBJECTIVES[objective],
        steps=steps,
        weights=[step_decay**j / num_rows for j in range(num_steps)],
        chunk=chunk,
        learns=torch.is_grad_enabled(),
    )
    normed = [draft.norm(state) for state in states]
    loss, sums = _Distillation.apply(draft.lm_head.weight, batch.last, plan, *normed)
    sizes = [len(step.teacher) for step in steps] + [0] * (num_steps - len(steps))
    counts = torch.tensor(sizes, dtype=torch.float32).to(sums.device, non_blocking=True)
    return loss, StepSums(counts, *sums)


def _nothing_taught(draft: Draft, num_steps: int) -> tuple[torch.Tensor, StepSums]:
    """A loss that every trained weight is part of, with none of its values: ranks that meet at the
    gradients need all of them."""
    trained = [weight.flatten()[:0].sum() for weight in draft.parameters() if weight.requires_grad]
    loss = torch.stack(trained).sum(dtype=torch.promote_types(trained[0].dtype, torch.float32))
    zeros = torch.zeros(len(fields(StepSums)), num_steps, dtype=loss.dtype, device=loss.device)
    return loss, StepSums(*zeros)


@dataclass(frozen=True)
class _Plan:
    teacher: Teacher
    objective: Objective
    steps: Sequence[TaughtStep]
    weights: list[float]
    chunk: int
    learns: bool


class _Distillation(torch.autograd.Function):
    """The loss and, in the same pass, its gradients to the normed states and the head."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        head_WE: torch.Tensor,
        last_MD: torch.Tensor,
        plan: _Plan,
        *normed_RE: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.promote_types(head_WE.dtype, torch.float32)
        # A weight's gradient is a sum over all rows, so it is added up in float32.
        trains_head = plan.learns and ctx.needs_input_grad[0]
        grad_WE = torch.zeros_like(head_WE, dtype=exact) if trains_head else None
        grads_RE = [torch.empty_like(states) for states in normed_RE if plan.learns]
        sums = torch.zeros(4, len(plan.weights), dtype=exact, device=head_WE.device)
        for low in range(0, len(last_MD), plan.chunk):
            taught = None
            for number, step in enumerate(plan.steps):
                part = _rows_between(step.host_teacher, low, low + plan.chunk)
                if part.stop == part.start:
                    continue
                if taught is None:
                    taught = plan.teacher.rows(last_MD[low : low + plan.chunk])
                states = normed_RE[number][part]
                scores = taught.score(states @ head_WE.T, step.teacher[part] - low)
                sums[:, number] += _sums(plan.objective, scores)
                if not plan.learns:
                    continue
                grad_RW = _gradient(plan.objective, scores, plan.weights[number])
                torch.mm(grad_RW, head_WE, out=grads_RE[number][part])
                if grad_WE is not None:
                    _add_product(grad_WE, grad_RW, states)
        ctx.save_for_backward(grad_WE, *grads_RE)
        ctx.dtype = head_WE.dtype
        weights = torch.tensor(plan.weights, dtype=exact).to(sums.device, non_blocking=True)
        ctx.mark_non_differentiable(sums)
        return (sums[0] * weights).sum(), sums

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_WE, *grads_RE = ctx.saved_tensors
        head = None if grad_WE is None else (grad_WE * grad_loss).to(ctx.dtype)
        return head, None, None, *(grad * grad_loss.to(grad.dtype) for grad in grads_RE)


def _rows_between(teacher: np.ndarray, low: int, high: int) -> slice:
    """The rows whose teacher position is in [low, high); teacher ascends."""
    return slice(*np.searchsorted(teacher, [low, high]).tolist())


def _sums(objective: Objective, scores: distil.Scores) -> torch.Tensor:
    """[loss, kl, agree, overlap] over the rows."""
    loss = objective.value(scores.kl, scores.accepted)
    return torch.stack([loss, scores.kl, scores.agree, scores.accepted]).sum(1)


def _gradient(objective: Objective, scores: distil.Scores, weight: float) -> torch.Tensor:
    by_kl, by_accepted = objective.slopes(scores.kl, scores.accepted)
    scaled = None if by_accepted is None else by_accepted * weight
    return scores.gradient(by_kl * weight, scaled)


def _add_product(sum_WE: torch.Tensor, grad_RW: torch.Tensor, states_RE: torch.Tensor) -> None:
    """sum += grad^T states, where the sum may be of a wider dtype."""
    if sum_WE.dtype == states_RE.dtype:
        sum_WE.addmm_(grad_RW.T, states_RE)
    elif sum_WE.is_cuda:
        torch.addmm(sum_WE, grad_RW.T, states_RE, out_dtype=sum_WE.dtype, out=sum_WE)
    else:
        sum_WE += grad_RW.T @ states_RE
