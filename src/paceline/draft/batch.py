"""Packed documents: which rows the draft unrolls, what they read and which teacher row they meet.

Documents lie one after the other, none is padded. Legend: T rows with auxiliary states over all
documents, N tokens over all documents, M supervised tokens (rows of `last`), A auxiliary states,
D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np
import torch


class Document(Protocol):
    """What a batch is packed from; `store.StoredSample` is one."""

    input_ids: np.ndarray | torch.Tensor
    loss_mask: np.ndarray | torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """aux [T, A, D]; last [M, D]; all others int64.

    tokens [N]; token_of_row [T]: where a row's own token lies in `tokens`; positions [T]: place in
    the document; starts [T]: first row of the row's document; document [T]: its number.
    run_length [T]: how many tokens right after the row's own are supervised, without a gap: the
    row is supervised at TTT step j iff run_length > j. teacher_of_token [N]: row of `last` of a
    supervised token (-1 elsewhere).
    """

    aux: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    token_of_row: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    document: torch.Tensor
    run_length: torch.Tensor
    teacher_of_token: torch.Tensor

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Self:
        """Everything on a device; the states in `dtype` (ids and indices stay int64)."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        moved["aux"], moved["last"] = moved["aux"].to(dtype), moved["last"].to(dtype)
        return replace(self, **moved)

    @property
    def next_ids(self) -> torch.Tensor:
        """The token after each row, int64 [T]."""
        return self.tokens[self.token_of_row + 1]

    def supervised_rows(self, step: int) -> torch.Tensor:
        """Rows supervised at a TTT step, ascending."""
        return torch.nonzero(self.run_length > step).squeeze(1)

    @property
    def num_supervised_rows(self) -> int:
        return int((self.run_length > 0).sum())

    def read_ids(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The token whose embedding rows read at a TTT step: p + 1 + step."""
        return self.tokens[self.token_of_row[rows] + 1 + step]

    def teacher_rows(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The row of `last` that teaches rows at a TTT step: position p + 1 + step."""
        return self.teacher_of_token[self.token_of_row[rows] + 1 + step]


def run_lengths(loss_mask: np.ndarray) -> np.ndarray:
    """How many supervised tokens follow each token without a gap: int64 [N].

    >>> run_lengths(np.array([0, 0, 1, 1, 0, 1], bool)).tolist()
    [0, 2, 1, 0, 1, 0]
    """
    lengths = np.zeros(len(loss_mask) + 1, np.int64)
    for i in range(len(loss_mask) - 1, -1, -1):
        lengths[i] = lengths[i + 1] + 1 if loss_mask[i] else 0
    return lengths[1:]


def pack(documents: Sequence[Document]) -> PackedBatch:
    """Pack documents; their aux rows may end early (at the last supervised position but one)."""
    rows = [len(d.aux) for d in documents]
    sizes = [len(d.input_ids) for d in documents]
    token_starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    row_starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
    masks = [np.asarray(d.loss_mask, dtype=bool) for d in documents]
    mask = np.concatenate(masks)
    teacher = np.where(mask, np.cumsum(mask) - 1, -1)
    positions = [np.arange(r) for r in rows]
    long = lambda parts: torch.from_numpy(np.concatenate(parts).astype(np.int64))
    return PackedBatch(
        aux=torch.cat([d.aux for d in documents]),
        last=torch.cat([d.last for d in documents]),
        tokens=long([np.asarray(d.input_ids) for d in documents]),
        token_of_row=long([s + p for s, p in zip(token_starts, positions, strict=True)]),
        positions=long(positions),
        starts=long([np.full(r, s) for r, s in zip(rows, row_starts, strict=True)]),
        document=long([np.full(r, i) for i, r in enumerate(rows)]),
        run_length=long([run_lengths(m)[:r] for m, r in zip(masks, rows, strict=True)]),
        teacher_of_token=torch.from_numpy(teacher.astype(np.int64)),
    )
