"""Mode chain at a temperature: the acceptance to expect of speculative sampling, without sampling.

Given what the target has written, a draft token x is taken with probability min(1, q(x) / p(x))
(q the draft's distribution, p the target's), and over the next token that makes the overlap
sum(min(p, q)). So the expected number of verify steps from each point of an answer, and what they
accept, follow by adding up, for answers that the target sampled at this temperature.
Legend: R rows, S draft positions, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from paceline.acceptance.chain import spans_of
from paceline.acceptance.counts import Counts
from paceline.draft.batch import PackedBatch, pack
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll
from paceline.store import Store, StoredSample
from paceline.target.model import TeacherHead

_CHUNK_ROWS = 128


@dataclass(frozen=True)
class Chances:
    """Of one answer's verify points, float64 [points, S].

    overlap[i, j]: chance that draft token j after point i is taken, those before it being what the
    target wrote; nan where the target's distribution is not on record. taken[i, j]: chance that
    the target's own token there is drafted and taken, given that it was written; 0 where unknown.
    """

    overlap: np.ndarray
    taken: np.ndarray


def expected_counts(chances: Chances, num_draft_tokens: int) -> Counts:
    """Expected verify steps, accepted tokens and accepted per position of one answer (floats).

    The walk of `acceptance.walk` with chances in place of certainties: a point is reached with
    some probability, and goes on to the points after it. Steps whose distributions are not all on
    record are left out, as there.
    """
    overlap = chances.overlap[:, :num_draft_tokens]
    taken = chances.taken[:, :num_draft_tokens]
    num_points = len(overlap)
    # [points, K + 1]: chance that the first j of the target's own tokens are all taken.
    prefix = np.cumprod(np.column_stack([np.ones(num_points), taken]), axis=1)
    reached = np.zeros(num_points + num_draft_tokens + 1)
    reached[:1] = 1.0
    counts = Counts(0.0, 0.0, np.zeros(num_draft_tokens), 0.0)
    for point in range(num_points):
        chance = reached[point]
        exactly = prefix[point] - np.append(prefix[point, 1:], 0.0)
        reached[point + 1 : point + num_draft_tokens + 2] += chance * exactly
        if np.isnan(overlap[point]).any():
            counts.left_out += chance
            continue
        accepted = prefix[point, :-1] * overlap[point]
        counts.verify_steps += chance
        counts.accepted += chance * accepted.sum()
        counts.per_position += chance * accepted
    return counts


def draft_chances(
    draft: Draft,
    head: TeacherHead,
    store: Store,
    groups: Iterator[list[int]],
    longest: int,
    temperature: float,
) -> Iterator[tuple[StoredSample, list[Chances]]]:
    """Each sample of each group of store indices, with the chances of its answers."""
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    for group in groups:
        samples = [store.read(i) for i in group]
        batch = pack(samples).to(device, dtype)
        overlap, taken = (
            table.cpu().numpy()
            for table in chances_of_rows(draft, head, batch, longest, temperature)
        )
        start = 0
        for sample in samples:
            rows = [span.rows(start) for span in spans_of(sample)]
            yield sample, [Chances(overlap[r], taken[r]) for r in rows]
            start += len(sample.aux)


@torch.inference_mode()
def chances_of_rows(
    draft: Draft, head: TeacherHead, batch: PackedBatch, longest: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """overlap and taken, float64 [T, S], as in Chances, of every row of a batch.

    The draft reads what the target wrote, not its own tokens: only then does it go on.
    """
    overlap = torch.full((len(batch.positions), longest), torch.nan, dtype=torch.float64)
    taken = torch.zeros_like(overlap)
    rows = batch.supervised_rows(0)
    if not len(rows):
        return overlap, taken
    unroll = Unroll(draft, batch.aux, batch.next_ids, batch.positions, batch.starts)
    state = unroll.first(rows)
    for step in range(longest):
        teacher = batch.last[batch.teacher_rows(rows, step)]
        known = batch.run_length[rows] > step + 1
        # The token that is drafted at this step; where it is not the answer's it is not asked for.
        ids = batch.read_ids(rows[known], step + 1)
        for chunk in torch.arange(len(rows), device=rows.device).split(_CHUNK_ROWS):
            p_RV = (head(teacher[chunk]).double() / temperature).softmax(-1)
            q_RW = (draft.logits(state[chunk]).double() / temperature).softmax(-1)
            q_RV = _over_target_ids(draft, q_RW)
            overlap[rows[chunk].cpu(), step] = torch.minimum(p_RV, q_RV).sum(-1).cpu()
            inside = known[chunk]
            own = ids[known.cumsum(0)[chunk][inside] - 1][:, None]
            ratio = q_RV[inside].gather(1, own) / p_RV[inside].gather(1, own)
            taken[rows[chunk][inside].cpu(), step] = ratio.clamp(max=1.0)[:, 0].cpu()
        keep = torch.nonzero(known).squeeze(1)
        if not len(keep) or step + 1 == longest:
            break
        rows, state = rows[keep], unroll.next(batch.read_ids(rows[keep], step + 1), keep)
    return overlap, taken


def _over_target_ids(draft: Draft, q_RW: torch.Tensor) -> torch.Tensor:
    """A distribution over the draft vocabulary as one over the target's, [R, V]."""
    ids_W = draft.target_ids(torch.arange(q_RW.shape[1], device=q_RW.device))
    q_RV = q_RW.new_zeros(len(q_RW), draft.config.vocab_size)
    return q_RV.index_copy_(1, ids_W, q_RW)
