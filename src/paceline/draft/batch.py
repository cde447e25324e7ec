"""Packed documents: which rows the draft unrolls, what they read and which teacher row they meet.

Documents lie one after the other, none is padded. Legend: T rows with auxiliary states over all
documents, N tokens over all documents, M supervised tokens (rows of `last`), A auxiliary states,
D target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Protocol, Self

import numpy as np
import torch

from paceline.device import moved_together


class Document(Protocol):
    """What a batch is packed from; `store.StoredSample` is one."""

    input_ids: np.ndarray | torch.Tensor
    loss_mask: np.ndarray | torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


class PackedDocuments(Protocol):
    """Documents one after the other; `store.PackedSamples` is one.

    input_ids int32 [N] and loss_mask bool [N] on the CPU; aux [T, A, D], last [M, D] on any device;
    token_starts, aux_starts: where each document's tokens and rows begin, and the end.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    token_starts: Sequence[int]
    aux_starts: Sequence[int]


@dataclass(frozen=True)
class PackedBatch:
    """aux [T, A, D]; last [M, D]; all others int64.

    tokens [N]; token_of_row [T]: where a row's own token lies in `tokens`; positions [T]: place in
    the document; starts [T]: first row of the row's document.
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
    run_length: torch.Tensor
    teacher_of_token: torch.Tensor
    supervised: "SupervisedRows"

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Self:
        """All tensors on a device; the states in `dtype` (ids and indices stay int64)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        # Changed after the copy: the host would be slow at it, and wider states take longer to go.
        states = {
            name: tensors.pop(name).to(device, non_blocking=True).to(dtype)
            for name in ("aux", "last")
        }
        moved = moved_together(list(tensors.values()), torch.device(device))
        return replace(self, **states, **dict(zip(tensors, moved, strict=True)))

    @property
    def next_ids(self) -> torch.Tensor:
        """The token after each row, int64 [T]."""
        return self.tokens[self.token_of_row + 1]

    def supervised_rows(self, step: int) -> torch.Tensor:
        """Rows supervised at a TTT step, ascending."""
        return torch.nonzero(self.run_length > step).squeeze(1)

    @property
    def num_supervised_rows(self) -> int:
        return len(self.supervised.rows)

    def read_ids(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The token whose embedding rows read at a TTT step: p + 1 + step."""
        return self.tokens[self.token_of_row[rows] + 1 + step]

    def teacher_rows(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The row of `last` that teaches rows at a TTT step: position p + 1 + step."""
        return self.teacher_of_token[self.token_of_row[rows] + 1 + step]


@dataclass(frozen=True)
class SupervisedRows:
    """What the host knows of the R rows supervised at step 0, so that no step asks the device.

    rows int64 [R]: which of the T rows, ascending; run_length int64 [R]; teacher int64 [R]: the row
    of `last` that teaches each at step 0. Supervised tokens of a run are neighbours, in the
    document and in `last`: step j reads and is taught one further on than step j - 1.
    """

    rows: np.ndarray
    run_length: np.ndarray
    teacher: np.ndarray


@dataclass(frozen=True)
class TaughtStep:
    """The rows of one TTT step, R of them, ascending. On the device of the arithmetic, int64:

    keep [R]: which rows of the step before (of all T at step 0) they are, None for all; source [R]:
    the row of step 0 whose token they read; teacher [R]: the row of `last` that teaches them.
    host_teacher: the same on the host.
    """

    keep: torch.Tensor | None
    source: torch.Tensor
    teacher: torch.Tensor
    host_teacher: np.ndarray


def taught_steps(batch: PackedBatch, num_steps: int) -> list[TaughtStep]:
    """The TTT steps that have rows, at most num_steps: all indices in one copy to the device."""
    supervised = batch.supervised
    before, steps = np.arange(len(batch.positions)), []
    for step in range(num_steps):
        chosen = np.flatnonzero(supervised.run_length > step)
        if not len(chosen):
            break
        rows = supervised.rows[chosen]
        steps.append(
            (np.searchsorted(before, rows), chosen + step, supervised.teacher[chosen] + step)
        )
        before = rows
    host = [torch.from_numpy(part) for step in steps for part in step]
    parts = moved_together(host, batch.aux.device)
    taught, num_before = [], len(batch.positions)
    for number, (keep, _, teacher) in enumerate(steps):
        kept, source, device_teacher = parts[3 * number : 3 * number + 3]
        everything = len(keep) == num_before
        taught.append(TaughtStep(None if everything else kept, source, device_teacher, teacher))
        num_before = len(keep)
    return taught


@dataclass(frozen=True)
class _Joined:
    """Implements PackedDocuments."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    token_starts: Sequence[int]
    aux_starts: Sequence[int]


def pack(documents: Sequence[Document]) -> PackedBatch:
    """Pack documents; their aux rows may end early (at the last supervised position but one)."""
    join = lambda tensors: torch.cat([torch.as_tensor(t) for t in tensors])
    return from_packed(
        _Joined(
            input_ids=join(d.input_ids for d in documents),
            loss_mask=join(d.loss_mask for d in documents),
            aux=join(d.aux for d in documents),
            last=join(d.last for d in documents),
            token_starts=[0, *accumulate(len(d.input_ids) for d in documents)],
            aux_starts=[0, *accumulate(len(d.aux) for d in documents)],
        )
    )


def from_packed(documents: PackedDocuments) -> PackedBatch:
    """The batch of documents that lie one after the other; the states are not copied."""
    token_starts, row_starts = map(np.asarray, (documents.token_starts, documents.aux_starts))
    document = np.repeat(np.arange(len(row_starts) - 1), np.diff(row_starts))
    starts = row_starts[document]
    positions = np.arange(len(document)) - starts
    token_of_row = token_starts[document] + positions
    mask = documents.loss_mask.numpy()
    # A run of supervised tokens ends at the next unsupervised one, or with its document.
    gaps = np.append(np.flatnonzero(~mask), len(mask))
    next_gap = gaps[np.searchsorted(gaps, token_of_row + 1)]
    run_end = np.minimum(next_gap, token_starts[document + 1])
    run_length = run_end - (token_of_row + 1)
    teacher_of_token = np.where(mask, np.cumsum(mask) - 1, -1)
    rows = np.flatnonzero(run_length > 0)
    long = lambda values: torch.from_numpy(values.astype(np.int64))
    return PackedBatch(
        aux=documents.aux,
        last=documents.last,
        tokens=documents.input_ids.long(),
        token_of_row=long(token_of_row),
        positions=long(positions),
        starts=long(starts),
        run_length=long(run_length),
        teacher_of_token=long(teacher_of_token),
        supervised=SupervisedRows(rows, run_length[rows], teacher_of_token[token_of_row[rows] + 1]),
    )
