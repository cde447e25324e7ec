"""The training loop: optimiser steps, logs, checkpoints, held-out figures; nothing else.

One optimiser step reads top to bottom in `Trainer.step`. Legend: S TTT steps.
"""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.contracts import HELDOUT_SPLIT
from paceline.draft.batch import PackedBatch, from_packed
from paceline.draft.losses import StepSums, Teacher
from paceline.draft.model import Draft
from paceline.errors import TrainingError
from paceline.recipe import TrainOptions
from paceline.store import Follower, PackedReader, Store
from paceline.train.batches import Step, StepPlan
from paceline.train.optimiser import MasterAdamW
from paceline.train.parallel import Alone
from paceline.train.ranks import Ranks
from paceline.train.reading import ReadStep, read_steps
from paceline.train.schedule import learning_rate

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Everything that one run moves. total_steps: optimiser steps of the whole run."""

    draft: Draft
    teacher: Teacher
    optimiser: MasterAdamW
    store: Store | Follower
    plan: StepPlan
    options: TrainOptions
    total_steps: int
    dtype: torch.dtype
    ranks: Ranks
    parallel: Alone

    def ttt_steps(self, step: int) -> int:
        """TTT steps at an optimiser step: one during the warm-up share, then all."""
        warming = step < self.options.ttt_warmup * self.total_steps
        return 1 if warming else self.options.ttt_steps

    def run(self, start: int) -> Iterator[tuple[Step, dict[str, Any] | None]]:
        """Optimiser steps from `start` to the end, each with its record; a pause has none."""
        steps = self.plan.steps(start, self.total_steps)
        for read in read_steps(self.store, steps, self.ranks.device):
            yield read.step, self.step(read) if read.step.groups else None

    def step(self, read: ReadStep) -> dict[str, Any]:
        """One optimiser step over this rank's micro-batches; the record's sums, of this rank alone,
        stay on the device (see `over_ranks`)."""
        step, num_rows = read.step.number, read.step.num_rows
        if not num_rows:
            raise TrainingError(f"optimiser step {step} has no supervised row")
        total, sums, num_tokens = 0.0, None, 0
        for batch, is_last in read.batches():
            loss, step_sums = self.loss(batch, self.ttt_steps(step), num_rows)
            self.parallel.backward(loss, is_last)
            self.optimiser.accumulate()
            total = total + loss.detach()
            sums = step_sums if sums is None else sums.add(step_sums)
            num_tokens += len(batch.positions)
        rate = learning_rate(
            step,
            self.total_steps,
            self.options.learning_rate,
            self.options.warmup_steps,
            self.options.schedule,
            self.options.min_lr_ratio,
        )
        norm = self.optimiser.step(rate)
        return {
            "step": step,
            "loss": total,
            "sums": sums,
            "learning_rate": rate,
            "grad_norm": norm,
            "rows": num_rows,
            "tokens": num_tokens,
            "step_s": time.perf_counter() - read.began,
            "wait_s": read.wait_s,
        }

    def loss(
        self, batch: PackedBatch, num_steps: int, num_rows: int
    ) -> tuple[torch.Tensor, StepSums]:
        return self.parallel.distil(
            self.draft,
            batch.to(self.ranks.device, self.dtype),
            self.teacher,
            num_steps,
            self.options.step_decay,
            num_rows,
            self.options.logit_chunk,
            self.options.loss,
        )

    @torch.no_grad()
    def heldout(self) -> dict[str, Any] | None:
        """Loss and per-step figures on held-out samples; None where there are none."""
        samples = self.store.split(HELDOUT_SPLIT).tolist()
        if not samples:
            return None
        sums = torch.zeros(5, self.options.ttt_steps, device=self.ranks.device)
        with self.parallel.whole_draft():
            groups = self.plan.groups(samples)
            for packed in PackedReader(self.store, groups, device=self.ranks.device):
                _, step_sums = self.loss(from_packed(packed), self.options.ttt_steps, 1)
                sums += step_sums.stacked()
        return figures(StepSums(*self.ranks.sum(sums)), self.options.step_decay)


def over_ranks(record: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A step's record with the sums of all ranks and the longest wait. All ranks enter."""
    sums = record["sums"].stacked()
    more = torch.tensor([float(record["loss"]), record["tokens"]], dtype=torch.float64)
    loss, tokens = ranks.sum(more.to(sums.device)).tolist()
    return {
        **record,
        "sums": StepSums(*ranks.sum(sums)),
        "loss": loss,
        "tokens": int(tokens),
        "wait_s": ranks.largest(record["wait_s"]),
    }


def figures(sums: StepSums, step_decay: float) -> dict[str, Any]:
    """Means per TTT step out of sums; None for a step without rows. Reads from the device."""
    rows = sums.rows.tolist()
    mean = lambda values: [v / n if n else None for v, n in zip(values.tolist(), rows, strict=True)]
    loss = sums.loss.tolist()
    return {
        "loss": sum(step_decay**j * value for j, value in enumerate(loss)) / max(rows[0], 1.0),
        "kl": mean(sums.kl),
        "top1_agreement": mean(sums.agree),
        "acceptance_rate": mean(sums.overlap),
        "rows": [int(n) for n in rows],
    }


def append_record(path: Path, record: dict[str, Any]) -> None:
    """One JSON line a record."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
