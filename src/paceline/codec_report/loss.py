"""What a codec does to states: errors of each layer, and what they do to the target's words.

Legend: M supervised tokens, V logit width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import StoreError
from paceline.extract.reference import relative_error
from paceline.progress import progress_bar
from paceline.store import Store, StoredSample
from paceline.target.model import TeacherHead

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class Pairs:
    """Two stores of the same samples: as the engine gave them, and through a codec."""

    plain: Store
    coded: Store

    def __iter__(self) -> Iterator[tuple[StoredSample, StoredSample]]:
        if len(self.plain) != len(self.coded):
            raise StoreError(f"{self.coded.folder} has other samples than {self.plain.folder}")
        return map(self.read, range(len(self.plain)))

    def read(self, index: int) -> tuple[StoredSample, StoredSample]:
        """A sample by its index in `plain`."""
        plain = self.plain.read(index)
        return plain, self.coded.read(self.coded.records.find(plain.record.sample_id))


def errors_of(pairs: Pairs) -> tuple[dict[str, dict[str, float]], bool]:
    """For each k the error of its rows relative to their norms; and whether every bit is the same.

    The first token of a sequence, where massive activations sit, has figures of its own.
    """
    plan = pairs.plain.spec.layers
    rows: dict[int, list[torch.Tensor]] = {k: [] for k in plan.all}
    first: dict[int, list[torch.Tensor]] = {k: [] for k in plan.aux}
    is_same = True
    with progress_bar("errors", len(pairs.plain), "sample") as bar:
        for plain, coded in pairs:
            is_same &= _same_bits(plain.aux, coded.aux) and _same_bits(plain.last, coded.last)
            for i, k in enumerate(plan.aux):
                errors = relative_error(coded.aux[:, i], plain.aux[:, i])
                first[k].append(errors[:1])
                rows[k].append(errors[1:])
            rows[plan.last].append(relative_error(coded.last, plain.last))
            bar.advance(1)
    figures = {f"k={k}": _figures(torch.cat(found)) for k, found in rows.items()}
    for k, found in first.items():
        figures[f"k={k}"]["first_token_median"] = float(torch.cat(found).median())
    return figures, is_same


def _figures(errors: torch.Tensor) -> dict[str, float]:
    # Not torch's quantile, which takes no more than 16 million values.
    p99 = errors.kthvalue(int(0.99 * (len(errors) - 1)) + 1).values
    return {"median": float(errors.median()), "p99": float(p99), "max": float(errors.max())}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@torch.inference_mode()
def kl_of(pairs: Pairs, head: TeacherHead, most_rows: int) -> dict[str, Any]:
    """KL in nats from the target's distribution to that of decoded last states, over the whole
    vocabulary, in float32; and how often both have the same most likely token."""
    plain_rows, coded_rows = _rows_of_all_samples(pairs, most_rows)
    kl, agree = [], 0
    with progress_bar("KL", len(plain_rows), "row") as bar:
        # Many rows at a time: reading the head's weights costs more than multiplying with them.
        for plain, coded in zip(
            plain_rows.split(_CHUNK_ROWS), coded_rows.split(_CHUNK_ROWS), strict=True
        ):
            log_p = head(plain.to(head.weight.device)).float().log_softmax(-1)
            log_q = head(coded.to(head.weight.device)).float().log_softmax(-1)
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1).cpu())
            agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            bar.advance(len(plain))
    found = torch.cat(kl)
    return {
        "mean": float(found.mean()),
        "p99": float(found.quantile(0.99)),
        "rows": len(found),
        "top1_agreement": agree / len(found),
    }


def _rows_of_all_samples(pairs: Pairs, most_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `most_rows` last states, plain and coded, drawn from all: those of one place in their
    samples would be alike."""
    ends = np.cumsum(pairs.plain.records.num_supervised, dtype=np.int64)
    count = min(most_rows, int(ends[-1]))
    rows = np.sort(np.random.default_rng(0).choice(int(ends[-1]), count, replace=False))
    samples = np.searchsorted(ends, rows, side="right")
    plain_rows, coded_rows = [], []
    for index in np.unique(samples).tolist():
        plain, coded = pairs.read(index)
        chosen = torch.from_numpy(rows[samples == index] - (ends[index] - len(plain.last)))
        plain_rows.append(plain.last[chosen])
        coded_rows.append(coded.last[chosen])
    return torch.cat(plain_rows), torch.cat(coded_rows)
