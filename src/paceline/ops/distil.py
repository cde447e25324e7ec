"""What a student's logits say beside a teacher's, and the gradient of a loss of it.

Every loss here is a function of two numbers of a row: KL(p || q) of the teacher's p renormalised on
the draft vocabulary, and the acceptance probability a = sum_i min(m p_i, q_i), where m is the share
of the target's whole softmax that lies in the draft vocabulary (1 where it is not asked for).
Legend: C student rows of a chunk, M teacher positions of it, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.ops.kernels import kernels, use_kernels


class Scores(Protocol):
    """kl float32 [C] (nats); accepted float32 [C], the acceptance probability; agree float32 [C], 1
    where both have the same most likely token. At least float32."""

    kl: torch.Tensor
    accepted: torch.Tensor
    agree: torch.Tensor

    def gradient(self, by_kl: torch.Tensor, by_accepted: torch.Tensor | None) -> torch.Tensor:
        """Gradient to the student's logits [C, W], in their dtype, of a sum over the rows whose
        derivatives by kl and by accepted are given, float32 [C] each; None for 0. Called once."""


class Teacher(Protocol):
    """Teacher positions, made once for all the student rows that they teach."""

    def score(self, student_CW: torch.Tensor, taught_by_C: torch.Tensor) -> Scores:
        """taught_by int64 [C]: each row's teacher position. The logits may be overwritten."""


def teacher_rows(logits_MW: torch.Tensor, log_mass_M: torch.Tensor | None = None) -> Teacher:
    """logits: the target's, over the draft vocabulary. log_mass [M]: log m; None for m = 1."""
    if use_kernels(logits_MW):
        return kernels("distil").TritonTeacher(logits_MW, log_mass_M)
    return TorchTeacher(logits_MW, log_mass_M)


def log_sum_exp(logits_MV: torch.Tensor) -> torch.Tensor:
    """[M], in float32 at least."""
    if use_kernels(logits_MV):
        return kernels("distil").row_peaks(logits_MV)[0]
    return torch.logsumexp(_exact(logits_MV), -1)


class TorchTeacher:
    """The twin; any device and dtype."""

    def __init__(self, logits_MW: torch.Tensor, log_mass_M: torch.Tensor | None) -> None:
        log_p = _exact(logits_MW).log_softmax(-1)
        # Finite, so that p log p is 0 at p = 0, not 0 * -inf.
        self._log_p = log_p.clamp_(min=torch.finfo(torch.float32).min)
        self._p = log_p.exp()
        self._best = log_p.argmax(-1)
        self._mass = None if log_mass_M is None else log_mass_M.exp()[:, None]

    def score(self, student_CW: torch.Tensor, taught_by_C: torch.Tensor) -> "TorchScores":
        log_q = _exact(student_CW).log_softmax(-1)
        p = self._p[taught_by_C]
        agree = (self._best[taught_by_C] == log_q.argmax(-1)).to(log_q.dtype)
        # Term by term: a difference of two large sums would lose the digits of a small KL.
        kl = (p * (self._log_p[taught_by_C] - log_q)).sum(-1)
        q = log_q.exp_()
        whole_p = p if self._mass is None else p * self._mass[taught_by_C]
        accepted = torch.minimum(whole_p, q).sum(-1)
        return TorchScores(kl, accepted, agree, p, whole_p, q, student_CW.dtype)


@dataclass
class TorchScores:
    kl: torch.Tensor
    accepted: torch.Tensor
    agree: torch.Tensor
    _p: torch.Tensor
    _whole_p: torch.Tensor
    _q: torch.Tensor
    _dtype: torch.dtype

    def gradient(self, by_kl: torch.Tensor, by_accepted: torch.Tensor | None) -> torch.Tensor:
        grad = by_kl[:, None] * (self._q - self._p)
        if by_accepted is not None:
            # d a / d logit_k = q_k ([q_k < p_k] - sum of q where q < p)
            below = self._q.where(self._q < self._whole_p, 0.0)
            grad += by_accepted[:, None] * (below - self._q * below.sum(-1, keepdim=True))
        return grad.to(self._dtype)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    """Half precision has too few bits for probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
