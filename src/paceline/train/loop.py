"""The training loop: optimiser steps and what is seen of them; nothing else.

One optimiser step reads top to bottom in `Trainer.step`. Legend: S TTT steps.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.draft.batch import PackedBatch
from paceline.draft.losses import StepSums, Teacher
from paceline.draft.model import Draft
from paceline.errors import TrainingError
from paceline.recipe import TrainOptions
from paceline.store import Follower, Store
from paceline.train.batches import Step, StepPlan
from paceline.train.flops import needed_flops
from paceline.train.noise import noise_generator, with_noise
from paceline.train.optimiser import MasterAdamW
from paceline.train.parallel import Alone
from paceline.train.ranks import Ranks
from paceline.train.reading import ReadStep, read_steps
from paceline.train.schedule import learning_rate

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Everything that one run moves. frozen: weights that it does not, float32 on the CPU.
    in_doubt: the step that the optimiser was given last, the one to blame where it finds what is
    not finite."""

    draft: Draft
    frozen: dict[str, torch.Tensor]
    teacher: Teacher
    optimiser: MasterAdamW
    store: Store | Follower
    plan: StepPlan
    options: TrainOptions
    dtype: torch.dtype
    ranks: Ranks
    parallel: Alone
    in_doubt: Step | None = field(init=False, default=None)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.plan.length.num_steps

    def ttt_steps(self, step: int) -> int:
        """TTT steps at an optimiser step: one during the warm-up share, then all."""
        warming = step < self.options.ttt_warmup * self.total_steps
        return 1 if warming else self.options.ttt_steps

    def run(self, start: int) -> Iterator[tuple[Step, dict[str, Any] | None]]:
        """Optimiser steps from `start` to the end, each with its record; a pause has none."""
        steps = self.plan.steps(start)
        for read in read_steps(self.store, steps, self.ranks.device):
            yield read.step, self.step(read) if read.step.groups else None

    def step(self, read: ReadStep) -> dict[str, Any]:
        """One optimiser step over this rank's micro-batches; the record's sums, of this rank alone,
        stay on the device (see `over_ranks`)."""
        step, num_rows = read.step.number, read.step.num_rows
        if not num_rows:
            raise TrainingError(f"optimiser step {step} has no supervised row")
        total, sums, num_tokens, flops = 0.0, None, 0, 0.0
        generator = noise_generator(self.options.seed, step, self.ranks)
        for clean, is_last in read.batches():
            batch = self._noised(clean, generator)
            loss, step_sums = self.loss(batch, self.ttt_steps(step), num_rows)
            self.parallel.backward(loss, is_last)
            self.optimiser.accumulate()
            total = total + loss.detach()
            sums = step_sums if sums is None else sums.add(step_sums)
            num_tokens += len(batch.positions)
            flops += self.needed_flops(batch, self.ttt_steps(step))
        rate = learning_rate(
            step,
            self.total_steps,
            self.options.learning_rate,
            self.options.warmup_steps,
            self.options.schedule,
            self.options.min_lr_ratio,
        )
        self.optimiser.check()  # of the step before: what a GPU made of it is known only now
        self.in_doubt = read.step
        norm = self.optimiser.step(rate, total)
        return {
            "step": step,
            "loss": total,
            "sums": sums,
            "learning_rate": rate,
            "grad_norm": norm,
            "rows": num_rows,
            "tokens": num_tokens,
            "needed_flops": flops,
            "wait_s": read.wait_s,
        }

    def needed_flops(self, batch: PackedBatch, num_steps: int) -> float:
        """Of a micro-batch with this draft and teacher; see `flops`."""
        config, is_whole = self.draft.config, self.teacher.columns is not None
        return needed_flops(
            config,
            batch,
            num_steps,
            trains_head=self.draft.lm_head.weight.requires_grad,
            teacher_width=config.vocab_size if is_whole else config.draft_vocab_size,
        )

    def _noised(self, batch: PackedBatch, generator: torch.Generator) -> PackedBatch:
        share = self.options.state_noise
        return replace(batch, aux=with_noise(batch.aux, share, generator)) if share else batch

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


def over_ranks(record: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A step's record with the sums of all ranks and the longest wait. All ranks enter."""
    sums = record["sums"].stacked()
    more = [float(record["loss"]), record["tokens"], record["needed_flops"]]
    more = torch.tensor(more, dtype=torch.float64).to(sums.device)
    loss, tokens, flops = ranks.sum(more).tolist()
    return {
        **record,
        "sums": StepSums(*ranks.sum(sums)),
        "loss": loss,
        "tokens": tokens,
        "needed_flops": flops,
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
