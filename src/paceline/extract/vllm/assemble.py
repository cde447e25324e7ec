"""Joins the rows of a sample over the steps that a chunked prompt takes. No vLLM, no threads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paceline.contracts import TokenSample
from paceline.errors import CaptureMismatch
from paceline.extract.engine import num_needed_tokens
from paceline.extract.guards import RowNorms
from paceline.extract.vllm.batch import Segment, prove
from paceline.extract.vllm.rows import HostRows, Pick


@dataclass(frozen=True)
class Rows:
    """Rows of one sample: aux [R, A, D], last [M, D] and their norms [R, A], [M]. A pipeline stage
    without auxiliary layers has A = 0, one without the last layer M = 0."""

    aux: torch.Tensor
    last: torch.Tensor
    aux_norms: torch.Tensor
    last_norms: torch.Tensor

    @property
    def norms(self) -> RowNorms:
        return RowNorms(self.aux_norms, self.last_norms)

    def part(self, aux: slice, last: slice) -> "Rows":
        return Rows(self.aux[aux], self.last[last], self.aux_norms[aux], self.last_norms[last])

    def empty(self, num_aux: int, num_last: int) -> "Rows":
        """Room for a whole sample whose first rows these are."""
        counts = (num_aux, num_last, num_aux, num_last)
        return Rows(
            *(t.new_empty((n, *t.shape[1:])) for n, t in zip(counts, self.all, strict=True))
        )

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return self.aux, self.last, self.aux_norms, self.last_norms


@dataclass(frozen=True)
class Complete:
    """A sample with all its rows: in the slot of the step that ran all of it, or joined in memory
    of their own."""

    number: int
    sample: TokenSample
    rows: Rows


@dataclass
class _Growing:
    rows: Rows
    num_tokens: int = 0
    num_aux: int = 0
    num_last: int = 0

    def append(self, stop: int, part: Rows) -> None:
        aux = slice(self.num_aux, self.num_aux + len(part.aux))
        last = slice(self.num_last, self.num_last + len(part.last))
        room = self.rows.part(aux, last)
        for target, source in zip(room.all, part.all, strict=True):
            target.copy_(source)
        self.num_tokens, self.num_aux, self.num_last = stop, aux.stop, last.stop


class Assembler:
    """Holds the samples that have rows but not all of them yet.

    has_last: whether the rows of the last layer come here (not on every pipeline stage).
    """

    def __init__(self, has_last: bool) -> None:
        self._has_last = has_last
        self._growing: dict[int, _Growing] = {}

    def __len__(self) -> int:
        return len(self._growing)

    def drop(self, number: int) -> None:
        self._growing.pop(number, None)

    def take(
        self,
        segments: list[Segment],
        pick: Pick,
        rows: HostRows,
        samples: dict[int, TokenSample],
        wanted: Callable[[int], bool],
    ) -> Iterator[Complete]:
        """Prove a step's segments against what the model was fed, then give what is complete.

        wanted: whether a sample (by number) is still asked for; the segments of others are passed
        over. Raises CaptureMismatch before anything is given: one wrong segment spoils the step.
        """
        tokens, positions = rows.tokens.numpy(), rows.positions.numpy()
        live = [wanted(segment.number) for segment in segments]
        for segment in (s for s, alive in zip(segments, live, strict=True) if alive):
            prove(segment, samples[segment.number], tokens, positions)
            self._check_contiguous(segment, samples[segment.number])
        whole = Rows(rows.aux, rows.last, rows.aux_norms, rows.last_norms)
        ends_aux, ends_last = np.cumsum(pick.aux_counts), np.cumsum(pick.last_counts)
        for i, segment in enumerate(segments):
            if not live[i]:
                continue
            aux = slice(ends_aux[i] - pick.aux_counts[i], ends_aux[i])
            last = slice(ends_last[i] - pick.last_counts[i], ends_last[i])
            complete = self._join(segment, samples[segment.number], whole.part(aux, last))
            if complete:
                yield complete

    def _check_contiguous(self, segment: Segment, sample: TokenSample) -> None:
        # A preempted request starts over: what it had computed is gone, in the engine and here.
        if segment.start == 0:
            return
        known = self._growing.get(segment.number)
        have = known.num_tokens if known else 0
        if have != segment.start:
            raise CaptureMismatch(
                f"sample {sample.sample_id}: {have} rows captured so far, the next ones are of "
                f"position {segment.start}: rows between were computed without being seen (a "
                "prefix cache?)"
            )

    def _join(self, segment: Segment, sample: TokenSample, part: Rows) -> Complete | None:
        number, needed = segment.number, num_needed_tokens(sample)
        if segment.start == 0:
            if segment.stop == needed:
                self.drop(number)
                return Complete(number, sample, part)
            num_last = sample.num_supervised if self._has_last else 0
            self._growing[number] = _Growing(part.empty(sample.num_aux_rows, num_last))
        growing = self._growing[number]
        growing.append(segment.stop, part)
        if segment.stop < needed:
            return None
        del self._growing[number]
        return Complete(number, sample, growing.rows)
