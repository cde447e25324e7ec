"""Server-free acceptance: a chain of draft tokens from every verify point, compared with what the
target did write. The draft reads its own tokens and states, as in a server."""

from collections.abc import Iterator

import numpy as np
import torch

from paceline.draft.batch import PackedBatch, pack
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll
from paceline.evaluate.acceptance import Answer
from paceline.evaluate.spans import Span, answer_spans
from paceline.store import Store, StoredSample


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
        known = _known_after_rows(samples, spans).to(device)
        match = match_lengths(draft, batch, known, longest).cpu().numpy()
        start = 0
        for sample, of_sample in zip(samples, spans, strict=True):
            # A point after token t is drafted from row t - 1.
            rows = [slice(start + s.first - 1, start + s.end - 1) for s in of_sample]
            answers = zip(rows, of_sample, strict=True)
            yield sample, [Answer(match[r], span.known()) for r, span in answers]
            start += len(sample.aux)


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
        proposed = draft.propose(state)
        right = proposed == batch.read_ids(rows, step + 1)
        match[rows[right]] += 1
        keep = torch.nonzero(right & (known_T[rows] > step + 1)).squeeze(1)
        if not len(keep) or step + 1 == longest:
            break
        rows = rows[keep]
        state = unroll.next(proposed[keep], keep)
    return match


def _known_after_rows(samples: list[StoredSample], spans: list[list[Span]]) -> torch.Tensor:
    parts = []
    for sample, of_sample in zip(samples, spans, strict=True):
        known = np.zeros(len(sample.aux), np.int64)
        for span in of_sample:
            known[span.first - 1 : span.end - 1] = span.known()
        parts.append(known)
    return torch.from_numpy(np.concatenate(parts))
