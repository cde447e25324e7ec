"""A step whose loss or gradient is not finite, kept whole so that it can be run again.

`nan_batch/` holds `draft.json` and `draft.safetensors` (the weights before the step, float32),
`batch.safetensors` (each micro-batch, packed as it was read) and `batch.json` (which samples, which
options, what was seen). Legend: T rows with states, N tokens, M supervised tokens, A auxiliary
states, D target width.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from paceline.artefact import replaced_folder, write_atomically, write_json
from paceline.draft.checkpoint import write_draft
from paceline.errors import StoreError, UsageError
from paceline.store import Follower, PackedReader, PackedSamples, Store
from paceline.train.loop import Trainer
from paceline.train.optimiser import NotFinite
from paceline.train.weights import kept_tensors

FOLDER = "nan_batch"
_BATCH, _RECORD = "batch.safetensors", "batch.json"
_TENSORS = ("input_ids", "loss_mask", "aux", "last")
_NAMED = 8  # samples in the error's text


@dataclass(frozen=True)
class Documents:
    """Implements draft.batch.PackedDocuments. last_starts: where each document's rows of `last`
    begin, and the end."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    token_starts: list[int]
    aux_starts: list[int]
    last_starts: list[int]

    def __iter__(self) -> Iterator["Documents"]:
        """Each document alone."""
        cuts = (pairwise(s) for s in (self.token_starts, self.aux_starts, self.last_starts))
        for (t, t_end), (a, a_end), (m, m_end) in zip(*cuts, strict=True):
            yield Documents(
                self.input_ids[t:t_end],
                self.loss_mask[t:t_end],
                self.aux[a:a_end],
                self.last[m:m_end],
                [0, t_end - t],
                [0, a_end - a],
                [0, m_end - m],
            )

    def not_finite(self) -> dict[str, int]:
        """How many values of each state are none: {"aux 0": 3, "last": 1}; empty where all are."""
        states = {f"aux {i}": self.aux[:, i] for i in range(self.aux.shape[1])}
        found = {n: int((~s.isfinite()).sum()) for n, s in (states | {"last": self.last}).items()}
        return {name: count for name, count in found.items() if count}


def keep_step(folder: Path, trainer: Trainer, about: dict[str, Any], found: NotFinite) -> str:
    """Save the step that the trainer made last, of which no weight was moved. Returns what to tell:
    what was seen, in which samples, where they are and what to do. about: see BestDraft.

    All ranks enter, since all of them find it; the first one reads and writes what all had.
    """
    ranks, step = trainer.ranks, trainer.in_doubt
    shares = ranks.gather((step.groups, found.loss))
    groups = [group for of_rank, _ in shares for group in of_rank if group]
    whole = NotFinite(found.norm, sum(loss for _, loss in shares))
    tensors = kept_tensors(trainer)
    return ranks.from_first(lambda: _kept(folder, trainer, about, whole, groups, tensors))


def _kept(
    folder: Path,
    trainer: Trainer,
    about: dict[str, Any],
    found: NotFinite,
    groups: list[list[int]],
    tensors: dict[str, torch.Tensor],
) -> str:
    step = trainer.in_doubt
    batches = list(_read_again(trainer.store, groups))
    samples = [sample for _, of_batch in batches for sample in of_batch]
    where = folder / FOLDER
    seen = f"optimiser step {step.number}: {found}. {_names(samples)}"
    try:
        _save(where, trainer, about, found, batches, tensors)
    except StoreError as error:
        return f"{seen} {_advice(samples, trainer)} The step could not be kept: {error}"
    return (
        f"{seen} They and the weights before the step are in {where}: `paceline replay {where}` "
        f"computes it again, sample by sample. {_advice(samples, trainer)}"
    )


def load_step(folder: Path) -> tuple[dict[str, Any], list[Documents]]:
    """What `batch.json` says, and the micro-batches. Raises UsageError for a folder without."""
    if not (folder / _RECORD).is_file():
        raise UsageError(
            f"{folder} holds no step to replay: it has no {_RECORD}. Name the folder `{FOLDER}` of "
            "a training that stopped at a loss or gradient that is not finite"
        )
    record = json.loads((folder / _RECORD).read_text())
    tensors = load_file(folder / _BATCH)
    batches = [
        Documents(**{name: tensors[f"{i}.{name}"] for name in _TENSORS}, **starts)
        for i, starts in enumerate(record["micro_batches"])
    ]
    return record, batches


def _read_again(
    store: Store | Follower, groups: list[list[int]]
) -> Iterator[tuple[Documents, list[dict[str, Any]]]]:
    """Each micro-batch and what is to be said of its samples. They are still in the store: a stream
    lets samples go only after a checkpoint, which looks at the step first."""
    for packed in PackedReader(store, groups):
        batch = _copied(packed)
        yield (
            batch,
            [
                {
                    "sample_id": record.sample_id,
                    "shard": str(store.shard(record.shard).path),
                    "not_finite": alone.not_finite(),
                }
                for record, alone in zip(packed.records, batch, strict=True)
            ],
        )


def _copied(packed: PackedSamples) -> Documents:
    """The reader uses its memory again."""
    tensors = {name: getattr(packed, name).clone() for name in _TENSORS}
    starts = (packed.token_starts, packed.aux_starts, packed.last_starts)
    return Documents(**tensors, **dict(zip(_STARTS, map(list, starts), strict=True)))


_STARTS = ("token_starts", "aux_starts", "last_starts")


def _save(
    where: Path,
    trainer: Trainer,
    about: dict[str, Any],
    found: NotFinite,
    batches: list[tuple[Documents, list[dict[str, Any]]]],
    weights: dict[str, torch.Tensor],
) -> None:
    step = trainer.in_doubt
    tensors = {
        f"{i}.{name}": getattr(batch, name)
        for i, (batch, _) in enumerate(batches)
        for name in _TENSORS
    }
    record = {
        **about,
        "step": step.number,
        "loss": str(found.loss),
        "grad_norm": str(found.norm),
        "ttt_steps": trainer.ttt_steps(step.number),
        "num_rows": step.num_rows,
        "last_is_normed": trainer.store.spec.last_is_normed,
        "options": trainer.options.model_dump(mode="json"),
        "samples": [sample for _, of_batch in batches for sample in of_batch],
        "micro_batches": [{n: getattr(batch, n) for n in _STARTS} for batch, _ in batches],
    }
    with replaced_folder(where) as aside:
        write_draft(aside, trainer.draft.config, weights)
        write_atomically(aside / _BATCH, save(tensors))
        write_json(aside / _RECORD, record)


def _names(samples: list[dict[str, Any]]) -> str:
    named = ", ".join(sample["sample_id"] for sample in samples[:_NAMED])
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return f"Its samples: {named}{more}."


def _advice(samples: list[dict[str, Any]], trainer: Trainer) -> str:
    if bad := [sample for sample in samples if sample["not_finite"]]:
        layers = [f"k={k}" for k in trainer.store.spec.layers.aux]
        told = "; ".join(
            f"sample {sample['sample_id']} in {sample['shard']}: {_places(sample, layers)}"
            for sample in bad[:_NAMED]
        )
        return (
            f"Stored states are not finite: {told}. Extract these samples anew, or take them out "
            "with `paceline delete-samples`, and train into another folder."
        )
    return (
        "All states that it read are finite, so the draft has diverged: lower learning_rate (it is "
        f"{trainer.options.learning_rate:g}) or raise warmup_steps, and train into another folder."
    )


def _places(sample: dict[str, Any], layers: list[str]) -> str:
    names = {f"aux {i}": layer for i, layer in enumerate(layers)} | {"last": "the last state"}
    return ", ".join(f"{n} values of {names[p]}" for p, n in sample["not_finite"].items())
