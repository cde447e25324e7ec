"""Server-free acceptance: a chain of draft tokens from every verify point, compared with what the
target did write. The draft reads its own tokens and states, as in a server."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from paceline.acceptance.counts import Answer
from paceline.acceptance.spans import Span, answer_spans
from paceline.draft.batch import PackedBatch, pack
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll
from paceline.store import Store, StoredSample

# Rows whose logits are in memory at a time.
_CHUNK_ROWS = 2048


def spans_of(sample: StoredSample) -> list[Span]:
    return answer_spans(sample.loss_mask.numpy(), sample.record.num_past_end)


def draft_answers(
    draft: Draft, store: Store, groups: Iterator[list[int]], longest: int
) -> Iterator[tuple[StoredSample, list[Answer]]]:
    """Each sample of each group of store indices, with its answers as the draft walks them."""
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    for group in groups:
        samples = [store.read(i) for i in group]
        spans = [spans_of(sample) for sample in samples]
        batch = pack(samples).to(device, dtype)
        row_starts = [0, *accumulate(len(sample.aux) for sample in samples)]
        answers = answers_of_batch(draft, batch, spans, row_starts, longest)
        yield from zip(samples, answers, strict=True)


def answers_of_batch(
    draft: Draft,
    batch: PackedBatch,
    spans: Sequence[Sequence[Span]],
    row_starts: Sequence[int],
    longest: int,
) -> list[list[Answer]]:
    """The answers of each document of a batch as the draft walks them.

    spans: of each document; row_starts: where each document's rows begin in the batch, and the end.
    """
    known_T = np.zeros(row_starts[-1], np.int64)
    rows = [
        [span.rows(start) for span in of_document]
        for start, of_document in zip(row_starts, spans, strict=False)
    ]
    for of_document, slices in zip(spans, rows, strict=True):
        for span, part in zip(of_document, slices, strict=True):
            known_T[part] = span.known()
    known = torch.from_numpy(known_T).to(batch.positions.device)
    match = match_lengths(draft, batch, known, longest).cpu().numpy()
    return [[Answer(match[part], known_T[part]) for part in slices] for slices in rows]


@torch.inference_mode()
def match_lengths(
    draft: Draft, batch: PackedBatch, known_T: torch.Tensor, longest: int
) -> torch.Tensor:
    """Leading draft tokens that are right at each row, int64 [T]; 0 where nothing is drafted.

    known int64 [T]: tokens on record after the token that the row reads, 0 for rows from which
    nothing is drafted. Rows whose last token was wrong draft no further: it cannot matter.
    """
    match = torch.zeros_like(batch.positions)
    rows = torch.nonzero(known_T > 0).squeeze(1)
    if not len(rows):
        return match
    unroll = Unroll(draft, batch.aux, batch.next_ids, batch.positions, batch.starts)
    state = unroll.first(rows)
    for step in range(longest):
        proposed = torch.cat([draft.propose(part) for part in state.split(_CHUNK_ROWS)])
        right = proposed == batch.read_ids(rows, step + 1)
        match[rows[right]] += 1
        keep = torch.nonzero(right & (known_T[rows] > step + 1)).squeeze(1)
        if not len(keep) or step + 1 == longest:
            break
        rows = rows[keep]
        state = unroll.next(proposed[keep], keep)
    return match
