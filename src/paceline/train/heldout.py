"""What a draft makes of held-out data while it trains: loss, the figures of each TTT step, and the
acceptance length by the walk of `evaluate`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.acceptance.chain import answers_of_batch
from paceline.acceptance.counts import Counts, pool, walk
from paceline.acceptance.spans import Span, answer_spans
from paceline.artefact import write_json
from paceline.contracts import HELDOUT_SPLIT
from paceline.draft.batch import from_packed
from paceline.draft.losses import StepSums
from paceline.errors import TrainingError
from paceline.recipe import TrainOptions
from paceline.store import Follower, PackedReader, PackedSamples, Store
from paceline.train.loop import Trainer, figures

SAMPLES_FILE = "heldout.json"
_BOOTSTRAP, _SEED = 2000, 0
_TOLD = (
    "acceptance_length",
    "interval",
    "per_position",
    "verify_steps",
    "accepted",
    "left_out",
    "conversations",
)


def choose_samples(store: Store | Follower, folder: Path, limit: int | None) -> list[int]:
    """Store indices of at most `limit` held-out samples, spread evenly; None for all.

    They are kept in the run's folder: a store that is still written will have more of them later,
    and figures of different steps are to be of the same samples.
    """
    path = folder / SAMPLES_FILE
    if path.is_file() and (kept := json.loads(path.read_text()))["limit"] == limit:
        return kept["samples"]
    known = store.split(HELDOUT_SPLIT)
    count = len(known) if limit is None else min(limit, len(known))
    chosen = known[np.arange(count) * len(known) // max(count, 1)].tolist()
    if chosen:
        write_json(path, {"limit": limit, "samples": chosen})
    return chosen


def refuse_blind_choice(store: Store | Follower, options: TrainOptions) -> None:
    """Raises TrainingError, before the first step, where the best draft is asked for and no look
    will be able to tell it. Of a stream not all is known yet."""
    if not options.load_best_model_at_end:
        return
    if not store.expected_rows(HELDOUT_SPLIT):
        raise no_samples(store)
    known, records = store.split(HELDOUT_SPLIT), store.records
    # At most so many tokens are on record after the first verify point of an answer.
    after_first = records.num_supervised[known] - 1 + records.num_past_end[known]
    if len(known) and after_first.max() < options.eval_draft_tokens:
        raise no_length(store, options)


def no_samples(store: Store | Follower) -> TrainingError:
    return TrainingError(
        f"{store.folder} holds no held-out sample to tell the best draft by: `prepare` with "
        "heldout_share, or train without load_best_model_at_end"
    )


def no_length(store: Store | Follower, options: TrainOptions) -> TrainingError:
    return TrainingError(
        f"no held-out answer of {store.folder} has eval_draft_tokens "
        f"({options.eval_draft_tokens}) tokens on record after a verify point, so the best draft "
        "cannot be told: lower eval_draft_tokens, or train without load_best_model_at_end"
    )


@torch.no_grad()
def heldout_figures(
    trainer: Trainer, samples: list[int], num_draft_tokens: int
) -> dict[str, Any] | None:
    """Loss, figures of each TTT step and `acceptance`, that of chains of num_draft_tokens; None
    where there are no samples. All ranks enter, each with a share of the samples."""
    if not samples:
        return None
    ranks, num_steps = trainer.ranks, trainer.options.ttt_steps
    sums = torch.zeros(5, num_steps, device=ranks.device)
    counts = torch.zeros(len(samples), 3 + num_draft_tokens, dtype=torch.int64)
    place = {sample: i for i, sample in enumerate(samples)}
    groups = trainer.plan.groups(samples)
    reader = PackedReader(trainer.store, groups, device=ranks.device)
    with trainer.parallel.whole_draft():
        for group, packed in zip(groups, reader, strict=True):
            batch = from_packed(packed).to(ranks.device, trainer.dtype)
            sums += trainer.loss(batch, num_steps, 1)[1].stacked()
            answers = answers_of_batch(
                trainer.draft, batch, _spans(packed), packed.aux_starts, num_draft_tokens
            )
            for sample, of_sample in zip(group, answers, strict=True):
                counts[place[sample]] = _row(walk(of_sample, num_draft_tokens))
    seen = figures(StepSums(*ranks.sum(sums)), trainer.options.step_decay)
    all_counts = ranks.sum(counts.to(ranks.device)).tolist()
    return {**seen, "acceptance": _pooled(trainer.store, samples, all_counts)}


def _spans(packed: PackedSamples) -> list[Sequence[Span]]:
    mask, starts = packed.loss_mask.numpy(), packed.token_starts
    return [
        answer_spans(mask[start:stop], record.num_past_end)
        for record, start, stop in zip(packed.records, starts, starts[1:], strict=False)
    ]


def _row(counts: Counts) -> torch.Tensor:
    sums = [counts.verify_steps, counts.accepted, counts.left_out, *counts.per_position]
    return torch.tensor(sums, dtype=torch.int64)


def _pooled(store: Store | Follower, samples: list[int], rows: list[list[int]]) -> dict[str, Any]:
    """Answers of one conversation are resampled together; two sources may number theirs alike."""
    found: dict[tuple[str, str], Counts] = {}
    for sample, (steps, accepted, left_out, *per_position) in zip(samples, rows, strict=True):
        record = store.records[sample]
        counts = Counts(steps, accepted, np.array(per_position), left_out)
        name = (record.conversation_id or record.sample_id, record.source)
        if name in found:
            found[name].add(counts)
        else:
            found[name] = counts
    pooled = pool(list(found.values()), _BOOTSTRAP, _SEED)
    return {"num_draft_tokens": len(rows[0]) - 3, **{name: pooled[name] for name in _TOLD}}
