"""Joins the rows of a sample over the steps that a chunked prompt takes. No vLLM, no threads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paceline.contracts import TokenSample
from paceline.errors import CaptureMismatch
from paceline.extract.vllm.batch import Segment, num_needed_tokens, prove
from paceline.extract.vllm.rows import HostRows, Pick


@dataclass(frozen=True)
class Complete:
    """A sample with all its rows: aux [R, A, D], last [M, D] (None where another pipeline stage
    has it). `shared`: the rows lie in the step's slot, else in memory of their own."""

    number: int
    sample: TokenSample
    aux: torch.Tensor
    last: torch.Tensor | None
    shared: bool


@dataclass
class _Growing:
    aux: torch.Tensor
    last: torch.Tensor | None
    num_tokens: int = 0
    num_aux: int = 0
    num_last: int = 0

    def append(self, stop: int, aux: torch.Tensor, last: torch.Tensor | None) -> None:
        self.aux[self.num_aux : self.num_aux + len(aux)].copy_(aux)
        self.num_aux += len(aux)
        if last is not None and self.last is not None:
            self.last[self.num_last : self.num_last + len(last)].copy_(last)
            self.num_last += len(last)
        self.num_tokens = stop


class Assembler:
    """Holds the samples that have rows but not all of them yet."""

    def __init__(self) -> None:
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
        tokens, positions = _host(rows.tokens), _host(rows.positions)
        live = [wanted(segment.number) for segment in segments]
        for segment in (s for s, alive in zip(segments, live, strict=True) if alive):
            prove(segment, samples[segment.number], tokens, positions)
            self._check_contiguous(segment, samples[segment.number])
        ends_aux, ends_last = np.cumsum(pick.aux_counts), np.cumsum(pick.last_counts)
        for i, segment in enumerate(segments):
            if not live[i]:
                continue
            aux = rows.aux[ends_aux[i] - pick.aux_counts[i] : ends_aux[i]]
            last = rows.last
            if last is not None:
                last = last[ends_last[i] - pick.last_counts[i] : ends_last[i]]
            complete = self._join(segment, samples[segment.number], aux, last)
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

    def _join(
        self,
        segment: Segment,
        sample: TokenSample,
        aux: torch.Tensor,
        last: torch.Tensor | None,
    ) -> Complete | None:
        number, needed = segment.number, num_needed_tokens(sample)
        if segment.start == 0:
            if segment.stop == needed:
                self.drop(number)
                return Complete(number, sample, aux, last, shared=True)
            self._growing[number] = _Growing(
                aux.new_empty((sample.num_aux_rows, *aux.shape[1:]), device="cpu"),
                None if last is None else last.new_empty((sample.num_supervised, last.shape[1])),
            )
        growing = self._growing[number]
        growing.append(segment.stop, aux, last)
        if segment.stop < needed:
            return None
        del self._growing[number]
        return Complete(number, sample, growing.aux, growing.last, shared=False)


def _host(values: torch.Tensor) -> np.ndarray:
    return values.numpy()
