"""Long samples: cut at a token limit, whole answers kept where possible, never without a target."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cut:
    """Where a sample ends: `num_tokens` of it are kept."""

    num_tokens: int
    supervised_lost: int


def has_target(loss_mask: np.ndarray) -> bool:
    """Whether anything can be learnt: a draft step at row p needs a supervised token at p + 1."""
    return bool(loss_mask[1:].any())


def cut(loss_mask: np.ndarray, max_length: int) -> Cut | None:
    """Where to cut loss_mask [T] so that at most max_length tokens stay; None: nothing to learn.

    The cut is at max_length. Where that would break a supervised span, it is the end of the last
    span that fits whole; where none does, the first is cut through at max_length. The beginning is
    never cut: an answer is supervised in the context in which it was written or not at all.
    """
    total = len(loss_mask)
    if total <= max_length:
        return Cut(total, 0)
    kept = loss_mask[:max_length]
    if not has_target(kept):
        return None
    length = max_length
    if loss_mask[max_length - 1] and loss_mask[max_length]:
        start_of_last = int(max_length - np.argmin(kept[::-1])) if not kept.all() else 0
        if has_target(kept[:start_of_last]):
            # What lies between the last whole span and the broken one teaches nothing.
            length = int(np.flatnonzero(kept[:start_of_last])[-1]) + 1
    return Cut(length, int(loss_mask[length:].sum()))
