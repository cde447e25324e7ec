"""Which rows of a forward pass belong to which sample, and the proof of it.

Pure logic, no vLLM: a runner's module describes the batch, the proof compares that description
with what the model was fed. Legend: N rows of a step, Q requests in it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.contracts import TokenSample
from paceline.errors import CaptureMismatch
from paceline.extract.engine import num_needed_tokens

_REQUEST_PREFIX = "paceline-sample-"
# vLLM appends "-" and random characters to the driver's id before a worker sees it.
_REQUEST_PATTERN = re.compile(re.escape(_REQUEST_PREFIX) + r"(\d+)(?:-.*)?")


def request_id(number: int) -> str:
    """The driver's id of the request that captures a sample; numbers are never used twice."""
    return f"{_REQUEST_PREFIX}{number}"


def sample_number(worker_request_id: str) -> int | None:
    """The sample's number in a request id as a worker sees it; None: not a capture."""
    found = _REQUEST_PATTERN.fullmatch(worker_request_id)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class StepBatch:
    """A runner's own description of the rows that it ran.

    request_ids: Q ids in row order. counts: rows of each, int64 [Q]. query_starts: where each one's
    rows begin, and the end, int64 [Q + 1]. starts: each one's first position, int64 [Q], as the
    scheduler said. computed: the same as the runner noted it, where it does.
    """

    request_ids: list[str]
    counts: np.ndarray
    query_starts: np.ndarray
    starts: np.ndarray
    computed: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class Segment:
    """Positions [start, stop) of one sample at rows [row, row + stop - start) of a step."""

    number: int
    start: int
    stop: int
    row: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.stop - self.start)


def check_batch(batch: StepBatch, scheduled: Mapping[str, int]) -> None:
    """The description agrees with itself and with the scheduler's output; else CaptureMismatch."""
    described = dict(zip(batch.request_ids, batch.counts.tolist(), strict=True))
    if len(described) != len(batch.request_ids):
        raise CaptureMismatch(f"a request is in the batch twice: {batch.request_ids}")
    if described != dict(scheduled):
        raise CaptureMismatch(f"the batch ran {described}, the scheduler had asked for {scheduled}")
    expected = np.concatenate([[0], np.cumsum(batch.counts)])
    if not np.array_equal(batch.query_starts, expected):
        raise CaptureMismatch(
            f"rows begin at {batch.query_starts.tolist()}; by the counts they should begin at "
            f"{expected.tolist()}"
        )
    if batch.computed is not None and not np.array_equal(batch.computed, batch.starts):
        raise CaptureMismatch(
            f"the runner had computed {batch.computed.tolist()} tokens of its requests, the "
            f"scheduler says {batch.starts.tolist()}"
        )


def segments_of(batch: StepBatch, samples: Mapping[int, TokenSample]) -> list[Segment]:
    """The segments of known samples. Rows past a sample's needed tokens belong to nobody."""
    segments = []
    for i, worker_id in enumerate(batch.request_ids):
        number = sample_number(worker_id)
        if number is None or number not in samples:
            continue
        start = int(batch.starts[i])
        stop = min(start + int(batch.counts[i]), num_needed_tokens(samples[number]))
        if stop > start:
            segments.append(Segment(number, start, stop, int(batch.query_starts[i])))
    return segments


def prove(segment: Segment, sample: TokenSample, tokens: np.ndarray, positions: np.ndarray) -> None:
    """The model was fed this sample's tokens at these positions; else CaptureMismatch.

    tokens, positions: int [N], what the forward pass got.
    """
    where = f"sample {sample.sample_id}, positions {segment.start} to {segment.stop - 1}"
    expected = np.arange(segment.start, segment.stop)
    if not np.array_equal(positions[segment.rows], expected):
        found = positions[segment.rows]
        raise CaptureMismatch(
            f"{where}: the model ran other positions ({_ends(found)}) at rows {segment.row} on"
        )
    wanted = sample.input_ids[segment.start : segment.stop]
    wrong = np.flatnonzero(tokens[segment.rows] != wanted)
    if len(wrong):
        first = int(wrong[0])
        raise CaptureMismatch(
            f"{where}: the model was fed token {int(tokens[segment.rows][first])} at position "
            f"{segment.start + first}, the sample has {int(wanted[first])} ({len(wrong)} tokens "
            "differ)"
        )


def _ends(values: np.ndarray) -> str:
    return f"{int(values[0])} to {int(values[-1])}" if len(values) else "none"
